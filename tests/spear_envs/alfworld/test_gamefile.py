"""Game files, broken ones included, and the games that environments share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.game import Game
from spear_envs.alfworld.gamefile import CACHED_GAMES, GameFile, WordingChoice, load_game, read_game_file
from spear_envs.alfworld.tasks import make_task_set
from spear_envs.alfworld.wording import WORDING_2_1_2
from tests.spear_envs.alfworld.odd_games import make_release_2_1_1
from tests.spear_envs.alfworld.peer import MEND, has_textworld
from tests.spear_envs.alfworld.small import WORDING_2_1_1, make_data, write_problem

needs_logic = pytest.mark.skipif(not has_textworld(), reason=MEND)


def write(folder: Path, data: Any) -> Path:
    path = folder / "game.tw-pddl"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def read_game(path: Path, wording: WordingChoice = WordingChoice.FILE) -> Game:
    return load_game(GameFile(path), wording)


@needs_logic
def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path, make_data())
    game = read_game(path)
    assert game.task == "put a hot apple in fridge."
    assert read_game(path) is game
    write(tmp_path, make_data(write_problem("(and)")))
    os.utime(path, ns=(1, 1))
    assert read_game(path) is not game
    assert read_game(path).goal.expression == ("and",)


@needs_logic
def test_older_files_speak_as_they_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, make_release_2_1_1(make_data()))
    assert read_game(path).wording == WORDING_2_1_1
    assert read_game(path, WordingChoice.RELEASE_2_1_2).wording == WORDING_2_1_2
    assert read_game(path).wording == WORDING_2_1_1


@needs_logic
def test_a_game_without_solvable_is_played(tmp_path: Path) -> None:
    data = make_data()
    del data["solvable"], data["walkthrough"]
    assert read_game(write(tmp_path, data)).receptacles


@needs_logic
@pytest.mark.parametrize("key", ["pddl_domain", "grammar", "pddl_problem"])
@pytest.mark.parametrize("value", [None, 3, ["x"], ...])
def test_a_missing_part_is_named(tmp_path: Path, key: str, value: Any) -> None:
    data = make_data()
    if value is ...:
        del data[key]
    else:
        data[key] = value
    path = write(tmp_path, data)
    with pytest.raises(GameError, match=f"{path.name} is not a game of ALFWorld: it has .* '{key}'"):
        read_game_file(path)


@needs_logic
@pytest.mark.parametrize(("key", "value"), [("grammar", ""), ("pddl_domain", ""), ("pddl_problem", "(define)")])
def test_a_part_that_cannot_be_read_names_the_file(tmp_path: Path, key: str, value: str) -> None:
    path = write(tmp_path, {**make_data(), key: value})
    with pytest.raises(GameError, match=f"^{path} cannot be played: its "):
        read_game(path)


@needs_logic
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    text = json.dumps(make_data())
    path = write(tmp_path, text[: int(share * len(text))])
    with pytest.raises(GameError, match=str(path)):
        read_game(path)


def test_the_cache_is_bounded_and_shared() -> None:
    tasks: Any = make_task_set("embedded", "train", rooms="small")
    first = load_game(tasks.source(tasks[0]))
    assert load_game(tasks.source(tasks[0])) is first
    for index in range(1, CACHED_GAMES + 1):
        load_game(tasks.source(tasks[index]))
    assert load_game(tasks.source(tasks[0])) is not first


def test_a_files_key_tells_versions_apart(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    before = GameFile(path).key
    assert GameFile(path).key == before
    write(tmp_path, "ab")
    assert GameFile(path).key != before
    path.unlink()
    with pytest.raises(GameError, match="cannot be read"):
        _ = GameFile(path).key
