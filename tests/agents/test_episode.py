"""One episode and many: records, faults, snapshots, places in the cache, and what is played again."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from spear_agents.engines.base import ByteTokenizer, EngineFault, EngineFaultKind, Finish, Generation, Request, Sampling
from spear_agents.engines.scripted import ScriptedEngine
from spear_agents.engines.tensors import RequestBatcher
from spear_agents.evaluation.records import sum_usage
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.rollout import CacheGate, Job, Retrying, play_many
from spear_agents.play.snapshots import Snapshot
from spear_agents.play.trajectory import Layout, StopReason, TokenKind, Trajectory
from spear_agents.viewer.episodes import describe_episode
from spear_agents.viewer.gif import replay_frames
from spear_envs.core.env import ActionResult, RewardMode
from spear_envs.core.errors import SpearError, UnknownTaskError
from spear_envs.core.making import make_env
from spear_envs.core.prompts import CompactTemplate, PromptTemplate
from tests.agents.corridor import CorridorEnv
from tests.agents.test_prompting import PictureTemplate


class Script:
    """Says one text after the other and keeps the calls."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.calls: list[tuple[tuple[int, ...], Sampling, str, int]] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        self.calls.append((tuple(prompt_ids), sampling, request_id, len(images)))
        ids = (*ByteTokenizer().encode(self.texts[len(self.calls) - 1]), 256)
        return Generation(ids, (-0.5,) * len(ids), Finish.STOP)


def say(*words: str) -> list[str]:
    return [f"<think></think><action>{word}</action>" for word in words]


def play(
    env: Any,
    engine: Any,
    task: str = "corridor/test/000",
    layout: Layout = Layout.PER_TURN,
    seed: int = 0,
    template: PromptTemplate | None = None,
    **options: Any,
) -> Trajectory:
    prompts = PromptBuilder(ByteTokenizer(), template or CompactTemplate(), layout, **options)
    return asyncio.run(
        play_episode(env, engine, prompts, task_id=task, sampling=Sampling(), seed=seed, env_id="corridor")
    )


def test_a_won_episode_is_recorded_whole() -> None:
    engine = Script(*say("go", "back", "go", "go"))
    trajectory = play(CorridorEnv(mu=1.0), engine)
    assert (trajectory.stop, trajectory.won, trajectory.score, trajectory.fault) == (StopReason.WON, True, 1.0, None)
    assert [turn.action for turn in trajectory.turns] == ["go", "back", "go", "go"]
    assert [turn.observation for turn in trajectory.turns] == ["P__", "_P_", "P__", "_P_"]
    assert [turn.reward for turn in trajectory.turns] == [-0.1, -0.1, -0.1, 1.0]
    assert trajectory.turns[0].anchor == trajectory.turns[2].anchor != trajectory.turns[1].anchor
    assert trajectory.turns[0].response == say("go")[0]
    assert trajectory.turns[0].log_probs == (-0.5,) * len(trajectory.turns[0].response_ids)
    assert trajectory.reward_terms["outcome"] == 1.0
    assert trajectory.reward == pytest.approx(1 + 0.4 + 0.1)
    assert (trajectory.task_id, trajectory.subtask, trajectory.instruction) == (
        "corridor/test/000",
        "len2",
        "walk to the end",
    )
    assert trajectory.fingerprint == CorridorEnv().tasks.fingerprint


def test_nothing_is_generated_after_the_end() -> None:
    for texts, stop in (
        (say("go", "go"), StopReason.WON),
        (say("go", "fail"), StopReason.FAILED),
        (say(*["back"] * 6), StopReason.TURN_LIMIT),
        (say("go", "break"), StopReason.FAULT),
    ):
        engine = Script(*texts)
        trajectory = play(CorridorEnv(), engine)
        assert trajectory.stop is stop
        assert len(engine.calls) == len(trajectory.turns) == len(texts)


def test_what_a_policy_writes_never_raises() -> None:
    texts = ["", "\x00", "x" * 2**20, "<action>" * 9, "行動\u202e", *say("go\ud800")]
    trajectory = play(CorridorEnv(max_turns=len(texts)), Script(*texts))
    assert trajectory.stop is StopReason.TURN_LIMIT
    assert [turn.format_ok for turn in trajectory.turns] == [False] * 5 + [True]
    assert [turn.response for turn in trajectory.turns] == texts
    assert not trajectory.format_ok
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


