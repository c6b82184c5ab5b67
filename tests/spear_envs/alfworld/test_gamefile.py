"""Game files and their PDDL, broken ones included."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.gamefile import GameFile, WordingChoice, load_game, read_game_file
from spear_envs.alfworld.grammar import WORDING_2_1_2
from spear_envs.alfworld.pddl import GameError, parse_expression, read_problem
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


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "0 lists"),
        ("(a", "')' is missing"),
        ("(a))", "without a '('"),
        ("(a)(b)", "2 lists"),
        ("a (b)", "outside of brackets"),
        ("(" * 300 + ")" * 300, "deeper than"),
        ("(a) ; b\nc", "outside of brackets"),
    ],
)
def test_what_is_no_list_says_why(text: str, fault: str) -> None:
    with pytest.raises(GameError, match=fault.replace("(", r"\(").replace(")", r"\)")):
        parse_expression(text)


@given(st.text("()ab; \n-?", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(GameError):
        parse_expression(text)


def test_a_problem() -> None:
    problem = read_problem(write_problem())
    assert problem.objects["cabinet_bar_2"] == "receptacle"
    assert problem.rows("iscool") == {("apple_bar_2",)}
    assert problem.having("toggleable") == {"desklamp_bar_1"}
    assert problem.rows("ishot") == frozenset()
    assert "agent1" in problem.named
    assert "mug" not in problem.named  # declared, but in no fact


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("(define (problem small)", "(undefined (problem small)", "does not begin with"),
        ("(:domain alfred)", "(:domain alfred) (:wonder x)", "unknown section ':wonder'"),
        ("(:domain alfred)", "(:domain alfred) ()", "not a section"),
        ("(:init", "(:init x", "not a fact"),
        ("(:init", "(:init (sings agent1)", "unknown predicate 'sings'"),
        ("(:init", "(:init (opened)", "0 arguments instead of 1"),
        ("(:init", "(:init (opened Fridge_bar_9)", "'fridge_bar_9' in .opened …. without declaring"),
        ("(:init", "(:init (opened (a b))", "without declaring"),
        ("agent1 - agent", "agent1 - agent Box_bar_1 - container", "unknown type 'container'"),
        ("agent1 - agent", "agent1 - agent Box_bar_1 -", "unknown type"),
        ("agent1 - agent", "agent1 - agent (Box)", "a list where the name"),
        ("agent1 - agent", "agent1 agent2 - agent", "2 agents"),
        ("agent1 - agent", "agent1 - object", "0 agents"),
        ("(atLocation agent1 loc_bar_0)", "", "0 locations"),
        ("(:init", "(:init (atLocation agent1 loc_bar_1)", "2 locations"),
        ("(:init", "(:init (receptacleAtLocation Desk_bar_1 loc_bar_1)", "at two locations"),
        ("(:init", "(:init (holds agent1 Mug_bar_1)", "'holds' but not 'holdsany'"),
        ("(:init", "(:init (holdsAny agent1)", "'holds' but not 'holdsany'"),
        ("(:init", "(:init (holds agent1 Mug_bar_1) (holds agent1 Egg_bar_1) (holdsAny agent1)", "more than one"),
        *((f"({name}", "(:requirements", f"no section '{name}'") for name in (":objects", ":init", ":goal")),
        ("(:goal", "(:goal (and) (and)) (:goal", "section ':goal'|exactly one"),
        ("(:init", "(:init) (:init", "section ':init' twice"),
        ("agent1 - agent", "agent1 - agent agent1 - object", "declares 'agent1' twice"),
        (
            "agent1 - agent",
            "agent1 - agent App?le_bar_1 - object",
            r"the name '\?le_bar_1', which TextWorld cannot play",
        ),
        ("(:init", "(:init (inReceptacle Fridge_bar_1 Desk_bar_1)", "'fridge_bar_1', of type receptacle, in .inrecept"),
        ("(:init", "(:init (objectAtLocation agent1 loc_bar_1)", "of type agent, .* takes the type object"),
        ("(:init", "(:init (inReceptacleObject AppleType Mug_bar_1)", "of type otype, .* takes the type object"),
        ("(:init", "(:init (holds agent1 Fridge_bar_1) (holdsAny agent1)", "of type receptacle, in .holds …."),
        ("(:init", "(:init (atLocation Mug_bar_1 loc_bar_1)", "of type object, .* takes the type agent"),
        ("agent1 loc_bar_0", "agent1 Desk_bar_1", "of type receptacle, .* takes the type location"),
    ],
)
def test_what_is_no_game_says_why(old: str, new: str, fault: str) -> None:
    text = write_problem()
    assert old in text
    with pytest.raises(GameError, match=fault):
        Game.from_problem(text.replace(old, new, 1), "x", WORDING_2_1_2)


@pytest.mark.parametrize("name", ["{0}app_bar_1", "app}le_bar_1", "a|b_bar_1", "pomme_é_bar_1", "i", "P"])
def test_names_that_textworld_cannot_play_are_refused(name: str) -> None:
    with pytest.raises(GameError, match="which TextWorld cannot play"):
        read_problem(re.sub(r"\bApple_bar_1(?=[\s)])", name, write_problem()))
    text = write_problem(facts="(isHot x_dot_y) (isHot x.y)").replace("Apple Mug - object", "x_dot_y x.y - object")
    with pytest.raises(GameError, match=r"2 things that are all called 'x\.y '"):
        Game.from_problem(text, "x", WORDING_2_1_2)


def test_a_question_mark_begins_a_word() -> None:
    assert parse_expression("(exists (?a?b) (p ?a?b x?c))") == ("exists", ("?a", "?b"), ("p", "?a", "?b", "x", "?c"))


@given(st.integers(min_value=0, max_value=len(write_problem()) - 2))
def test_a_problem_cut_short_is_refused(length: int) -> None:
    with pytest.raises(GameError):
        read_problem(write_problem().rstrip()[:length])
