from __future__ import annotations

from hypothesis import given, settings

from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.oracle import plan
from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game
from spear_envs.alfworld.synthesis.problem import SENTENCES
from spear_envs.alfworld.synthesis.rooms import LAYOUTS, RoomSize, list_layouts, rooms_of
from spear_envs.alfworld.synthesis.things import HOLDS
from spear_envs.alfworld.task_types import TaskType
from tests.spear_envs.alfworld.synthetic import open_synthetic, synthetic_games


@given(synthetic_games)
@settings(max_examples=150)
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
@settings(max_examples=100)
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


def test_games_differ_by_each_argument() -> None:
    base = make_game(TaskType.PICK, "train", 5)
    others = [
        make_game(TaskType.PICK2, "train", 5),
        make_game(TaskType.PICK, "valid_seen", 5),
        make_game(TaskType.PICK, "train", 6),
        make_game(TaskType.PICK, "train", 5, RoomSize.SMALL),
    ]
    assert make_game(TaskType.PICK, "train", 5).digest == base.digest
    assert len({base.digest, *(one.digest for one in others)}) == 5
