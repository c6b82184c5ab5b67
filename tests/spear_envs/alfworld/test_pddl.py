"""Reading PDDL, broken PDDL included."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.game import Game
from spear_envs.alfworld.pddl import parse_expression, read_problem, read_typed_list
from spear_envs.alfworld.wording import WORDING_2_1_2
from tests.spear_envs.alfworld.small import write_problem


def test_lists_nest_and_comments_go() -> None:
    assert parse_expression("(A (b c) ; (d\n()E)") == ("a", ("b", "c"), (), "e")


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


def test_typed_lists() -> None:
    words = parse_expression("(a b - receptacle c d - object e)")
    assert isinstance(words, tuple)
    assert list(read_typed_list(words)) == [
        ("a", "receptacle"),
        ("b", "receptacle"),
        ("c", "object"),
        ("d", "object"),
        ("e", "object"),
    ]


def test_a_problem() -> None:
    problem = read_problem(write_problem())
    assert problem.objects["cabinet_bar_2"] == "receptacle"
    assert problem.rows("iscool") == {("apple_bar_2",)}
    assert problem.having("toggleable") == {"desklamp_bar_1"}
    assert problem.rows("ishot") == frozenset()
    assert "agent1" in problem.named
    assert "mug" not in problem.named  # declared, but in no fact


def test_denied_facts_and_assignments_mean_nothing() -> None:
    plain = read_problem(write_problem())
    more = read_problem(write_problem(facts="(not (opened Fridge_bar_1)) (= (distance loc_bar_1 loc_bar_2) 7)"))
    assert plain == more


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
    with pytest.raises(GameError, match=r"which TextWorld cannot play: give the thing another"):
        read_problem(re.sub(r"\bApple_bar_1(?=[\s)])", name, write_problem()))


@pytest.mark.parametrize(
    "name", ["12_bar_1", "%s.*[l]e$^+#_bar_1", "ap'ple\"_bar_1", "mu\\g_bar_1", "ip", "=x", "define"]
)
def test_other_odd_names_are_not(name: str) -> None:
    problem = read_problem(re.sub(r"\bApple_bar_1(?=[\s)])", lambda _: name, write_problem()))
    assert problem.having("iscool") == {"apple_bar_2"} and name.lower() in problem.having("cleanable")


def test_a_question_mark_begins_a_word() -> None:
    assert parse_expression("(exists (?a?b) (p ?a?b x?c))") == ("exists", ("?a", "?b"), ("p", "?a", "?b", "x", "?c"))


@given(st.integers(min_value=0, max_value=len(write_problem()) - 2))
def test_a_problem_cut_short_is_refused(length: int) -> None:
    with pytest.raises(GameError):
        read_problem(write_problem().rstrip()[:length])