@pytest.mark.parametrize("fault", ["collapse", EngineFaultKind.UNREACHABLE.value])
@pytest.mark.parametrize("reward", RewardMode)
def test_a_fault_takes_back_what_was_paid(reward: RewardMode, fault: str) -> None:
    class Breaking(Script):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            if fault != "collapse" and len(self.calls) == 2:
                raise EngineFault(EngineFaultKind.UNREACHABLE, "the server is gone")
            return await super().generate(*args, **kwargs)

    trajectory = play(CorridorEnv(reward=reward), Breaking(*say("go", "back", "break")))
    assert (trajectory.stop, trajectory.fault, trajectory.reward) == (StopReason.FAULT, fault, 0.0)
    assert trajectory.turns[0].reward == trajectory.turns[1].reward == -0.1, "the record keeps what the benchmark said"
    stopped = play(CorridorEnv(max_turns=2, reward=reward, mu=1.0), Script(*say("go", "back")))
    assert stopped.reward == pytest.approx(-0.2 if reward is RewardMode.NATIVE else -1 + 0.2 + 0.1)


def test_a_fault_at_the_reset_is_an_episode_without_turns() -> None:
    trajectory = play(CorridorEnv(lengths=(0,)), Script())
    assert (trajectory.stop, trajectory.fault, trajectory.turns) == (StopReason.FAULT, "no_corridor", ())
    assert (trajectory.subtask, trajectory.instruction) == ("len0", "walk to the end")


def test_a_defect_of_environment_or_engine_names_task_and_turn() -> None:
    class Broken:
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            raise MemoryError("no room")

    with pytest.raises(SpearError, match=r"corridor/test/000, turn 2: .*a defect"):
        play(CorridorEnv(), Script(*say("go", "bug")))
    with pytest.raises(SpearError, match=r"task corridor/test/001, turn 1: .*no room") as caught:
        play(CorridorEnv(), Broken(), "corridor/test/001")
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(UnknownTaskError, match="corridor/test/777"):
        play(CorridorEnv(), Script(), "corridor/test/777")


@pytest.mark.parametrize("layout", Layout)
def test_the_context_limit_ends_an_episode(layout: Layout) -> None:
    engine = Script(*say("back", "back", "back", "back", "back", "back"))
    trajectory = play(CorridorEnv(), engine, layout=layout, max_prompt_tokens=19)
    if layout is Layout.CONVERSATION:
        assert trajectory.stop is StopReason.CONTEXT_LIMIT
        assert len(trajectory.turns) == len(engine.calls) == 1
        assert trajectory.reward == pytest.approx(-1 + 0.1)
    else:
        assert trajectory.stop is StopReason.TURN_LIMIT
    empty = play(CorridorEnv(), Script(), layout=layout, max_prompt_tokens=3)
    assert (empty.stop, empty.turns) == (StopReason.CONTEXT_LIMIT, ())


def test_seeds_and_request_ids_are_those_of_the_turn() -> None:
    first, again, other, elsewhere = (Script(*say("go", "go", "go")) for _ in range(4))
    play(CorridorEnv(), first)
    play(CorridorEnv(), again)
    play(CorridorEnv(), other, seed=1)
    play(CorridorEnv(), elsewhere, "corridor/test/001")
    assert first.calls == again.calls
    seeds = [call[1].seed for script in (first, other, elsewhere) for call in script.calls]
    assert len(set(seeds)) == len(seeds)
    names = [call[2] for script in (first, other, elsewhere) for call in script.calls]
    assert names == sorted(names) and len(set(names)) == len(names)


def test_a_blocking_environment_is_stepped_in_a_thread() -> None:
    class Slow(CorridorEnv):
        metadata: ClassVar[dict[str, Any]] = CorridorEnv.metadata | {"blocking": True}  # type: ignore[misc]
        threads: set[int] = set()  # noqa: RUF012

        def _act(self, action: str) -> Any:
            self.threads.add(threading.get_ident())
            return super()._act(action)

    assert play(Slow(), Script(*say("go", "go"))).won
    assert Slow.threads and threading.get_ident() not in Slow.threads


