from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from spear_envs.alfworld.conditions import count_goal_conditions, split_goal
from spear_envs.alfworld.game import Game
from spear_envs.alfworld.gamefile import GameFile, load_game
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.oracle import plan
from spear_envs.alfworld.pddl import parse_expression
from spear_envs.alfworld.state import State
from spear_envs.alfworld.synthesis.games import SyntheticGame
from spear_envs.alfworld.task_types import TaskType
from tests.spear_envs.alfworld.odd_games import GOALS
from tests.spear_envs.alfworld.synthetic import open_synthetic, synthetic_games, walks, wander

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
@settings(max_examples=150)
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
    for path in sorted(official_games.glob("valid_seen/*/*/game.tw-pddl")):
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


def test_conditions_that_differ_by_names_alone_count_once() -> None:
    goal = parse_expression(
        "(and (exists (?a - object ?b - object) (and (objectType ?a AppleType) (isHot ?a) (isHot ?b)"
        " (objectType ?b AppleType) (not (= ?a ?b)))))"
    )
    single = ("and", ("ishot", "?0"), ("objecttype", "?0", "appletype"))
    assert split_goal(goal)[0] == ("exists", ("?0", "-", "object"), single)
    assert len(split_goal(goal)) == 2


@pytest.mark.parametrize("goal", GOALS)
def test_unusual_goals_count_whole(goal: str) -> None:
    expression = parse_expression(goal)
    parts = split_goal(expression)
    assert parts[-1] in (expression, expression[-1])
    assert 1 <= len(parts) <= 3
