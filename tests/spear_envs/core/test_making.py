"""Environments by their ids: the one way, and what is said of ids and keywords that are none."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_splits, make_env

CORRIDOR = "tests.spear_envs.corridor:tests/Corridor-v0"


@pytest.mark.parametrize("env_id", ["spear/Sokoban-v1", CORRIDOR])
def test_an_environment_of_a_split(env_id: str) -> None:
    splits = find_splits(env_id)
    for split in splits:
        env = make_env(env_id, split)
        assert env.tasks.split == split and env.unwrapped is env
    assert make_env(env_id).tasks.split == splits[0]


def test_keywords() -> None:
    env: Any = make_env(CORRIDOR, keywords={"length": 5, "split": "test"})
    assert env.tasks.split == "test"


@pytest.mark.parametrize(
    ("env_id", "split", "keywords", "words"),
    [
        ("spear/Sokobann-v0", None, {}, "Did you mean 'spear/Sokoban-v1'"),
        ("sokoban", None, {}, "Did you mean 'spear/Sokoban-v1'"),
        ("no_module:spear/Sokoban-v1", None, {}, "no_module"),
        ("spear/Sokoban-v1", None, {"boxen": 2}, "boxen"),
        ("spear/Sokoban-v1", "test", {"split": "train"}, "split is not a keyword here"),
        ("spear/Sokoban-v1", "tests", {}, "Did you mean 'test'"),
        ("CartPole-v1", None, {}, "not a SpearEnv"),
    ],
)
def test_what_cannot_be_made_is_told(env_id: str, split: str | None, keywords: dict[str, Any], words: str) -> None:
    assert "CartPole-v1" in gym.registry
    with pytest.raises(SpearError) as caught:
        make_env(env_id, split, keywords)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("env_id", ["spear/Sokobann-v0", "no_module:spear/Sokoban-v1", "not an id"])
def test_splits_of_nothing(env_id: str) -> None:
    with pytest.raises(SpearError, match="Choose one of spear/ALFWorld-v0"):
        find_splits(env_id)
