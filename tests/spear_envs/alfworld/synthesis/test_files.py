from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import gymnasium as gym
import pytest

from spear_envs.alfworld import write_synthetic_game
from spear_envs.alfworld.synthesis.games import make_game
from spear_envs.alfworld.synthesis.rooms import RoomSize
from spear_envs.alfworld.task_types import SUBTASKS, TaskType, find_task_type
from spear_envs.core.errors import SpearError

needs_alfworld = pytest.mark.skipif(
    importlib.util.find_spec("alfworld") is None, reason="alfworld is not installed: pip install 'spear-envs[alfworld]'"
)


@needs_alfworld
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_written_game_is_the_one_that_was_made(tmp_path: Path, subtask: str) -> None:
    path = write_synthetic_game(subtask, 7, tmp_path, split="valid_unseen")
    made = make_game(find_task_type(subtask), "valid_unseen", 7)
    assert path.parent.parent.parent == tmp_path / "valid_unseen"
    assert path.parent.name == "trial_S000007" and path.name == "game.tw-pddl"
    data = json.loads((path.parent / "traj_data.json").read_text())
    assert data["task_type"] == made.task_type.value
    assert data["pddl_params"]["object_target"] == made.wanted
    env = gym.make("spear_envs:spear/ALFWorld-v0", game=str(path), response_format="plain").unwrapped
    observation, info = env.reset(seed=0)
    assert observation.endswith(f"Your task is to: {made.sentence}") and info["subtask"] == subtask
    for command in env.expert_plan():  # type: ignore[attr-defined]
        _, _, terminated, _, info = env.step(command)
    assert terminated and info["won"]


@needs_alfworld
def test_written_games_are_an_official_folder(tmp_path: Path) -> None:
    for seed in range(3):
        write_synthetic_game("pick_and_place_simple", seed, tmp_path, rooms="small")
    env = gym.make("spear_envs:spear/ALFWorld-v0", dataset="official", data_dir=tmp_path).unwrapped
    assert len(env.tasks) == 3  # type: ignore[attr-defined]
    sentences = {task.instruction for task in env.tasks}  # type: ignore[attr-defined]
    assert sentences == {make_game(TaskType.PICK, "train", seed, RoomSize.SMALL).sentence for seed in range(3)}


@needs_alfworld
def test_alfworld_is_not_imported(tmp_path: Path, root: Path) -> None:
    import subprocess
    import sys

    code = (
        "import os, sys\nfrom spear_envs.alfworld import write_synthetic_game\n"
        f"write_synthetic_game('pick', 0, {str(tmp_path)!r})\n"
        "assert 'alfworld' not in sys.modules and 'ALFWORLD_DATA' not in os.environ\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, env={**os.environ, "HOME": str(tmp_path)})
    assert not (tmp_path / ".cache").exists()


@needs_alfworld
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpearError, match=r"cannot be written .*: name another folder"):
        write_synthetic_game("pick", 0, tmp_path / "file")
