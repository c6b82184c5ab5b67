"""Goals: the compiled test against one that tries every binding, and their conditions."""

import random
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.gamefile import GameFile, TaskType, load_game
from spear_envs.alfworld.goals import FLUENTS, compile_condition, count_goal_conditions
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.oracle import plan
from spear_envs.alfworld.pddl import PREDICATES, Expression, GameError, parse_expression
from spear_envs.alfworld.state import State
from spear_envs.alfworld.synthesis.games import SyntheticGame
from tests.spear_envs.alfworld.small import make_small, play, start
from tests.spear_envs.alfworld.synthetic import open_synthetic, synthetic_games, walks, wander

TYPES = ("object", "receptacle", "agent", "location")
ATOMS = (
    *("atlocation", "receptacleatlocation", "objectatlocation", "inreceptacle", "holds", "objecttype"),
    *("openable", "opened", "pickupable", "ishot", "iscool", "isclean", "issliced", "istoggled", "ison", "holdsany"),
    "checked",
)
NAMES = ("apple_bar_1", "apple_bar_2", "fridge_bar_1", "loc_bar_1", "loc_bar_2", "agent1", "appletype", "nobody")


def evaluate(game: Game, state: State, expression: Expression, bound: Mapping[str, str]) -> bool:
    """The meaning of a condition, by trying everything."""
    assert isinstance(expression, tuple)
    operator, parts = expression[0], expression[1:]
    if operator == "and":
        return all(evaluate(game, state, part, bound) for part in parts)
    if operator == "or":
        return any(evaluate(game, state, part, bound) for part in parts)
    if operator == "not":
        return not evaluate(game, state, parts[0], bound)
    if operator == "imply":
        return not evaluate(game, state, parts[0], bound) or evaluate(game, state, parts[1], bound)
    if operator in ("exists", "forall"):
        words = [str(word) for word in parts[0]]
        names, kinds = words[0::3], words[2::3]
        objects = game.problem.objects
        domains = [[one for one, kind in objects.items() if wanted in (kind, "object")] for wanted in kinds]
        answers = (
            evaluate(game, state, parts[1], {**bound, **dict(zip(names, values, strict=True))})
            for values in product(*domains)
        )
        return any(answers) if operator == "exists" else all(answers)
    terms = [bound.get(str(part), str(part)) for part in parts]
    if operator == "=":
        return terms[0] == terms[1]
    if operator not in FLUENTS:
        return tuple(terms) in game.problem.rows(str(operator))
    if len(terms) == 1:
        return state.has_property(str(operator), terms[0])
    return state.has_relation(str(operator), terms[0], terms[1])


def draw_condition(rng: random.Random, variables: tuple[str, ...], depth: int) -> str:
    """A random condition over these variables."""
    operator = rng.choice(("and", "or", "not", "imply", "exists", "forall", "atom", "atom", "=")) if depth else "atom"

    def inner(more: tuple[str, ...] = ()) -> str:
        return draw_condition(rng, (*variables, *more), depth - 1)

    if operator in ("and", "or"):
        return f"({operator} {' '.join(inner() for _ in range(rng.randrange(4)))})"
    if operator == "not":
        return f"(not {inner()})"
    if operator == "imply":
        return f"(imply {inner()} {inner()})"
    if operator in ("exists", "forall"):
        # Names recur, so that inner variables hide outer ones.
        names = rng.sample(("?x", "?y", "?z"), rng.randrange(1, 3))
        listed = " ".join(f"{name} - {rng.choice(TYPES)}" for name in names)
        return f"({operator} ({listed}) {inner(tuple(names))})"
    terms = [*NAMES, *variables * 6]
    if operator == "=":
        return f"(= {rng.choice(terms)} {rng.choice(terms)})"
    predicate = rng.choice(ATOMS)
    return f"({predicate} {' '.join(rng.choice(terms) for _ in range(PREDICATES[predicate]))})"


@settings(max_examples=75)
@given(st.integers(min_value=0, max_value=2**32))
def test_a_condition_means_what_trying_everything_says(seed: int) -> None:
    rng = random.Random(seed)
    game = make_small()
    condition = compile_condition(parse_expression(draw_condition(rng, (), 3)), game.problem)
    state, text = game.new_state(), Interpreter(game)
    for _ in range(6):
        assert condition.holds(text.state) == evaluate(game, text.state, condition.expression, {})
        text.step(rng.choice(text.admissible))
    assert state.to_plain(game.initial) == game.initial.to_plain(game.initial)  # asking changed nothing


@settings(max_examples=25)
@given(st.integers(min_value=0, max_value=2**32))
def test_a_condition_stays_as_it_is_while_what_it_reads_does(seed: int) -> None:
    """``won`` is only worked out anew when a command changes what the goal reads; that must lose nothing."""
    rng = random.Random(seed)
    game = start(draw_condition(rng, (), 3))
    for _ in range(30):
        assert game.won == evaluate(game.game, game.state, game.game.goal.expression, {})
        # Places to look at count as checked, which is only kept for goals that ask for it.
        game.step(rng.choice(game.admissible))


