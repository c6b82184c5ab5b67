"""Many rollouts on one sandbox and one retriever, whose processes are killed at random moments meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from spear_agents.engines.base import ByteTokenizer, Sampling
from spear_agents.engines.scripted import InfoWatch, ScriptedEngine
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import StopReason, Trajectory
from spear_envs.code.grammar import write_answer, write_call
from spear_envs.core.making import make_env
from spear_envs.search.grammar import ResponseKind, write_action

__all__ = ["Injury", "Siege", "SiegeReport", "run_siege"]

CODE, SEARCH = "spear/CodeInterpreter-v0", "spear/SearchR1-v0"
TRIES = 60
"""Tries of one episode before it counts as lost."""
START_S = 120.0


class Injury(str, Enum):
    """Process that is killed with SIGKILL."""

    RUN = "run"
    """The first process of a program that is running in the sandbox."""
    ZYGOTE = "zygote"
    """A warm interpreter, and with it all programs that it has started."""
    SANDBOX = "sandbox"
    """The sandbox's server; started again by its supervisor, as containers are."""
    RETRIEVER = "retriever"
    """The retrieval service; started again likewise."""


WEIGHTS = {Injury.RUN: 6, Injury.ZYGOTE: 3, Injury.SANDBOX: 1, Injury.RETRIEVER: 2}


