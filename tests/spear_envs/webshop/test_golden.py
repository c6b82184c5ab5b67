"""The original on 1,000 real products: episodes, prices, goals and splits as recorded."""

from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from spear_envs.core.tasks import check_disjoint
from spear_envs.webshop.build import build_store
from spear_envs.webshop.catalogue import Catalogue, open_catalogue
from spear_envs.webshop.env import WebShopEnv
from spear_envs.webshop.products import find_files
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


@pytest.fixture(scope="module")
def folder(official: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official files, and the human instructions made up for the recordings."""
    folder = tmp_path_factory.mktemp("official")
    for path in (*official.glob("*.json.xz"), golden / "human" / "items_human_ins.json.xz"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module", params=["memory", "store"])
def catalogue(folder: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    if request.param == "memory":
        return open_catalogue(folder, draws="sequential", price_seed=42)
    store = tmp_path_factory.mktemp("built") / "store"
    build_store(find_files(folder), store, draws="sequential", price_seed=42, processes=1)
    return open_catalogue(store)


def row_of(goal: Any, index: int) -> dict[str, Any]:
    row = {"index": index, **goal.to_row()}
    return row if row["goal_options"] else {**row, "goal_options": None}


def expected_row(row: dict[str, Any]) -> dict[str, Any]:
    return row if row["goal_options"] else {**row, "goal_options": None}  # {} and [] mean the same


def test_prices(catalogue: Catalogue, golden: Path) -> None:
    prices = read_packed(golden / "prices.json.xz")
    assert len(prices) == len(catalogue) == 1_000
    found = {catalogue.product(number).asin: catalogue.price(number) for number in range(len(catalogue))}
    assert found == prices
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("kind", "file", "count"), [("synthetic", "goals.jsonl.xz", 6_910), ("human", "human/goals.jsonl.xz", 147)]
)
def test_goals(catalogue: Catalogue, golden: Path, kind: str, file: str, count: int) -> None:
    source = catalogue.goals(kind)
    rows = read_packed(golden / file)
    assert len(source) == len(rows) == count
    for index, row in enumerate(rows):
        assert row_of(source.goal(index), index) == expected_row(row)


def test_splits(catalogue: Catalogue) -> None:
    sizes = {
        scheme: [len(catalogue.make_tasks(split, split_scheme=scheme)) for split in ("test", "eval", "train")]
        for scheme in ("original", "product")
    }
    # Three goals occur in two splits with the same product, text and options.
    assert sizes == {"original": [500, 1_000, 5_407], "product": [500, 500, 5_910]}
    assert len(catalogue.make_tasks("train", split_scheme="verl-agent")) == 6_410
    sets = [catalogue.make_tasks(split) for split in ("test", "eval", "train")]
    assert check_disjoint(*sets) == 6_907
    assert [task.goal for task in catalogue.make_tasks("test")] == [catalogue.goals().goal(i) for i in range(500)]
    keys = Counter(catalogue.goals().goal(position).key for position in range(6_910))
    assert sum(count - 1 for count in keys.values()) == 9


def test_a_goals_file_with_prices_beside_it(official: Path, golden: Path) -> None:
    catalogue = open_catalogue(official, goals=golden / "goals.jsonl.xz", price_seed=7)
    tasks = catalogue.make_tasks()
    rows = read_packed(golden / "goals.jsonl.xz")
    assert len(tasks) == 6_910 and tasks[17].id == "webshop/all/00017"
    assert tasks[17].instruction == rows[17]["instruction_text"]
    prices = read_packed(golden / "prices.json.xz")
    assert all(catalogue.price(catalogue.number_of(asin) or 0) == price for asin, price in prices.items())
    assert len(catalogue.make_tasks("test")) == 500