class Pictures(CorridorEnv):
    """Shows a picture, filled with the number of the turn, wherever the corridor's place is even."""

    def _observe(self, message: str) -> Any:
        image = np.full((2, 2, 3), self.turn + 1, np.uint8)
        return "like <image>" if self.place % 2 else {"image": image, "text": "like <image>"}


@pytest.mark.parametrize(
    ("layout", "counts", "rows"),
    [(Layout.PER_TURN, [1, 0, 1, 0], [[1], [], [3], []]), (Layout.CONVERSATION, [1, 1, 2, 2], [[1, 3]])],
)
def test_pictures_go_with_prompts_that_name_them(layout: Layout, counts: list[int], rows: list[list[int]]) -> None:
    words = say("go", "back", "go", "fail")
    engine = Script(*words)
    trajectory = play(
        Pictures(), engine, layout=layout, template=PictureTemplate(), mark_image=lambda picture: "(here)"
    )
    assert [call[3] for call in engine.calls] == counts
    assert [[int(picture.max()) for picture in row.pictures] for row in trajectory.rows()] == rows
    unread = play(Pictures(), Script(*words), layout=layout, template=PictureTemplate())
    assert not any(row.pictures for row in unread.rows()), "only a local model reads pictures"
    silent = Script(*words)
    play(Pictures(), silent, layout=layout)
    assert [call[3] for call in silent.calls] == [0, 0, 0, 0], "the words of an observation show no picture"


ENVIRONMENTS = [
    ("spear/Sokoban-v1", {"modality": "text"}),
    ("spear/ALFWorld-v0", {"tool_reward": "distinct"}),
    ("spear/WebShop-v0", {"tool_reward": "distinct"}),
    ("spear/SearchR1-v0", {}),
    ("spear/CodeInterpreter-v0", {}),
]


def play_snapshots(
    env: Any, texts: Sequence[str], task: str, seed: int = 5, layout: str = "per_turn", **given: Any
) -> tuple[Trajectory, Script]:
    engine = Script(*texts)
    template = env.unwrapped.templates.get("default") or env.unwrapped.templates["compact"]
    prompts = PromptBuilder(ByteTokenizer(), template, layout, history=2)
    asked = {"task_id": task, "sampling": Sampling(), "seed": seed, "env_id": "e"}
    return asyncio.run(play_episode(env, engine, prompts, **asked, **given)), engine


def find_responses(env: Any, task: str) -> list[str]:
    """What an expert says who stumbles over a word at its second turn."""
    core = env.unwrapped
    core.reset(seed=5, options={"task": task})
    respond = core.templates["default"].respond
    texts: list[str] = []
    while not core.done and len(texts) < 8:
        texts.append("hm" if len(texts) == 1 else respond(core.expert_plan()[0]))
        core.step(texts[-1])
    return texts


@pytest.mark.parametrize(("env_id", "keywords"), ENVIRONMENTS)
def test_an_episode_goes_on_from_any_moment_as_if_nothing_had_happened(env_id: str, keywords: dict[str, Any]) -> None:
    first, other = make_env(env_id, "train", keywords), make_env(env_id, "train", keywords)
    task = first.unwrapped.tasks[3].id
    texts = find_responses(first, task)
    whole, engine = play_snapshots(first, texts, task, snapshots=True)
    assert len(whole.turns) >= 2 and whole.began is None
    other.reset(seed=9)  # it was elsewhere
    for turn in range(len(whole.turns)):
        moment = whole.turns[turn].snapshot
        assert moment is not None and moment.turn == turn and len(moment.history) == min(turn, 2)
        rest, again = play_snapshots(other, texts[turn:], task, begin=pickle.loads(pickle.dumps(moment)))
        assert again.calls == engine.calls[turn:], "the same prompts, token by token, and turns go on counting"
        assert rest.turns == whole.turns[turn:] and rest.began == turn
        assert replace(rest, turns=whole.turns, began=None) == whole, "what the environment counted stays counted"
    first.close()
    other.close()


class Slippery(CorridorEnv):
    """Every second step slips."""

    def _act(self, action: str) -> ActionResult:
        return super()._act(action if self.np_random.random() < 0.5 else "stay")


