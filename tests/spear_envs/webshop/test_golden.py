"""Recorded episodes of the original on 1,000 real products, replayed through the environment."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from spear_envs.webshop.env import WebShopEnv
from tests.spear_envs.webshop.conftest import golden_nouns, read_packed


@pytest.fixture(scope="module")
def episodes(golden: Path) -> list[dict[str, Any]]:
    """What was recorded."""
    return read_packed(golden / "episodes.jsonl.xz")


def open_env(golden: Path, official: Path, **kwargs: Any) -> WebShopEnv:
    env = gym.make(
        "spear_envs:spear/WebShop-v0",
        catalog=official,
        goals=golden / "goals.jsonl.xz",
        response_format="plain",
        reward="native",
        disable_env_checker=True,
        **kwargs,
    )
    assert isinstance(env.unwrapped, WebShopEnv)
    return env.unwrapped


def describe(observation: str, reward: float, done: bool, info: dict[str, Any]) -> dict[str, Any]:
    return {"observation": observation, "reward": reward, "done": done, "available": info["admissible_actions"]}


def test_every_step_of_all_episodes_is_equal(golden: Path, official: Path, episodes: list[dict[str, Any]]) -> None:
    env = open_env(golden, official, title_nouns=golden_nouns)
    other = open_env(golden, official, title_nouns=golden_nouns)
    steps = 0
    for episode in episodes:
        observation, info = env.reset(options={"task": episode["task"]})
        assert (observation, info["admissible_actions"]) == (
            episode["reset"]["observation"],
            episode["reset"]["available"],
        )
        for number, step in enumerate(episode["steps"], 1):
            state = env.get_state()
            observation, reward, terminated, truncated, info = env.step(step["action"])
            expected = {key: step[key] for key in ("observation", "reward", "done", "available")}
            assert describe(observation, reward, terminated, info) == expected, f"{episode['id']}, step {number}"
            assert truncated == (number == 15 and not step["done"])
            if "score_terms" in step:
                terms = step["score_terms"]
                assert {key: info["purchase"][key] for key in terms} == terms
                assert info["score"] == step["reward"] and info["won"] == (step["reward"] == 1.0)
            # A state taken in the middle of an episode leads on to the same.
            other.set_state(state)
            assert other.step(step["action"]) == (observation, reward, terminated, truncated, info)
            steps += 1
    assert (len(episodes), steps) == (40, 345)
    kinds = Counter(episode["kind"] for episode in episodes)
    assert kinds == {"success": 10, "near": 6, "wrong": 8, "walk": 8, "noise": 4, "paging": 4}


def test_of_the_default_tagger_only_marked_steps_differ(
    golden: Path, official: Path, episodes: list[dict[str, Any]]
) -> None:
    env = open_env(golden, official)
    marked = 0
    for episode in episodes:
        env.reset(options={"task": episode["task"]})
        for step in episode["steps"]:
            observation, reward, terminated, _, info = env.step(step["action"])
            if step.get("tagger_dependent"):
                marked += 1
                continue
            expected = {key: step[key] for key in ("observation", "reward", "done", "available")}
            assert describe(observation, reward, terminated, info) == expected, episode["id"]
    assert marked == 10


def test_expert_wins_on_real_products(golden: Path, official: Path) -> None:
    env = open_env(golden, official, title_nouns=golden_nouns)
    won = 0
    for index in range(0, len(env.tasks), 69):
        env.reset(options={"task": f"webshop/all/{index:05}"})
        for action in env.expert_plan():
            info = env.step(action)[4]
        won += info["won"]
    assert won == 101
