"""Synthetic games for tests, and what can be read off them."""

from collections import Counter
from collections.abc import Hashable

from hypothesis import strategies as st

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.gamefile import TaskType
from spear_envs.alfworld.grammar import WORDING_2_1_2
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game
from spear_envs.alfworld.synthesis.rooms import LAYOUTS, RoomSize

synthetic_games = st.builds(
    make_game,
    st.sampled_from(TaskType),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(0, 10**9),
    st.sampled_from(RoomSize),
)
"""Games of all types, splits and sizes."""


def open_synthetic(game: SyntheticGame) -> Game:
    """The game as it is played."""
    return Game.from_problem(game.problem, game.sentence, WORDING_2_1_2)


def describe_layout(game: Game) -> Hashable:
    """What a player sees of a room at the start: how many receptacles of each kind there are."""
    return frozenset(Counter(kind for one in game.receptacles for kind in game.receptacle_types[one]).items())


def describe_game(game: Game) -> Hashable:
    """All that a player can find out about a game, by names instead of coordinates."""
    names = game.names
    where = {names[one]: tuple(names[thing] for thing in game.initial.contents[one]) for one in game.receptacles}
    return game.task, tuple(sorted(where.items())), tuple(sorted(names[thing] for thing in game.initial.cool))


def wander(play: Interpreter, choices: list[float]) -> None:
    """Play one command for each number in [0, 1), which says where in the list of those that change something."""
    for choice in choices:
        if play.won:
            return
        useful = [one for one in play.admissible if one.split()[0] not in ("examine", "help", "inventory", "look")]
        play.step(useful[int(choice * len(useful))])


walks = st.lists(st.floats(0, 1, exclude_max=True), max_size=40)
"""What :func:`wander` takes."""