def test_members_of_a_group_have_random_streams_of_their_own() -> None:
    env, task = Slippery(max_turns=30), "corridor/test/002"
    say = ["<think></think><action>go</action>"] * 30
    whole, _ = play_snapshots(env, say, task, snapshots=True)
    begin = whole.turns[1].snapshot
    ends = [play_snapshots(env, say, task, seed=seed, begin=begin)[0] for seed in range(12)]
    assert len({len(end.turns) for end in ends}) > 2, "the world is random, and not the same for all"
    assert ends == [play_snapshots(env, say, task, seed=seed, begin=begin)[0] for seed in range(12)]
    assert len({end.turns[0].prompt_ids for end in ends}) == 1, "and all begin in one state"


def test_a_conversation_is_refused() -> None:
    env, task = CorridorEnv(), "corridor/test/002"
    say = ["<think></think><action>go</action>"] * 9
    begin = play_snapshots(env, say, task, snapshots=True)[0].turns[0].snapshot
    with pytest.raises(SpearError, match="use layout per_turn"):
        play_snapshots(env, say, task, layout=Layout.CONVERSATION.value, begin=begin)


class Oops:
    def __reduce__(self) -> Any:
        return os.mkdir, ("oops",)


def test_a_tampered_state_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = CorridorEnv()
    env.reset(seed=0)
    with pytest.raises(SpearError, match=r"holds posix\.mkdir: a snapshot keeps plain values"):
        Snapshot(0, pickle.dumps({"world": Oops()}), ()).restore(env)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.zeros(3), Layout.PER_TURN, len, re])
