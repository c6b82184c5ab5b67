from __future__ import annotations

import pickle

import gymnasium as gym

from spear_envs.core.registration import ENVIRONMENTS, register_env
from tests.spear_envs.corridor import CorridorEnv


def test_every_entry_is_registered() -> None:
    for entry in ENVIRONMENTS:
        spec = gym.spec(entry.id)
        assert spec.entry_point == entry.entry_point
        assert spec.max_episode_steps is None


def test_an_environment_of_others() -> None:
    register_env("tests/LongCorridor-v0", CorridorEnv, kwargs={"length": 20})
    env = gym.make("tests/LongCorridor-v0")
    observation, _ = env.reset(seed=0)
    assert len(observation) == 20
    vector = gym.make_vec("tests/LongCorridor-v0", num_envs=2, max_turns=3)
    assert vector.get_attr("max_turns") == (3, 3)
    observations, _ = vector.reset(seed=0)
    assert observations[0] == observation
    vector.close()


def test_specs_can_be_pickled_and_made_from() -> None:
    spec = pickle.loads(pickle.dumps(gym.spec("tests/Corridor-v0")))
    assert isinstance(spec.make().unwrapped, CorridorEnv)
    assert gym.make_vec(spec, num_envs=2).num_envs == 2
