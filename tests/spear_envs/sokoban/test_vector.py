"""The batched vector environment against single environments, in all autoreset modes."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from spear_envs.core.env import set_training_step
from spear_envs.core.errors import SpearError
from spear_envs.core.vector import SpearVectorEnv
from spear_envs.sokoban.vector import SokobanVectorEnv

ID = "spear_envs:spear/Sokoban-v1"
WORDS = ("up", "down", "left", "right", "still", "UP.", "jump", "left, up")
RESPONSES = [*(f"<think></think><action>{word}</action>" for word in WORDS), "", "left", "x" * 400]
CHANCES = [0.2, 0.2, 0.2, 0.2, 0.03, 0.03, 0.03, 0.04, 0.02, 0.03, 0.02]
KEYWORDS: list[dict[str, Any]] = [
    {"mu": "cosine:60"},
    {"mu": "constant", "tool_reward": "distinct", "moves_per_turn": 2},
    {"modality": "text", "reward": "native", "response_format": "plain"},
    {"modality": "image", "moves_per_turn": 2},
    {"on_malformed": "peer", "text_format": "spaced", "diagnostics": True},
    {"room": "7x6", "boxes": 2, "split": "train"},
]


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Equality in values, types, shapes and keys."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            assert_same(ours[key], theirs[key], f"{path}/{key}")
    elif isinstance(ours, np.ndarray) and ours.dtype != object:
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), path
        assert np.array_equal(ours, theirs), path
    elif isinstance(ours, (list, tuple, np.ndarray)):
        assert len(ours) == len(theirs), path
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{path}[{place}]")
    else:
        assert ours == theirs, path


def make_both(mode: str, keywords: dict[str, Any], count: int) -> tuple[SokobanVectorEnv, SpearVectorEnv]:
    keywords = {"split": "test", "max_turns": 8, "shortest": 1, **keywords}
    ours = gym.make_vec(ID, num_envs=count, autoreset_mode=mode, **keywords)
    assert isinstance(ours, SokobanVectorEnv)
    return ours, SpearVectorEnv(partial(gym.make, ID, **keywords), count, autoreset_mode=mode)


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_a_batch_behaves_as_single_environments_do(mode: str, keywords: dict[str, Any]) -> None:
    count = 9
    both = make_both(mode, keywords, count)
    ours, theirs = both
    assert_same(*(env.reset(seed=5) for env in both), "reset")
    rng = np.random.default_rng(1)
    for turn in range(45):
        if turn % 10 == 3:
            for env in both:
                set_training_step(env, turn)
            for name in ("get_state", "expert_plan", "done", "turn"):
                assert_same(ours.call(name), theirs.call(name), name)
        if turn == 20:
            assert_same(*(env.reset(seed=list(range(count))) for env in both), "seeds")
        if turn == 30:
            options = {"task": theirs.call("tasks")[0][4].id}
            assert_same(*(env.reset(options=options) for env in both), "group")
        if mode == "disabled":
            ended = np.array(theirs.get_attr("done"))
            if ended.any():
                tasks = theirs.call("tasks")[0]
                ids = {"tasks": [tasks[int(i)].id for i in rng.integers(0, 200, count)]} if turn % 2 else {}
                assert_same(*(env.reset(options={"reset_mask": ended, **ids}) for env in both), "mask")
        some = rng.permutation(count)[: rng.integers(1, count + 1)]
        responses = [RESPONSES[i] for i in rng.choice(len(RESPONSES), count, p=CHANCES)]
        if turn % 3 == 0:
            assert_same(*(env.step_subset(some, responses[: len(some)]) for env in both), f"subset {turn}")
        else:
            assert_same(*(env.step(responses) for env in both), f"step {turn}")


def test_spaces_and_metadata_equal_the_generic_ones() -> None:
    ours, theirs = make_both("same_step", {}, 3)
    assert ours.observation_space == theirs.observation_space
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.action_space == theirs.action_space
    assert ours.metadata == theirs.metadata
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    observation, _ = ours.reset(seed=0)
    assert ours.observation_space.contains(observation)


def test_pictures_handed_out_do_not_change() -> None:
    env = SokobanVectorEnv(4, split="test")
    before, _ = env.reset(seed=0)
    kept = before["image"].copy()
    env.step([RESPONSES[3]] * 4)
    assert np.array_equal(before["image"], kept)


def test_states_may_be_set_through_call() -> None:
    env = SokobanVectorEnv(2, split="test")
    env.reset(seed=0)
    state = env.call("get_state")[0]
    env.step([RESPONSES[0], RESPONSES[1]])
    env.call("set_state", state)
    assert env.call("get_state") == (state, state)


def test_rendering_and_settings() -> None:
    env = SokobanVectorEnv(2, split="test", render_mode="rgb_array")
    observation, _ = env.reset(seed=0)
    assert np.array_equal(np.stack(env.render()), observation["image"])
    env.set_attr("max_turns", 1)
    assert env.step(["", ""])[3].all()
    with pytest.raises(SpearError, match="one value for all"):
        env.set_attr("max_turns", [1, 2])


def test_wrong_use_is_explained() -> None:
    env = SokobanVectorEnv(2, split="test", autoreset_mode="disabled", max_turns=1)
    with pytest.raises(ResetNeeded):
        env.step(["", ""])
    with pytest.raises(SpearError, match="never reset"):
        env.reset(options={"reset_mask": np.array([True, False])})
    env.reset(seed=0)
    with pytest.raises(SpearError, match="one each"):
        env.step([""])
    with pytest.raises(SpearError, match="different ones"):
        env.step_subset([0, 0], ["", ""])
    with pytest.raises(TypeError, match="str"):
        env.step([1, 2])  # type: ignore[list-item]
    env.step(["", ""])
    with pytest.raises(ResetNeeded, match="reset_mask"):
        env.step(["", ""])
    with pytest.raises(SpearError, match="use step"):
        env.call("step", "")
    env.close()
    with pytest.raises(SpearError, match="closed"):
        env.reset()
    for keywords in ({"workers": 2}, {"max_episode_steps": 3}, {"num_envs": 0}, {"room": "3x3"}):
        with pytest.raises(SpearError):
            SokobanVectorEnv(**keywords)