def test_a_state_that_is_not_plain_is_refused(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    env = CorridorEnv()
    env.reset(seed=0)
    monkeypatch.setattr(env, "get_state", lambda: {"np_random": {}, "world": value})
    with pytest.raises(SpearError, match="get_state\\(\\) may return numbers, texts"):
        Snapshot.take(env, ())


HUGE = b"\x8e" + b"\xff" * 8, b"\x8e" + (1 << 60).to_bytes(8, "little")
"""Texts that say they have so many bytes."""


@pytest.mark.parametrize("packed", [b"", b"\x80\x05K\x01.", b"hello", pickle.dumps({"a": 1})[:-3], *HUGE])
def test_a_damaged_state_is_said_to_be_one(packed: bytes) -> None:
    env = CorridorEnv()
    env.reset(seed=0)
    with pytest.raises(SpearError, match="damaged"):
        Snapshot(0, packed, ()).restore(env)


TEMPLATE = CorridorEnv.templates["compact"]
JOBS = [Job(f"corridor/test/{i % 3:03d}", i) for i in range(10)]


class Counted(CorridorEnv):
    """Counts how many are open."""

    opened: list[Counted] = []  # noqa: RUF012
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self.opened.append(self)

    def close(self) -> None:
        type(self).closed += 1


async def walk(requests: list[Request]) -> list[Generation]:
    ids = (*ByteTokenizer().encode(TEMPLATE.respond("go")), 256)
    return [Generation(ids, (0.0,) * len(ids), Finish.STOP) for _ in requests]


def play_rollout(engine_for: Any, jobs: Sequence[Job] = JOBS, **options: Any) -> list[Trajectory]:
    return asyncio.run(
        play_many(
            jobs,
            engine_for=engine_for,
            sampling=Sampling(),
            env_id="corridor",
            **(
                {"make_env": CorridorEnv, "concurrency": 4, "prompts": PromptBuilder(ByteTokenizer(), TEMPLATE)}
                | options
            ),
        )
    )


@pytest.mark.parametrize(("tries", "faults"), [(1, 10), (2, 10), (3, 0)])
def test_faults_are_played_again_with_the_same_seed(tries: int, faults: int) -> None:
    seeds: list[int] = []

    async def play_third(env: Any, engine: Any, prompts: Any, **job: Any) -> Trajectory:
        seeds.append(job["seed"])
        played = await play_episode(env, engine, prompts, **job)
        broken = seeds.count(job["seed"]) < 3
        return replace(played, stop=StopReason.FAULT, fault="down") if broken else played

    retrying = Retrying(play_third, tries, wait_s=0.0)
    played = play_rollout(lambda env: ScriptedEngine(lambda *_: TEMPLATE.respond("go")), play=retrying)
    assert sum(one.stop is StopReason.FAULT for one in played) == faults
    assert sorted(seeds) == sorted(tries * [job.seed for job in JOBS])
    assert retrying.retried == 10 * (tries - 1)
    assert retrying.discarded == (tries - 1) * sum(len(one.turns) for one in played)


def test_results_come_in_the_order_of_the_jobs_and_callbacks_in_that_of_the_ends() -> None:
    ended: list[Trajectory] = []
    engine = RequestBatcher(walk, max_wait_s=3600)
    trajectories = play_rollout(lambda env: engine, on_done=ended.append)
    assert [(t.task_id, t.seed) for t in trajectories] == [(job.task_id, job.seed) for job in JOBS]
    assert sorted(ended, key=lambda t: t.seed) == trajectories
    # The shortest corridor ends first although it shares its batches.
    assert [t.seed for t in ended[:2]] == [0, 3]
    assert all(t.won for t in trajectories)
    assert engine.live == 0


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_batches_are_full_and_the_number_of_places_does_not_matter(concurrency: int) -> None:
    sizes: list[int] = []

    async def watched(requests: list[Request]) -> list[Generation]:
        sizes.append(len(requests))
        return await walk(requests)

    engine = RequestBatcher(watched, max_wait_s=3600, deterministic=True)
    trajectories = play_rollout(lambda env: engine, concurrency=concurrency)
    assert trajectories == play_rollout(lambda env: ScriptedEngine(lambda prompt, dice: TEMPLATE.respond("go")))
    assert sum(sizes) == sum(len(t.turns) for t in trajectories)
    assert sizes[0] == min(concurrency, len(JOBS))


@pytest.mark.parametrize("are_kept", [False, True])
def test_environments_are_reused_and_then_closed_or_kept(are_kept: bool) -> None:
    Counted.opened, Counted.closed, kept = [], 0, []  # type: ignore[var-annotated]
    engine = RequestBatcher(walk)
    play_rollout(lambda env: engine, make_env=Counted, **({"release_env": kept.append} if are_kept else {}))
    assert len(Counted.opened) == 4 and sum(env.resets for env in Counted.opened) == len(JOBS)
    assert (kept, Counted.closed) == ((Counted.opened, 0) if are_kept else ([], 4))


def test_one_error_ends_all_and_leaves_nothing_behind() -> None:
    Counted.opened, Counted.closed = [], 0

    async def fail_later(requests: list[Request]) -> list[Generation]:
        if any(request.request_id.endswith("0002") for request in requests):
            raise RuntimeError("out of memory")
        return await walk(requests)

    engine = RequestBatcher(fail_later)
    with pytest.raises(SpearError, match="out of memory"):
        play_rollout(lambda env: engine, make_env=Counted)
    assert Counted.closed == 4
    assert engine.live == 0


GROWTH = 50


class LeastRecentlyUsed:
    """An engine that remembers contexts up to a number of tokens, and says how much of each prompt it remembered."""

    def __init__(self, room: int, cache_tokens: int | None = None) -> None:
        self.room = room
        self.cache_tokens = cache_tokens
        self.kept: OrderedDict[str, int] = OrderedDict()
        self.live: dict[str, int] = {}
        self.most = 0
        self.asked = self.found = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        name = request_id.rpartition("#")[0]
        found = min(self.kept.pop(name, 0), len(prompt_ids))
        self.asked, self.found = self.asked + len(prompt_ids), self.found + found
        ids = (*ByteTokenizer().encode(CorridorEnv.templates["compact"].respond("go")), 256)
        self.kept[name] = len(prompt_ids) + len(ids)
        while sum(self.kept.values()) > self.room:
            self.kept.popitem(last=False)
        await asyncio.sleep(0)
        return Generation(ids, (0.0,) * len(ids), Finish.STOP, cached_tokens=found)


async def talk(gate: CacheGate, engine: Any, name: str, turns: int) -> None:
    with gate.admit(engine) as seat:
        for turn in range(1, turns + 1):
            await seat.generate((0,) * (GROWTH * turn), Sampling(), request_id=f"{name}#{turn}")


def play_admission(
    engine: LeastRecentlyUsed, gate: CacheGate, conversations: int, places: int, turns: int = 20
) -> None:
    async def fill(names: list[str]) -> None:
        dice = random.Random(names[-1])
        while names:
            await talk(gate, engine, names.pop(), dice.randint(turns // 2, turns))

    async def run() -> None:
        names = [str(number) for number in range(conversations)]
        await asyncio.gather(*(fill(names) for _ in range(places)))

    asyncio.run(run())


def test_what_fits_is_read_once() -> None:
    """32 conversations of 1,000 tokens at a time, room for ten."""
    open_to_all, gated = LeastRecentlyUsed(10_000), LeastRecentlyUsed(10_000)
    play_admission(open_to_all, CacheGate(10**9), 96, 32)
    play_admission(gated, CacheGate(10_000), 96, 32)
    shares = [engine.found / engine.asked for engine in (open_to_all, gated)]
    assert shares[0] < 0.5 and shares[1] > 0.85


@pytest.mark.parametrize("capacity", [1, 60, 1000])
def test_a_conversation_that_no_cache_holds_is_played_all_the_same(capacity: int) -> None:
    engine = LeastRecentlyUsed(10_000)
    gate = CacheGate(capacity)
    play_admission(engine, gate, 12, 5)
    assert engine.asked > 0 and engine.kept.keys() == {str(number) for number in range(12)}


def test_a_conversation_that_is_given_up_leaves_its_place() -> None:
    async def run() -> list[str]:
        engine, gate, done = LeastRecentlyUsed(1000), CacheGate(100), []

        async def one(name: str, turns: int) -> None:
            await talk(gate, engine, name, turns)
            done.append(name)

        tasks = [asyncio.create_task(one(name, turns)) for name, turns in (("a", 10**6), ("b", 3), ("c", 3))]
        for _ in range(50):
            await asyncio.sleep(0)
        assert done == [], "the oldest fills the cache alone"
        tasks[1].cancel()  # while it waits
        await asyncio.sleep(0)
        tasks[0].cancel()  # while it is answered
        await asyncio.wait_for(tasks[2], 10)
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert asyncio.run(run()) == ["c"]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("capacity", [None, 1])
def test_episodes_wait_where_the_engine_says_what_its_cache_holds(layout: Layout, capacity: int | None) -> None:
    class Watched(LeastRecentlyUsed):
        async def generate(self, *args: Any, request_id: str, **options: Any) -> Generation:
            self.live[request_id] = 1
            self.most = max(self.most, len(self.live))
            try:
                return await super().generate(*args, request_id=request_id, **options)
            finally:
                del self.live[request_id]

    engine = Watched(10**9, capacity)
    prompts = PromptBuilder(ByteTokenizer(), TEMPLATE, layout)
    trajectories = play_rollout(lambda env: engine, concurrency=5, prompts=prompts)
    assert [(t.task_id, t.seed) for t in trajectories] == [(job.task_id, job.seed) for job in JOBS]
    assert engine.most == (1 if capacity and layout is Layout.CONVERSATION else 5)
    assert sum_usage(trajectories).cached_tokens == engine.found


def test_a_record_says_where_the_episode_began() -> None:
    env, task = CorridorEnv(), "corridor/test/002"
    say = ["<think></think><action>go</action>"] * 9
    whole, _ = play_snapshots(env, say, task, snapshots=True)
    rest, _ = play_snapshots(env, say, task, begin=whole.turns[2].snapshot)
    assert len(rest.turns) == len(whole.turns) - 2 and rest.stop is whole.stop
    assert Trajectory.from_json(rest.to_json()) == rest and '"began":2' in rest.to_json()
    assert "began" not in whole.to_json() and "snapshot" not in whole.to_json()
    with pytest.raises(SpearError, match=r"began within another episode"):
        replay_frames("tests/Corridor-v0", {}, rest)
    (note,) = describe_episode(replace(rest, env_id="spear/Sokoban-v1", tokens=TokenKind.BYTES), {}, ByteTokenizer)[
        "notes"
    ]
    assert note.startswith("Began before turn 3 of an earlier episode")
