"""Both experts: the planner and the one that searches."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spear_envs.alfworld.env import ALFWorldEnv
from spear_envs.alfworld.game import Game
from spear_envs.alfworld.gamefile import GameFile, TaskType, load_game
from spear_envs.alfworld.grammar import WORDING_2_1_2, Wording
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.oracle import is_winnable, plan, search
from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game
from spear_envs.alfworld.synthesis.rooms import RoomSize
from spear_envs.core.errors import SpearError
from tests.spear_envs.alfworld.odd_games import GOALS
from tests.spear_envs.alfworld.synthetic import open_synthetic, synthetic_games, walks, wander

THINGS = """
(define (problem tiny) (:domain alfred)
(:objects agent1 - agent AppleType MugType KnifeType DeskLampType - otype
    CounterTopType FridgeType MicrowaveType SinkBasinType DeskType - rtype
    loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 loc_bar_4 loc_bar_5 - location
    CounterTop_bar_1 Fridge_bar_1 Microwave_bar_1 Sink_bar_1_bar_SinkBasin Desk_bar_1 Desk_bar_2 - receptacle
    Apple_bar_1 Apple_bar_2 Mug_bar_1 DeskLamp_bar_1 - object)
(:init (atLocation agent1 loc_bar_0)
    (receptacleAtLocation CounterTop_bar_1 loc_bar_1) (receptacleType CounterTop_bar_1 CounterTopType)
    (receptacleAtLocation Fridge_bar_1 loc_bar_2) (receptacleType Fridge_bar_1 FridgeType) (openable Fridge_bar_1)
    (receptacleAtLocation Microwave_bar_1 loc_bar_2) (receptacleType Microwave_bar_1 MicrowaveType)
    (openable Microwave_bar_1)
    (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_3) (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
    (receptacleAtLocation Desk_bar_1 loc_bar_4) (receptacleType Desk_bar_1 DeskType)
    (receptacleAtLocation Desk_bar_2 loc_bar_5) (receptacleType Desk_bar_2 DeskType)
    (objectType Apple_bar_1 AppleType) (pickupable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1)
    (cleanable Apple_bar_1) (objectType Apple_bar_2 AppleType) (pickupable Apple_bar_2) (heatable Apple_bar_2)
    (coolable Apple_bar_2) (cleanable Apple_bar_2) (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1)
    (objectType DeskLamp_bar_1 DeskLampType) (toggleable DeskLamp_bar_1)
    (canContain CounterTopType AppleType) (canContain CounterTopType MugType) (canContain FridgeType AppleType)
    (canContain DeskType AppleType) (canContain DeskType MugType)
    (inReceptacle DeskLamp_bar_1 Desk_bar_1) {facts})
(:goal {goal}))
"""
APPLE_IN = (
    "(exists (?r - receptacle) (exists (?o - object) (and {extra} (objectType ?o AppleType)"
    " (receptacleType ?r {place}Type) (inReceptacle ?o ?r))))"
)


def open_tiny(facts: str, goal: str, wording: Wording = WORDING_2_1_2) -> Game:
    return Game.from_problem(THINGS.format(facts=facts, goal=goal), "do it.", wording)


def win(play: Interpreter) -> list[str]:
    """The plan from here, which must win at its last command."""
    commands = plan(play.game, play.state)
    for command in commands:
        assert not play.won and play.step(command)[1] is not None, command
    assert play.won
    return commands


class TestPlans:
    def test_cooling(self) -> None:
        game = open_tiny(
            "(inReceptacle Apple_bar_1 Sink_bar_1_bar_SinkBasin)",
            APPLE_IN.format(extra="(coolable ?o) (isCool ?o)", place="Fridge"),
        )
        assert win(Interpreter(game)) == [
            "go to sinkbasin 1",
            "take apple 2 from sinkbasin 1",
            "go to fridge 1",
            "cool apple 2 with fridge 1",
            "open fridge 1",
            "move apple 2 to fridge 1",
        ]

    def test_a_thing_in_two_receptacles_wins_early(self) -> None:
        game = open_tiny(
            "(inReceptacle Apple_bar_1 Desk_bar_1) (inReceptacle Apple_bar_1 Desk_bar_2)",
            APPLE_IN.format(extra="(cleanable ?o) (isClean ?o)", place="Desk"),
        )
        assert win(Interpreter(game))[-1] == "clean apple 2 with sinkbasin 1"

    def test_what_is_held_is_used_if_it_fits(self) -> None:
        game = open_tiny(
            "(inReceptacle Apple_bar_1 CounterTop_bar_1) (inReceptacle Apple_bar_2 CounterTop_bar_1)",
            APPLE_IN.format(extra="(heatable ?o) (isHot ?o)", place="CounterTop"),
        )
        play = Interpreter(game)
        for command in ("go to countertop 1", "take apple 1 from countertop 1", "go to fridge 1",
                        "cool apple 1 with fridge 1"):  # fmt: skip
            play.step(command)
        assert win(play) == ["heat apple 1 with microwave 1", "go to countertop 1", "move apple 1 to countertop 1"]

    def test_two_things_of_which_one_is_there(self) -> None:
        goal = (
            "(exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 AppleType) (receptacleType ?r"
            " DeskType) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2)) (objectType ?o2 AppleType)"
            " (receptacleType ?r DeskType) (inReceptacle ?o2 ?r))))))"
        )
        game = open_tiny("(inReceptacle Apple_bar_1 Desk_bar_1) (inReceptacle Apple_bar_2 CounterTop_bar_1)", goal)
        assert win(Interpreter(game)) == [
            "go to countertop 1",
            "take apple 1 from countertop 1",
            "go to desk 2",
            "move apple 1 to desk 2",
        ]


class TestNoPlan:
    def test_won_already(self) -> None:
        game = open_tiny("(inReceptacle Apple_bar_1 Desk_bar_1)", APPLE_IN.format(extra="", place="Desk"))
        assert plan(game, game.initial) == []
        assert not is_winnable(game)

    @pytest.mark.parametrize(
        "facts",
        ["", "(objectAtLocation Apple_bar_1 loc_bar_1)", "(inReceptacle Apple_bar_1 Apple_bar_2)"],
        ids=["nowhere", "in no receptacle", "in no receptacle either"],
    )
    def test_nothing_to_take(self, facts: str) -> None:
        game = open_tiny(facts, APPLE_IN.format(extra="", place="Desk"))
        assert plan(game, game.initial) == []

    def test_hands_that_cannot_be_emptied(self) -> None:
        facts = "(inReceptacle Mug_bar_1 Fridge_bar_1) (inReceptacle Apple_bar_1 CounterTop_bar_1)"
        problem = THINGS.format(facts=facts, goal=APPLE_IN.format(extra="", place="Desk"))
        for accepting in ("CounterTop", "Desk"):
            problem = problem.replace(f"(canContain {accepting}Type MugType)", "")
        game = Game.from_problem(problem, "do it.", WORDING_2_1_2)
        play = Interpreter(game)
        for command in ("go to fridge 1", "open fridge 1", "take mug 1 from fridge 1"):
            play.step(command)
        assert plan(game, play.state) == []

    @pytest.mark.parametrize("goal", GOALS)
    def test_goals_that_no_game_has(self, goal: str) -> None:
        game = open_tiny("(inReceptacle Apple_bar_1 CounterTop_bar_1)", goal)
        assert plan(game, game.initial) == []


@given(synthetic_games, walks)
@settings(max_examples=50)
def test_any_state_of_a_synthetic_game_can_be_won(made: SyntheticGame, walk: list[float]) -> None:
    play = Interpreter(open_synthetic(made))
    wander(play, walk)
    if not play.won:
        before = play.state.to_plain(play.game.initial)
        assert len(plan(play.game, play.state)) <= 16
        assert play.state.to_plain(play.game.initial) == before
        win(play)


def test_official_games_are_won_in_few_commands(official_games: Path) -> None:
    paths = sorted(official_games.glob("valid_*/*/*/game.tw-pddl"))
    assert len(paths) == 340
    lengths = [len(win(Interpreter(load_game(GameFile(path))))) for path in paths[::4]]
    assert min(lengths) >= 3 and max(lengths) <= 11


@given(st.data())
@settings(max_examples=25)
def test_any_state_of_an_official_game_is_won_or_lost_for_good(official_games: Path, data: st.DataObject) -> None:
    paths = sorted(official_games.glob("valid_*/*/*/game.tw-pddl"))
    play = Interpreter(load_game(GameFile(data.draw(st.sampled_from(paths)))))
    wander(play, data.draw(walks))
    held = play.state.held
    if held is not None and not any(play.game.accepts(one, held) for one in play.game.receptacles):
        return  # some things fit nowhere: who takes them up holds them for ever
    if not play.won:
        win(play)


def make(**options: Any) -> ALFWorldEnv:
    return ALFWorldEnv(rooms="small", split="valid_unseen", **{"expert": "searching", **options})


@pytest.mark.parametrize("number", range(0, 240, 12))
def test_the_searching_expert_wins_and_keeps_to_what_it_said(number: int) -> None:
    env = make()
    env.reset(options={"task": env.tasks[number].id})
    said = env.expert_plan()
    played = []
    info: dict[str, Any] = {}
    while not env.done:
        played.append(env.expert_plan()[0])
        *_, info = env.step(env.parser.respond(played[-1]))
    assert info["won"]
    assert played == said


@settings(max_examples=25, deadline=None)
@given(synthetic_games, st.integers(0, 2**32))
@example(make_game(TaskType.CLEAN, "train", 62066, RoomSize.SMALL), 142)
def test_what_lies_in_hidden_places_changes_no_command(synthetic: SyntheticGame, seed: int) -> None:
    """Two rooms that differ only where nothing was shown: the next command is the same."""
    game = open_synthetic(synthetic)
    shown = set(Random(seed).sample(game.receptacles, len(game.receptacles) // 2))
    state = game.new_state()
    other = state.copy()
    hidden = [name for name in game.receptacles if name not in shown]
    rotated = dict(zip(hidden, [state.contents[name] for name in (*hidden[1:], *hidden[:1])], strict=True))
    other.contents |= rotated
    other.opened ^= frozenset(name for name in hidden if name in game.openable)
    assert search(game, state, shown)[:1] == search(game, other, shown)[:1] or game.goal.holds(other)


def test_the_planner_knows_what_the_other_looks_for() -> None:
    searching, planner = make(), make(expert="planner")
    longer = 0
    for task in list(searching.tasks)[:20]:
        for env in (searching, planner):
            env.reset(options={"task": task.id})
        assert len(searching.expert_plan()) >= len(planner.expert_plan())
        longer += len(searching.expert_plan()) > len(planner.expert_plan())
    assert longer > 10
    with pytest.raises(SpearError, match="expert"):
        make(expert="oracle")


def test_thoughts_tell_nothing_that_was_not_shown() -> None:
    env = make()
    for number in range(0, 240, 30):
        env.reset(options={"task": env.tasks[number].id})
        seen = env._opening
        while not env.done:
            plan = env.expert_plan()
            thought = env.expert_thought(plan)
            assert plan[0] in thought
            # "countertop 1" was seen, and so was every numbered thing that a thought names.
            named = {
                " ".join(pair) for pair in zip(thought.split(), thought.replace(".", "").split()[1:], strict=False)
            }
            assert all(name in seen for name in named if name.split()[1].isdigit())
            observation, *_ = env.step(env.parser.respond(plan[0], thought))
            seen += observation


@pytest.mark.parametrize("number", [25, 77, 71])
def test_thoughts_are_true_while_the_lamp_or_the_second_thing_is_missing(number: int) -> None:
    env = make()
    env.reset(options={"task": env.tasks[number].id})
    found: set[str] = set()
    while not env.done:
        plan = env.expert_plan()
        thought = env.expert_thought(plan)
        if thought.startswith("The next step is: take "):
            assert plan[0].split(" ", 1)[1].endswith(thought.partition(" from ")[2].partition(".")[0]), thought
        missing = thought.partition("not found ")[2].partition(" yet")[0].split(" ")[-1]
        assert not missing or missing not in found or "another" in thought, thought
        observation, *_ = env.step(env.parser.respond(plan[0]))
        found |= {thing.split(" ")[0] for thing in observation.partition("you see a ")[2].split(", a ")}


def test_a_thought_says_what_is_missing_and_what_is_next() -> None:
    env = make()
    env.reset(options={"task": env.tasks[0].id})
    plan = env.expert_plan()
    assert "not found" in env.expert_thought(plan)
    for command in plan[:-1]:
        env.step(env.parser.respond(command))
    assert env.expert_thought(plan[-1:]) == f"I can do the next step here: {plan[-1]}."
    assert env.expert_thought([]) == ""
