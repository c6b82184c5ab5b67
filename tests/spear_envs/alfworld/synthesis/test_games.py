"""Synthetic games: rooms, files, and the dice behind them."""

import importlib.util
import itertools
import json
from collections import Counter
from pathlib import Path

import gymnasium as gym
import pytest
from hypothesis import given, settings

from spear_envs.alfworld import write_synthetic_game
from spear_envs.alfworld.gamefile import SUBTASKS, TaskType, find_task_type
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.oracle import plan
from spear_envs.alfworld.synthesis.games import SENTENCES, SyntheticGame, make_game
from spear_envs.alfworld.synthesis.rooms import (
    ABILITIES,
    HOLDS,
    LAYOUTS,
    ROOMS,
    TREATMENTS,
    RoomKind,
    RoomSize,
    list_layouts,
    rooms_of,
)
from spear_envs.core.errors import SpearError
from tests.spear_envs.alfworld.synthetic import open_synthetic, synthetic_games


@given(synthetic_games)
@settings(max_examples=40)
def test_games_are_open_and_won_by_the_expert(made: SyntheticGame) -> None:
    play = Interpreter(open_synthetic(made))
    assert not play.won
    commands = plan(play.game, play.state)
    assert 3 <= len(commands) <= 11
    for command in commands:
        assert not play.won and command in play.admissible
        play.step(command)
    assert play.won


@given(synthetic_games)
@settings(max_examples=40)
def test_games_are_well_formed(made: SyntheticGame) -> None:
    game = open_synthetic(made)
    layouts = [list_layouts(room, made.size)[i] for room in rooms_of(made.task_type) for i in LAYOUTS[made.split]]
    assert made.layout in layouts
    assert game.receptacles == tuple(sorted(one.identifier.lower() for one in made.layout.receptacles))
    assert game.initial.location not in game.receptacles_at
    assert game.initial.held is None and not game.initial.opened and not game.initial.toggled
    lies_in: dict[str, set[str]] = {}
    for receptacle in game.receptacles:
        for thing in game.initial.contents[receptacle]:
            lies_in.setdefault(thing, set()).add(receptacle)
    for thing in game.object_types:
        assert len(lies_in.get(thing, ())) <= 2
        if thing in game.pickupable:  # a second place may be anywhere, as in official games
            fitting = [one for one in lies_in.get(thing, ()) if game.accepts(one, thing)]
            assert fitting or len(lies_in.get(thing, ())) < 2
    assert made.sentence in [
        form.format(wanted=made.wanted.lower(), target=made.target.lower()) for form in SENTENCES[made.task_type]
    ]
    assert made.task_type is TaskType.LOOK or made.wanted in HOLDS[made.target]


sized_rooms = pytest.mark.parametrize(
    ("room", "size"), list(itertools.product(ROOMS, RoomSize)), ids=lambda value: getattr(value, "name", value)
)


@sized_rooms
def test_layouts_keep_the_bounds(room: RoomKind, size: RoomSize) -> None:
    least, most = (9, 15) if size is RoomSize.SMALL else (16, 40)
    for layout in list_layouts(room, size):
        assert least <= len(layout.receptacles) <= most
        counts = Counter(one.kind for one in layout.receptacles)
        assert all(low <= counts[kind] <= high for kind, (low, high) in room.counts(size).items())
        assert len({one.identifier for one in layout.receptacles}) == len(layout.receptacles)


def test_layouts_of_unseen_splits_are_no_others() -> None:
    assert not set(LAYOUTS["valid_unseen"]) & set(LAYOUTS["train"])
    assert set(LAYOUTS["valid_seen"]) <= set(LAYOUTS["train"])
    assert len(LAYOUTS["train"]) * len(ROOMS) >= 60


def test_appliances_are_where_tasks_need_them() -> None:
    needed = {TaskType.CLEAN: "SinkBasin", TaskType.HEAT: "Microwave", TaskType.COOL: "Fridge"}
    for task_type, kind in needed.items():
        for room, size in itertools.product(rooms_of(task_type), RoomSize):
            assert room.counts(size)[kind][0] >= 1
            assert any(thing in ABILITIES[TREATMENTS[task_type][0]] for thing in room.objects)
    assert all(room.lamp for room in rooms_of(TaskType.LOOK))


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
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpearError, match=r"cannot be written"):
        write_synthetic_game("pick", 0, tmp_path / "file")