@dataclass
class SiegeReport:
    """Counts of the episodes that were played, by what became of them."""

    seconds: float = 0.0
    episodes: int = 0
    """That came to their end without a fault."""
    calls: int = 0
    """Programs and searches in them."""
    faults: Counter[str] = field(default_factory=Counter)
    """Episodes that a fault ended, by its kind; each was played again."""
    injuries: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Episodes that raised, or never came to their end."""
    wrong: list[str] = field(default_factory=list)
    """Episodes with another reward or another word than in the calm."""
    most_held: int = 0
    """Episodes under way at the same time."""
    slowest_s: float = 0.0
    """Seconds of the slowest episode, all its tries together."""


class Keeper:
    """A service that is started again when it dies, always at the same port."""

    def __init__(self, *command: str) -> None:
        self._command = [sys.executable, "-m", "spear_envs.cli", *command, "--port"]
        self.port = 0
        self.starts = 0
        self.ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it answers."""
        self._task = asyncio.create_task(self._keep())
        await asyncio.wait_for(self.ready.wait(), START_S)

    async def stop(self) -> None:
        """End it for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    async def _keep(self) -> None:
        quiet = subprocess.DEVNULL
        while True:
            process = await asyncio.create_subprocess_exec(
                *self._command, str(self.port), stdout=subprocess.PIPE, stderr=quiet, start_new_session=True
            )
            self._process = process
            self.starts += 1
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            if line.startswith("ready: "):
                self.port = int(line.rpartition(":")[2].partition("/")[0])
                self.ready.set()
            await process.wait()
            self.ready.clear()
            await asyncio.sleep(0.2)  # the port may still be held by what is dying


@dataclass(frozen=True)
class Job:
    """An episode, and which of the two environments plays it."""

    env_id: str
    task_id: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task_id} ({self.seed})"


class Player:
    """Plays mostly like the expert; the rest are failing, slow and talkative programs, odd queries, wrong answers.

    The same task, seed and observations give the same responses, so an episode is the same whenever it is played.
    """

    def __init__(self, env: InfoWatch) -> None:
        self._core: Any = env.unwrapped
        self._template = self._core.templates["default"]

    def __call__(self, prompt: str, dice: random.Random) -> str:
        return self._template.respond(self._choose(dice))

    def _choose(self, dice: random.Random) -> str:
        plan, kind = self._core.expert_plan(), dice.random()
        if kind < 0.6 or self._core.turn >= self._core.max_turns - 1:
            return str(plan[0])
        number = dice.randrange(1000)
        if isinstance(self._core.task.content.get("golden_answers"), (list, tuple)):
            if kind < 0.9:
                return write_action(ResponseKind.SEARCH, f"river {number} é")
            return write_action(ResponseKind.ANSWER, f"nobody {number}")
        if kind < 0.95:
            return write_call(
                dice.choice(
                    [
                        f"print(sum(range({number})))",
                        f"print({number})\nraise ValueError('é {number}')",
                        f"import time\ntime.sleep(0.2)\nprint({number})",
                        f"print('x{number} ' * 3000)",
                        f"import numpy as np\nprint(np.arange({number}).sum())",
                    ]
                )
            )
        return write_answer(str(-number))


@dataclass
class Siege:
    """One siege.

    Args:
        seconds: how long it lasts; what is under way then is played to its end.
        clients: episodes at a time, half of them on each service.
        interval_s: mean time between two injuries; 0 for none.
        jobs: different episodes of each environment.
        seed: of the injuries' times and kinds.
    """

    seconds: float
    clients: int = 64
    interval_s: float = 2.0
    jobs: int = 40
    seed: int = 0

    async def run(self) -> SiegeReport:
        """Play in the calm for comparison, then under siege."""
        sandbox, retriever = Keeper("sandbox", "serve"), Keeper("retriever", "serve")
        try:
            await asyncio.gather(sandbox.start(), retriever.start())
            jobs = self._list_jobs(sandbox, retriever)
            calm = await self._play(sandbox, retriever, iter(jobs), {}, SiegeReport())
            expected = {key: describe(trajectory) for key, trajectory in calm.items()}
            if len(expected) != len(jobs):
                raise RuntimeError("episodes failed before the siege began")
            report = SiegeReport()
            start = time.monotonic()
            chaos = asyncio.create_task(self._injure(sandbox, retriever, report, start + self.seconds))
            endless = (job for _ in iter(int, 1) for job in jobs)
            under_way = self._until(endless, start + self.seconds)
            await self._play(sandbox, retriever, under_way, expected, report)
            await chaos
            report.seconds = time.monotonic() - start
            return report
        finally:
            await asyncio.gather(sandbox.stop(), retriever.stop())

    def _list_jobs(self, sandbox: Keeper, retriever: Keeper) -> list[Job]:
        jobs = []
        for env_id, keywords in self._describe_envs(sandbox, retriever).items():
            env = make_env(env_id, "test", keywords)
            jobs.append([Job(env_id, env.tasks[n % len(env.tasks)].id, n) for n in range(self.jobs)])
            env.close()
        return [job for pair in zip(*jobs, strict=True) for job in pair]

    @staticmethod
    def _describe_envs(sandbox: Keeper, retriever: Keeper) -> dict[str, dict[str, Any]]:
        return {CODE: {"sandbox": sandbox.url}, SEARCH: {"retriever": retriever.url}}

    @staticmethod
    def _until(jobs: Iterator[Job], end: float) -> Iterator[Job]:
        while time.monotonic() < end:
            yield next(jobs)

    async def _play(
        self, sandbox: Keeper, retriever: Keeper, jobs: Iterator[Job], expected: dict[Job, Any], report: SiegeReport
    ) -> dict[Job, Trajectory]:
        """Play jobs with as many places as there are clients; a job that a fault ends is played again."""
        waiting: dict[str, list[Job]] = {CODE: [], SEARCH: []}
        played: dict[Job, Trajectory] = {}
        held = 0

        def take(env_id: str) -> Job | None:
            while not waiting[env_id]:
                job = next(jobs, None)
                if job is None:
                    return None
                waiting[job.env_id].append(job)
            return waiting[env_id].pop(0)

        async def fill_place(env_id: str, keywords: dict[str, Any]) -> None:
            nonlocal held
            with ExitStack() as stack:
                env = InfoWatch(make_env(env_id, "test", keywords))
                stack.callback(env.close)
                core: Any = env.unwrapped
                prompts = PromptBuilder(ByteTokenizer(), core.templates["default"])
                engine = ScriptedEngine(Player(env))
                while (job := take(env_id)) is not None:
                    held += 1
                    report.most_held = max(report.most_held, held)
                    start = time.monotonic()
                    trajectory = await self._play_to_the_end(env, engine, prompts, job, report)
                    report.slowest_s = max(report.slowest_s, time.monotonic() - start)
                    held -= 1
                    if trajectory is None:
                        continue
                    played[job] = trajectory
                    report.episodes += 1
                    report.calls += trajectory.tool_calls
                    if expected and describe(trajectory) != expected[job]:
                        report.wrong.append(f"{job}: {describe(trajectory)} for {expected[job]}")

        envs = self._describe_envs(sandbox, retriever)
        await asyncio.gather(*(fill_place(*list(envs.items())[n % 2]) for n in range(self.clients)))
        return played

    async def _play_to_the_end(
        self, env: InfoWatch, engine: ScriptedEngine, prompts: PromptBuilder, job: Job, report: SiegeReport
    ) -> Trajectory | None:
        for _ in range(TRIES):
            try:
                trajectory = await play_episode(
                    env, engine, prompts, task_id=job.task_id, sampling=Sampling(), seed=job.seed, env_id=job.env_id
                )
            except Exception as error:
                report.lost.append(f"{job}: {error!r}")
                return None
            if trajectory.stop is not StopReason.FAULT:
                return trajectory
            report.faults[str(trajectory.fault)] += 1
            if trajectory.reward != 0:
                report.wrong.append(f"{job}: reward {trajectory.reward} for a fault")
            await asyncio.sleep(0.5)
        report.lost.append(f"{job}: {TRIES} faults")
        return None

    async def _injure(self, sandbox: Keeper, retriever: Keeper, report: SiegeReport, end: float) -> None:
        dice = random.Random(self.seed)
        first = dice.sample(list(Injury), len(Injury))  # each once, whatever the dice say afterwards
        while self.interval_s and (first or time.monotonic() < end):
            await asyncio.sleep(dice.expovariate(1 / self.interval_s))
            injury = first[0] if first else dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            if kill_one(injury, retriever if injury is Injury.RETRIEVER else sandbox, dice):
                report.injuries[injury.value] += 1
                first = first[1:]


def kill_one(injury: Injury, keeper: Keeper, dice: random.Random) -> bool:
    """Kill a process with SIGKILL; False if there is none of the kind at the moment."""
    if not keeper.ready.is_set():
        return False
    generations = list_generations(keeper.pid)
    # Server, launchers, warm interpreters, first processes of runs, programs.
    depth = {Injury.RUN: 3, Injury.ZYGOTE: dice.choice([1, 2])}.get(injury, 0)
    if len(generations) <= depth:
        return False
    try:
        os.kill(dice.choice(sorted(generations[depth])), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def list_generations(pid: int) -> list[set[int]]:
    """A process, its children, their children, and so on."""
    found = [{pid}]
    while found[-1]:
        children: set[int] = set()
        for parent in found[-1]:
            with suppress(OSError):  # it may be gone by now
                for task in os.listdir(f"/proc/{parent}/task"):
                    with suppress(OSError):
                        children |= set(map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split()))
        found.append(children)
    return found[:-1]


def describe(trajectory: Trajectory) -> Any:
    """Return what must be equal whenever an episode is played."""
    terms = tuple(sorted(trajectory.reward_terms.items()))
    turns = tuple((turn.response, turn.observation, turn.action_ok, turn.reward) for turn in trajectory.turns)
    return trajectory.won, trajectory.reward, trajectory.score, terms, turns, trajectory.final_observation


def run_siege(**settings: Any) -> SiegeReport:
    """Run a :class:`Siege` from code that is not asynchronous."""
    return asyncio.run(Siege(**settings).run())
