from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from spear_agents.engines.base import EngineFault, EngineFaultKind, Finish, Generation, Sampling
from spear_agents.engines.bytes import ByteTokenizer
from spear_agents.episode import play_episode
from spear_agents.prompting import PromptBuilder
from spear_agents.trajectory import Layout, StopReason, Trajectory
from spear_envs.core.env import RewardMode
from spear_envs.core.errors import SpearError
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
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


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


def test_a_defect_of_the_environment_names_task_and_turn() -> None:
    with pytest.raises(SpearError, match=r"corridor/test/000, turn 2: .*a defect"):
        play(CorridorEnv(), Script(*say("go", "bug")))


def test_an_engine_s_error_names_task_and_turn() -> None:
    class Broken:
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            raise MemoryError("no room")

    with pytest.raises(SpearError, match=r"task corridor/test/001, turn 1: .*no room") as caught:
        play(CorridorEnv(), Broken(), "corridor/test/001")
    assert isinstance(caught.value.__cause__, MemoryError)


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
