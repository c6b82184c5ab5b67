"""One small game written by hand, with every oddity that official games have."""

from typing import Any

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.grammar import WORDING_2_1_2, Wording
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.synthesis.games import read_game_logic

WORDING_2_1_1 = Wording(
    put=("put ", " in/on "),
    put_feedback=("You put the ", " in/on the "),
    arrive_at_location=True,
    help=None,
    sinks=frozenset({"sinkbasintype", "sinktype"}),
)

GOAL = """
(and (exists (?r - receptacle) (exists (?o - object) (and (heatable ?o) (objectType ?o AppleType)
    (receptacleType ?r FridgeType) (isHot ?o) (inReceptacle ?o ?r)))))
"""

PROBLEM = """
; a comment with (brackets
(define (problem small)
(:domain alfred)
(:objects
    agent1 - agent
    Apple Mug - object
    AppleType MugType SpoonType KnifeType PencilType DeskLampType EggType - otype
    CounterTopType FridgeType MicrowaveType SinkBasinType CabinetType DeskType - rtype
    loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 loc_bar_4 loc_bar_5 - location
    CounterTop_bar_1 Fridge_bar_1 Microwave_bar_1 Sink_bar_1_bar_SinkBasin Cabinet_bar_1 Cabinet_bar_2 Desk_bar_1
        - receptacle
    Apple_bar_1 Apple_bar_2 Mug_bar_1 Spoon_bar_1 Knife_bar_1 Pencil_bar_1 DeskLamp_bar_1 Egg_bar_1 - object
)
(:init
    (= (total-cost) 0) (= (distance loc_bar_0 loc_bar_1) 4)
    (atLocation agent1 loc_bar_0)
    (receptacleAtLocation CounterTop_bar_1 loc_bar_1) (receptacleType CounterTop_bar_1 CounterTopType)
    (receptacleAtLocation Fridge_bar_1 loc_bar_2) (receptacleType Fridge_bar_1 FridgeType) (openable Fridge_bar_1)
    (receptacleAtLocation Microwave_bar_1 loc_bar_2) (receptacleType Microwave_bar_1 MicrowaveType)
    (openable Microwave_bar_1)
    (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_3) (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
    (receptacleAtLocation Cabinet_bar_1 loc_bar_4) (receptacleType Cabinet_bar_1 CabinetType) (openable Cabinet_bar_1)
    (receptacleAtLocation Cabinet_bar_2 loc_bar_4) (receptacleType Cabinet_bar_2 CabinetType) (openable Cabinet_bar_2)
    (receptacleAtLocation Desk_bar_1 loc_bar_5) (receptacleType Desk_bar_1 DeskType)
    (objectType Apple_bar_1 AppleType) (pickupable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1)
    (cleanable Apple_bar_1) (sliceable Apple_bar_1)
    (inReceptacle Apple_bar_1 CounterTop_bar_1) (objectAtLocation Apple_bar_1 loc_bar_1)
    (objectType Apple_bar_2 AppleType) (pickupable Apple_bar_2) (heatable Apple_bar_2) (sliceable Apple_bar_2)
    (inReceptacle Apple_bar_2 Fridge_bar_1) (objectAtLocation Apple_bar_2 loc_bar_2) (isCool Apple_bar_2)
    (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1) (isReceptacleObject Mug_bar_1)
    (inReceptacle Mug_bar_1 CounterTop_bar_1) (objectAtLocation Mug_bar_1 loc_bar_1)
    (objectType Spoon_bar_1 SpoonType) (pickupable Spoon_bar_1)
    (inReceptacle Spoon_bar_1 CounterTop_bar_1) (objectAtLocation Spoon_bar_1 loc_bar_1)
    (inReceptacleObject Spoon_bar_1 Mug_bar_1)
    (objectType Knife_bar_1 KnifeType) (pickupable Knife_bar_1) (cleanable Knife_bar_1)
    (inReceptacle Knife_bar_1 CounterTop_bar_1) (objectAtLocation Knife_bar_1 loc_bar_1)
    (objectType Pencil_bar_1 PencilType) (pickupable Pencil_bar_1)
    (inReceptacle Pencil_bar_1 Desk_bar_1) (inReceptacle Pencil_bar_1 Cabinet_bar_1)
    (objectAtLocation Pencil_bar_1 loc_bar_5)
    (objectType DeskLamp_bar_1 DeskLampType) (toggleable DeskLamp_bar_1)
    (inReceptacle DeskLamp_bar_1 Desk_bar_1) (objectAtLocation DeskLamp_bar_1 loc_bar_5)
    (objectType Egg_bar_1 EggType) (pickupable Egg_bar_1) (sliceable Egg_bar_1) (objectAtLocation Egg_bar_1 loc_bar_1)
    (canContain CounterTopType AppleType) (canContain CounterTopType MugType) (canContain CounterTopType KnifeType)
    (canContain FridgeType AppleType) (canContain MicrowaveType AppleType) (canContain SinkBasinType AppleType)
    (canContain CabinetType PencilType) (canContain DeskType PencilType) (canContain CabinetType MugType)
)
(:goal GOAL)
)
"""


def write_problem(goal: str = GOAL, facts: str = "", problem: str = PROBLEM) -> str:
    """The problem with another goal, or with further facts at the start."""
    return problem.replace("(:goal GOAL)", f"(:goal {goal})").replace("(:init", f"(:init {facts}")


def make_small(goal: str = GOAL, facts: str = "", wording: Wording = WORDING_2_1_2) -> Game:
    """The game."""
    return Game.from_problem(write_problem(goal, facts), "put a hot apple in fridge.", wording)


def start(goal: str = GOAL, facts: str = "", wording: Wording = WORDING_2_1_2) -> Interpreter:
    """A play of the game."""
    return Interpreter(make_small(goal, facts, wording))


def play(game: Interpreter, *commands: str) -> str:
    """Play commands that are all admissible; what the game says to the last."""
    said = ""
    for command in commands:
        assert command in game.admissible, f"{command!r} is none of {game.admissible}"
        said, action = game.step(command)
        assert action is not None
    return said


def make_data(problem: str | None = None) -> dict[str, Any]:
    """The contents of a game file with the small game; its logic is that of the installed alfworld."""
    domain, grammar = read_game_logic("put a hot apple in fridge.")
    text = write_problem() if problem is None else problem
    return {"pddl_domain": domain, "grammar": grammar, "pddl_problem": text, "solvable": True, "walkthrough": None}
