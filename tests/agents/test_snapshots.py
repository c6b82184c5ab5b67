"""Episodes that begin in snapshots of others: the same prompts, worlds and rewards as in the undisturbed ones."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spear_agents.engines.base import ByteTokenizer, Finish, Generation, Sampling
from spear_agents.episode import play_episode
from spear_agents.prompting import PromptBuilder
from spear_agents.replay.runs import describe_episode
from spear_agents.replay_gif import replay_frames
from spear_agents.snapshots import Snapshot
from spear_agents.trajectory import Layout, TokenKind, Trajectory
from spear_envs.core.env import ActionResult
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from tests.agents.corridor import CorridorEnv

ENVIRONMENTS = [
    ("spear/Sokoban-v1", {"modality": "text"}),
    ("spear/ALFWorld-v0", {"tool_reward": "distinct"}),
    ("spear/WebShop-v0", {"tool_reward": "distinct"}),
    ("spear/SearchR1-v0", {}),
    ("spear/CodeInterpreter-v0", {}),
]


class Says:
    """Gives one text after the other; keeps the prompts and the ids of the requests."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self.prompts: list[tuple[int, ...]] = []
        self.requests: list[str] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        self.prompts.append(tuple(prompt_ids))
        self.requests.append(request_id)
        ids = (*ByteTokenizer().encode(self.texts[len(self.prompts) - 1]), 256)
        return Generation(ids, (-0.5,) * len(ids), Finish.STOP)


def play(
    env: Any, texts: Sequence[str], task: str, seed: int = 5, layout: str = "per_turn", **given: Any
) -> tuple[Trajectory, Says]:
    engine = Says(texts)
    template = env.unwrapped.templates.get("default") or env.unwrapped.templates["compact"]
    prompts = PromptBuilder(ByteTokenizer(), template, layout, history=2)
    made = play_episode(
        env, engine, prompts, task_id=task, sampling=Sampling(), seed=seed, env_id="e", **given
    )  # fmt: skip
    return asyncio.run(made), engine


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
    whole, engine = play(first, texts, task, snapshots=True)
    assert len(whole.turns) >= 2 and whole.began is None
    other.reset(seed=9)  # it was elsewhere
    for turn in range(len(whole.turns)):
        moment = whole.turns[turn].snapshot
        assert moment is not None and moment.turn == turn and len(moment.history) == min(turn, 2)
        rest, again = play(other, texts[turn:], task, begin=pickle.loads(pickle.dumps(moment)))
        assert again.prompts == engine.prompts[turn:], "token by token"
        assert again.requests == engine.requests[turn:], "turns go on counting"
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
    whole, _ = play(env, say, task, snapshots=True)
    begin = whole.turns[1].snapshot
    ends = [play(env, say, task, seed=seed, begin=begin)[0] for seed in range(12)]
    assert len({len(end.turns) for end in ends}) > 2, "the world is random, and not the same for all"
    assert ends == [play(env, say, task, seed=seed, begin=begin)[0] for seed in range(12)]
    assert len({end.turns[0].prompt_ids for end in ends}) == 1, "and all begin in one state"


def test_what_is_left_of_the_turns_is_played() -> None:
    env, task = CorridorEnv(max_turns=4), "corridor/test/002"
    say = ["<think></think><action>back</action>"] * 9
    whole, _ = play(env, say, task, snapshots=True)
    rest, _ = play(env, say, task, begin=whole.turns[3].snapshot)
    assert len(whole.turns) == 4 and len(rest.turns) == 1 and rest.stop is whole.stop


def test_a_record_says_where_the_episode_began() -> None:
    env, task = CorridorEnv(), "corridor/test/002"
    say = ["<think></think><action>go</action>"] * 9
    whole, _ = play(env, say, task, snapshots=True)
    rest, _ = play(env, say, task, begin=whole.turns[2].snapshot)
    assert Trajectory.from_json(rest.to_json()) == rest and '"began":2' in rest.to_json()
    assert "began" not in whole.to_json() and "snapshot" not in whole.to_json()
    with pytest.raises(SpearError, match=r"began within another episode"):
        replay_frames("tests/Corridor-v0", {}, rest)
    (note,) = describe_episode(replace(rest, env_id="spear/Sokoban-v1", tokens=TokenKind.BYTES), {}, ByteTokenizer)[
        "notes"
    ]
    assert note.startswith("Began before turn 3 of an earlier episode")


def test_a_conversation_is_refused() -> None:
    env, task = CorridorEnv(), "corridor/test/002"
    say = ["<think></think><action>go</action>"] * 9
    begin = play(env, say, task, snapshots=True)[0].turns[0].snapshot
    with pytest.raises(SpearError, match="use layout per_turn"):
        play(env, say, task, layout=Layout.CONVERSATION.value, begin=begin)


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