def test_checked_follows_domain() -> None:
    """look, inventory and help check something too, as the domain has it."""
    for goal, commands in {
        "(checked agent1)": ("inventory",),
        "(checked loc_bar_0)": ("look",),
        "(checked Desk_bar_1)": ("go to desk 1", "examine desk 1"),
        "(checked Fridge_bar_1)": ("go to fridge 1", "open fridge 1"),
        "(checked Pencil_bar_1)": ("go to desk 1", "take pencil 1 from desk 1", "examine pencil 1"),
    }.items():
        game = start(goal)
        assert not game.won
        play(game, *commands)
        assert game.won, goal


@pytest.mark.parametrize(
    ("goal", "fault"),
    [
        ("(when (opened Fridge_bar_1) (opened Fridge_bar_1))", "'when'"),
        ("(>= 1 2)", "'>='"),
        ("(sings agent1)", "'sings'"),
        ("()", "not a condition"),
        ("x", "not a condition"),
        ("((opened))", "not a condition"),
        ("(not)", "'not' with 0 arguments instead of 1"),
        ("(imply (and))", "'imply' with 1"),
        ("(= a)", "'=' with 1"),
        ("(opened)", "'opened' with 0 arguments instead of 1"),
        ("(exists (?r - receptacle))", "'exists' with 1"),
        ("(exists ?r (opened ?r))", "not a list of variables"),
        ("(exists (r - receptacle) (opened r))", "begin with a question mark"),
        ("(exists (?r - drawer) (opened ?r))", "unknown type 'drawer'"),
        ("(opened ?r)", r"\?r, which no 'exists'"),
        ("(opened (a))", "where a name was due"),
    ],
)
def test_what_is_no_goal_says_why(goal: str, fault: str) -> None:
    with pytest.raises(GameError, match=fault):
        make_small(goal)


TOTALS = {TaskType.PICK: 1, TaskType.LOOK: 2, TaskType.PICK2: 2}
ATTRIBUTES = {TaskType.CLEAN: ("clean", "cleanable"), TaskType.HEAT: ("hot", "heatable"),
              TaskType.COOL: ("cool", "coolable")}  # fmt: skip


def count_as_alfred(game: Game, state: State, task_type: TaskType, wanted: str, target: str) -> tuple[int, int]:
    """ALFRED's ``goal_conditions_met`` of each task, on our states."""
    things = [one for one, kinds in game.object_types.items() if f"{wanted.lower()}type" in kinds]
    places = [one for one, kinds in game.receptacle_types.items() if f"{target.lower()}type" in kinds]
    if task_type is TaskType.LOOK:
        lamps = [one for one, kinds in game.object_types.items() if f"{target.lower()}type" in kinds]
        here = game.receptacles_at.get(state.location, ())
        seen = [one for one in lamps if one in state.toggled and any(one in state.contents[place] for place in here)]
        return (state.held in things) + bool(seen), 2
    inside = {place: [one for one in things if one in state.contents[place]] for place in places}
    if task_type is TaskType.PICK2:
        return min(max(len(found) for found in inside.values()), 2), 2
    placed = [one for found in inside.values() for one in found]
    if task_type is TaskType.PICK:
        return int(bool(placed)), 1
    attribute, able = ATTRIBUTES[task_type]
    things = [one for one in things if one in game.problem.having(able)]
    treated = [one for one in things if one in getattr(state, attribute)]
    in_place = [one for one in placed if one in things]
    return bool(in_place) + bool(treated) + bool(set(in_place) & set(treated)), 3


@given(synthetic_games, walks)
@settings(max_examples=50)
def test_counts_are_those_of_alfred(made: SyntheticGame, walk: list[float]) -> None:
    play = Interpreter(open_synthetic(made))
    game = play.game
    wander(play, walk)
    for command in [None, *plan(game, play.state)]:
        if command is not None:
            play.step(command)
        met, total = count_goal_conditions(game.conditions, play.state)
        assert (met, total) == count_as_alfred(game, play.state, made.task_type, made.wanted, made.target)
        assert total == TOTALS.get(made.task_type, 3)
        assert (met == total) == play.won
    assert play.won


def test_official_games(official_games: Path) -> None:
    for path in sorted(official_games.glob("valid_seen/*/*/game.tw-pddl"))[::4]:
        head = path.parts[-3].split("-")
        task_type = TaskType(head[0])
        play = Interpreter(load_game(GameFile(path)))
        met = []
        for command in [None, *plan(play.game, play.state)]:
            if command is not None:
                play.step(command)
            counted = count_goal_conditions(play.game.conditions, play.state)
            assert counted == count_as_alfred(play.game, play.state, task_type, head[1], head[3])
            assert (counted[0] == counted[1]) == play.won
            met.append(counted[0])
        assert met[0] < met[-1] and play.won
