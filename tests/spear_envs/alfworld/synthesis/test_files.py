from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import gymnasium as gym
import pytest

from spear_envs.alfworld import write_synthetic_game
from spear_envs.alfworld.synthesis import files
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
def test_writing_again_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_synthetic_game("look", 0, tmp_path)
    before = path.read_bytes()
    assert write_synthetic_game("look", 0, tmp_path) == path and path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == ["game.tw-pddl", "traj_data.json"]


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


def test_without_alfworld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(SpearError, match=r"alfworld, which is not installed: pip install 'spear-envs\[alfworld\]'"):
        write_synthetic_game("pick", 0, tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_alfworld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("alfworld", tmp_path / "__init__.py", submodule_search_locations=[])
    assert spec is not None and spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(files, "find_spec", lambda name: spec)
    with pytest.raises(SpearError, match=r"alfred\.pddl cannot be read"):
        write_synthetic_game("pick", 0, tmp_path / "out")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "alfred.pddl").write_text("")
    (tmp_path / "data" / "alfred.twl2").write_text("grammar")
    with pytest.raises(SpearError, match=r"This needs alfworld 0\.4\.2"):
        write_synthetic_game("pick", 0, tmp_path / "out")


@needs_alfworld
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpearError, match=r"cannot be written"):
        write_synthetic_game("pick", 0, tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task_type": "juggle"}, "task_type='juggle' is not valid"),
        ({"seed": -1}, "seed=-1 is not valid: give a whole number"),
        ({"seed": True}, "seed=True is not valid"),
        ({"seed": "1"}, "seed='1' is not valid"),
        ({"split": "test"}, "split='test' is not valid"),
        ({"rooms": "huge"}, "rooms='huge' is not valid"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        write_synthetic_game(**{"task_type": "pick", "seed": 0, "folder": tmp_path, **arguments})  # type: ignore[arg-type]
