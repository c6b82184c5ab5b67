"""An expert that only knows what the episode has shown, and words for what an expert does."""

from __future__ import annotations

from collections.abc import Sequence, Set

from spear_envs.alfworld.actions import Action, Verb
from spear_envs.alfworld.game import Game
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.oracle import list_wanted, plan
from spear_envs.alfworld.state import State

_MOST_COMMANDS = 200


def find_shown(game: Game, state: State, action: Action) -> str | None:
    """The receptacle whose contents a command has just shown, if any."""
    receptacle = action.receptacle
    if action.verb not in (Verb.GO, Verb.OPEN, Verb.EXAMINE):
        return None
    return None if receptacle in game.openable and receptacle not in state.opened else receptacle


def search(game: Game, state: State, shown: Set[str]) -> list[str]:
    """Commands that win from ``state``, each chosen without knowing receptacles that were not shown before it.

    If what is known does not suffice for a plan, the next receptacle is examined: first the one here, then those that
    need not be opened, in the order of the room, and only those that can hold what is wanted. The list is what the
    expert would do command by command, given what each of them shows.

    Args:
        shown: receptacles whose contents have been seen.

    Returns:
        The commands; empty if the game is won or can no longer be won.
    """
    play, known = Interpreter(game, state.copy()), set(shown)
    commands: list[str] = []
    ahead: list[str] = []
    while not play.won:
        if not ahead:
            # The state as far as it was shown: other receptacles are empty, and closed if they can be.
            seen = play.state.copy()
            seen.contents = {name: things if name in known else () for name, things in seen.contents.items()}
            seen.opened &= known
            ahead = plan(game, seen) or _look_further(game, play.state, known)
        if not ahead or len(commands) == _MOST_COMMANDS:
            return []
        action = play.step(ahead[0])[1]
        if action is None:  # only in an odd game: something here is open that was not shown
            seen_now = {name for name in play.state.opened if game.location_of[name] == play.state.location} - known
            if not seen_now:
                return []
            known |= seen_now
            ahead = []
            continue
        commands.append(ahead.pop(0))
        found = find_shown(game, play.state, action)
        if found is not None and found not in known:
            known.add(found)
            ahead = []
    return commands


def _look_further(game: Game, state: State, shown: Set[str]) -> list[str]:
    """Command towards the next receptacle that was not shown; empty if all were."""
    hidden = [name for name in game.receptacles if name not in shown]
    if not hidden:
        return []
    wanted = list_wanted(game, state)
    fitting = [name for name in hidden if any(game.accepts(name, thing) for thing in wanted)]
    here = state.location
    best = min(fitting or hidden, key=lambda name: (game.location_of[name] != here, name in game.openable))
    if game.location_of[best] != here:
        return [f"go to {game.names[best]}"]
    # One that is here and was not shown is closed, or shares its place with one that was.
    return [f"{'open' if best in game.openable and best not in state.opened else 'examine'} {game.names[best]}"]


def explain(game: Game, state: State, shown: Set[str], commands: Sequence[str]) -> str:
    """A thought before the first of an expert's ``commands``: what is missing, or what comes next and why.

    It only tells what was shown: a thing in a receptacle that was not shown counts as missing.
    """
    if not commands:
        return ""
    words = {name: place for place, name in game.names.items()}
    purpose = next((one for one in commands if not one.startswith(("go to ", "open ", "examine "))), commands[-1])
    verb, _, rest = purpose.partition(" ")
    thing, _, source = rest.partition(" from ")
    if verb == "take" and words.get(source) not in shown:
        return _miss(thing, commands[0])
    if verb == "use" and not any(words.get(rest) in state.contents[place] for place in shown):
        return _miss(rest, commands[0])
    if purpose == commands[0]:
        return f"I can do the next step here: {purpose}."
    return f"The next step is: {purpose}. For that I {commands[0]}."


def _miss(thing: str, command: str) -> str:
    kind = thing.rpartition(" ")[0] or thing
    return f"I have not found {'an' if kind[0] in 'aeiou' else 'a'} {kind} yet. I will look further: {command}."
