from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from spear_envs.core import PermissiveText, SpearError, TagParser, UnknownTaskError, set_training_step
from spear_envs.core.vector import SpearVectorEnv
from spear_envs.testing.trace import MALFORMED, freeze
from tests.spear_envs.corridor import CorridorEnv

LEFT = TagParser().respond("left")
WORDS = [TagParser().respond(word) for word in ("left", "right", "dance")] + ["", "é漢\0"]


class PictureCorridorEnv(CorridorEnv):
    """A corridor seen as a picture too."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.observation_space = gym.spaces.Dict(  # type: ignore[assignment]
            image=gym.spaces.Box(0, 255, (1, 8, 3), np.uint8), text=PermissiveText()
        )

    def _observe(self, message: str) -> Any:
        image = np.zeros((1, 8, 3), np.uint8)
        image[0, self._place] = 255
        return {"image": image, "text": super()._observe(message)}


def make_short() -> CorridorEnv:
    return CorridorEnv(max_turns=4)


def make_picture() -> PictureCorridorEnv:
    return PictureCorridorEnv(max_turns=4)


def pick(batch: Any, i: int) -> Any:
    return freeze({key: value[i] for key, value in batch.items()} if isinstance(batch, dict) else batch[i])


def pick_info(infos: dict[str, Any], i: int) -> Any:
    picked = {}
    for key, value in infos.items():
        if not key.startswith("_") and infos[f"_{key}"][i]:
            picked[key] = pick_info(value, i) if isinstance(value, dict) else freeze(value[i : i + 1].tolist()[0])
    return picked


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("make_env", [make_short, make_picture])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_vector_is_its_single_environments(make_env: Any, mode: AutoresetMode, workers: int) -> None:
    count = 3
    singles = [make_env() for _ in range(count)]
    ended = [False] * count
    rng = random.Random(0)
    vector = SpearVectorEnv(make_env, count, autoreset_mode=mode, workers=workers)
    try:
        observations, infos = vector.reset(seed=11)
        for i, env in enumerate(singles):
            observation, info = env.reset(seed=11 + i)
            assert pick(observations, i) == freeze(observation)
            assert pick_info(infos, i) == freeze(info)
        assert observations in vector.observation_space
        for _ in range(25):
            if mode is AutoresetMode.DISABLED and any(ended):
                observations, infos = vector.reset(options={"reset_mask": np.array(ended)})
                for i, env in enumerate(singles):
                    assert infos["_won"][i] == ended[i]
                    if ended[i]:
                        observation, info = env.reset()
                        assert pick(observations, i) == freeze(observation)
                        assert pick_info(infos, i) == freeze(info)
                ended = [False] * count
            actions = rng.choices(WORDS, k=count)
            observations, rewards, terminations, truncations, infos = vector.step(actions)
            assert observations in vector.observation_space
            for i, env in enumerate(singles):
                if mode is AutoresetMode.NEXT_STEP and ended[i]:
                    observation, info = env.reset()
                    expected: Any = (observation, 0.0, False, False, info)
                    ended[i] = False
                else:
                    expected = env.step(actions[i])
                    ended[i] = expected[2] or expected[3]
                info = expected[4]
                observation = expected[0]
                if mode is AutoresetMode.SAME_STEP and ended[i]:
                    assert freeze(infos["final_obs"][i]) == freeze(observation)
                    assert pick_info(infos["final_info"], i) == freeze(info)
                    observation, info = env.reset()
                    ended[i] = False
                elif mode is AutoresetMode.SAME_STEP and "_final_obs" in infos:
                    assert not infos["_final_obs"][i]
                assert pick(observations, i) == freeze(observation)
                assert (rewards[i], terminations[i], truncations[i]) == expected[1:4]
                own = {k: v for k, v in pick_info(infos, i).items() if not k.startswith("final_")}
                assert own == freeze(info)
    finally:
        vector.close()


def test_gymnasiums_own_vector_agrees() -> None:
    ours = gym.make_vec("tests/Corridor-v0", num_envs=3, max_turns=4)
    theirs = gym.make_vec("tests/Corridor-v0", num_envs=3, max_turns=4, vectorization_mode="sync")
    first, second = ours.reset(seed=5), theirs.reset(seed=5)
    rng = random.Random(2)
    for _ in range(15):
        assert freeze(first) == freeze(second)
        actions = tuple(rng.choices(WORDS, k=3))
        first, second = ours.step(actions), theirs.step(actions)


def test_subset_stepping_leaves_the_others_alone() -> None:
    vector = SpearVectorEnv(CorridorEnv, 4)
    vector.reset(seed=0)
    turns = vector.get_attr("turn")
    observations, rewards, terminations, truncations, infos = vector.step_subset([3, 1], [LEFT, "huh"])
    assert turns == (0, 0, 0, 0) and vector.get_attr("turn") == (0, 1, 0, 1)
    assert len(observations) == 2 and rewards.shape == terminations.shape == truncations.shape == (2,)
    assert list(infos["format_ok"]) == [True, False]
    assert "could not be read" in observations[1]
    assert list(infos["task_id"]) == [task.id for task in (vector.get_attr("task")[i] for i in (3, 1))]


@pytest.mark.parametrize("workers", [0, 2])
def test_groups_and_tasks_by_option(workers: int) -> None:
    vector = SpearVectorEnv(CorridorEnv, 3, workers=workers)
    observations, infos = vector.reset(seed=1, options={"task": "corridor/train/00004"})
    assert len(set(observations)) == 1 and set(infos["task_id"]) == {"corridor/train/00004"}
    ids = [f"corridor/train/0000{i}" for i in (3, 1, 2)]
    options = {"tasks": ids}
    _, infos = vector.reset(options=options)
    assert list(infos["task_id"]) == ids and options == {"tasks": ids}
    with pytest.raises(SpearError, match="has 2 ids"):
        vector.reset(options={"tasks": ids[:2]})
    with pytest.raises(UnknownTaskError, match="nowhere"):
        vector.reset(options={"task": "nowhere"})
    vector.reset(seed=1)  # still alive
    vector.close()


def test_masked_reset() -> None:
    vector = SpearVectorEnv(CorridorEnv, 3, autoreset_mode="disabled")
    with pytest.raises(SpearError, match=r"\[0, 2\] were never reset"):
        vector.reset(options={"reset_mask": np.array([False, True, False])})
    before, _ = vector.reset(seed=0)
    stepped, *_ = vector.step([LEFT] * 3)
    options = {"reset_mask": np.array([False, True, False])}
    after, infos = vector.reset(seed=[None, 1, None], options=options)
    assert "reset_mask" in options
    assert after == (stepped[0], before[1], stepped[2])
    assert list(infos["_won"]) == [False, True, False]
    for mask in ([True], np.array([1, 0, 0]), np.zeros(3, bool), np.ones(2, bool)):
        with pytest.raises(SpearError, match="reset_mask"):
            vector.reset(options={"reset_mask": mask})


def test_an_ended_environment_is_not_stepped_when_autoreset_is_off() -> None:
    vector = SpearVectorEnv(make_short, 2, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ResetNeeded):
        vector.step([LEFT, LEFT])
    vector.reset(seed=0)
    for _ in range(4):
        vector.step_subset([1], [""])
    with pytest.raises(ResetNeeded, match=r"\[1\] have ended"):
        vector.step(["", ""])
    assert vector.get_attr("turn") == (0, 4)  # none was stepped


@pytest.mark.parametrize(
    ("call", "mend"),
    [
        (lambda v: v.step([LEFT]), "1 responses for 2"),
        (lambda v: v.step_subset([0, 0], [LEFT, LEFT]), "different ones from 0 to 1"),
        (lambda v: v.step_subset([2], [LEFT]), "different ones from 0 to 1"),
        (lambda v: v.step_subset([0], [LEFT, LEFT]), "1 indices and 2 responses"),
        (lambda v: v.reset(seed=[1]), "1 seeds for 2"),
        (lambda v: v.set_attr("max_turns", [1]), "1 values for 2"),
        (lambda v: SpearVectorEnv(CorridorEnv, 0), "num_envs=0"),
        (lambda v: SpearVectorEnv(CorridorEnv, 1, workers=-1), "workers=-1"),
        (lambda v: SpearVectorEnv(CorridorEnv, 1, autoreset_mode="never"), "'next_step', 'same_step', 'disabled'"),
    ],
)
def test_bad_arguments_name_the_mend(call: Any, mend: str) -> None:
    vector = SpearVectorEnv(CorridorEnv, 2)
    vector.reset(seed=0)
    with pytest.raises(SpearError, match=mend):
        call(vector)


@pytest.mark.parametrize("workers", [0, 2])
def test_calls_and_attributes_reach_every_environment(workers: int) -> None:
    vector = gym.make_vec("tests/Corridor-v0", num_envs=3, workers=workers, render_mode="ansi")
    observations, _ = vector.reset(seed=0)
    set_training_step(vector, 17)
    assert vector.get_attr("training_step") == (17, 17, 17)
    vector.set_attr("max_turns", [5, 6, 7])
    assert vector.get_attr("max_turns") == (5, 6, 7)
    assert vector.render() == observations and vector.render_mode == "ansi"
    assert [state["episode"]["turn"] for state in vector.call("get_state")] == [0, 0, 0]
    assert vector.call("expert_plan")[0]
    vector.close()
    with pytest.raises(SpearError, match="closed"):
        vector.step([LEFT] * 3)


def test_training_step_reaches_through_gymnasiums_vector() -> None:
    vector = gym.make_vec("tests/Corridor-v0", num_envs=2, vectorization_mode="sync")
    set_training_step(vector, 9)
    assert vector.get_attr("training_step") == (9, 9)


def test_strange_text_goes_through_pipes() -> None:
    vector = SpearVectorEnv(CorridorEnv, 2, workers=1)
    vector.reset(seed=0)
    for response in MALFORMED[:11]:
        observations, *_ = vector.step([response, LEFT])
        assert len(observations) == 2
    vector.close()
