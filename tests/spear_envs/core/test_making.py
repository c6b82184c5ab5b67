"""Environments by their ids, users' Python beside ours, and errors."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from spear_envs.core.errors import EnvFault, SpearError, require_whole
from spear_envs.core.machine import import_file, make_command
from spear_envs.core.making import find_splits, make_env
from spear_envs.core.registration import ENVIRONMENTS

CORRIDOR = "tests.spear_envs.corridor:tests/Corridor-v0"


@pytest.mark.parametrize("env_id", ["spear/Sokoban-v1", CORRIDOR])
def test_an_environment_of_a_split(env_id: str) -> None:
    splits = find_splits(env_id)
    for split in splits:
        env = make_env(env_id, split)
        assert env.tasks.split == split and env.unwrapped is env
    assert make_env(env_id).tasks.split == splits[0]


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
        ("spear/Sokoban-v1", "", {}, "split=''"),
        ("spear/Sokoban-v1", None, {"max_episode_steps": 0}, "max_episode_steps"),
        ("spear/Sokoban-v1", None, {"render_mode": 3}, "render_mode"),
        ("spear/Sokoban-v1", None, {"max_episode_steps": "x"}, "max_episode_steps"),
        ("./mine:spear/Sokoban-v1", None, {}, "./mine"),
    ],
)
def test_what_cannot_be_made_is_told(env_id: str, split: str | None, keywords: dict[str, Any], words: str) -> None:
    assert "CartPole-v1" in gym.registry
    with pytest.raises(SpearError) as caught:
        make_env(env_id, split, keywords)
    assert words in str(caught.value) and "\n" not in str(caught.value)


gym.register("tests/ShortCorridor-v0", "tests.spear_envs.corridor:CorridorEnv", max_episode_steps=3)


@pytest.mark.parametrize(
    ("env_id", "keywords"), [("spear/Sokoban-v1", {"max_episode_steps": 3}), ("tests/ShortCorridor-v0", {})]
)
def test_a_limit_of_gymnasium_counts_without_its_wrapper(env_id: str, keywords: dict[str, Any]) -> None:
    env: Any = make_env(env_id, keywords=keywords)
    assert env.max_turns == 3, "prompts tell it"
    env.reset(seed=0)
    ends = [env.step("")[3] for _ in range(3)]
    assert ends == [False, False, True]


@pytest.mark.parametrize("env_id", ["spear/Sokobann-v0", "no_module:spear/Sokoban-v1", "not an id"])
def test_splits_of_nothing(env_id: str) -> None:
    with pytest.raises(SpearError, match="Choose one of spear/ALFWorld-v0"):
        find_splits(env_id)


TRACE = """
import json, sys
from spear_envs.core.making import make_env
from spear_envs.core.registration import ENVIRONMENTS
from spear_envs.testing.trace import freeze
for entry in ENVIRONMENTS:
    env = make_env(entry.id)
    step = env.reset(seed=3)
    print(entry.id, env.tasks.fingerprint, json.dumps(freeze(step)), env.expert_plan())
    while not env.done and env.turn < 3 and "Code" not in entry.id:  # whose expert needs a sandbox
        step = env.step(env.parser.respond(env.expert_plan()[0]))
        print(json.dumps(freeze(step)))
heavy = "torch transformers gym gym_sokoban textworld alfworld sympy scipy pandas pyarrow faiss fastapi httpx spacy ray"
print("loaded:", *[name for name in heavy.split() if name in sys.modules])
"""


def test_episodes_depend_on_the_seed_alone_and_load_nothing_heavy() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", TRACE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "77")
    }
    assert len(printed) == 1
    lines = printed.pop().splitlines()
    assert len(lines) > 3 * len(ENVIRONMENTS) and lines[-1] == "loaded:"


@pytest.mark.parametrize("env_id", [entry.id for entry in ENVIRONMENTS])
def test_every_environment_can_be_drawn(env_id: str) -> None:
    env: Any = make_env(env_id, keywords={"render_mode": "rgb_array"})
    env.reset(seed=0)
    frame = env.render()
    assert frame.dtype == np.uint8 and frame.shape[2] == 3 and frame.std() > 1, "not one colour"
    env.step("nonsense")
    assert env.render().shape == frame.shape, "as RecordVideo needs it"


PROGRAM = "import random, sys, mine_beside\nprint(random.randint(3, 3) + mine_beside.FOUR, sys.argv[1:], __name__)"


def test_the_current_folder_is_searched_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in ("random", "1 / 0"), ("types", "1 / 0"), ("mine", PROGRAM), ("mine_beside", "FOUR = 4"):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(make_command("mine", "a"), capture_output=True, text=True, check=False)
    assert done.stdout == "7 ['a'] __main__\n", done.stderr


def test_a_file_may_have_dataclasses_and_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_mine.py").write_text("ONE = 1")
    lines = ["from __future__ import annotations", "from dataclasses import dataclass, field"]
    lines += ["from neighbour_of_mine import ONE", "@dataclass", "class Point:", "    x: int = field(default=ONE)"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    assert import_file(tmp_path / "mine.py", "mine_of_test").Point().x == 1
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_file(tmp_path / "broken.py", "broken_of_test")
    assert "broken_of_test" not in sys.modules


def test_faults_have_a_kind_and_survive_pickling() -> None:
    fault = pickle.loads(pickle.dumps(EnvFault("retriever_timeout", "no answer in 30 s")))
    assert (fault.kind, fault.message) == ("retriever_timeout", "no answer in 30 s")
    assert str(fault) == "retriever_timeout: no answer in 30 s"
    assert str(EnvFault("down")) == "down"


@pytest.mark.parametrize(
    ("value", "most", "limits"),
    [
        (1, None, "of at least 2"),
        (True, None, "of at least 2"),
        (2.0, None, "of at least 2"),
        ("2", None, "of at least 2"),
        (1, 1_000, "from 2 to 1,000"),
        (1_001, 1_000, "from 2 to 1,000"),
    ],
)
def test_what_is_no_whole_number_within_its_limits_is_refused(value: object, most: int | None, limits: str) -> None:
    said = f"topk={value!r} is not valid: give a whole number {limits}."
    with pytest.raises(SpearError, match=f"^{re.escape(said)}$"):
        require_whole("topk", value, 2, most)
