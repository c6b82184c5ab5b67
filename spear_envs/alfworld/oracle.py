"""The experts: one plans with full knowledge, from any state of the six task types; one knows what it was shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice, product

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.goals import FLUENTS, Literal, Requirement, read_requirements
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.state import TREATMENTS, Action, State, Treatment, Verb

_GAINED: Mapping[str, Treatment] = {f"is{treatment.gained}": treatment for treatment in TREATMENTS}
"""Predicate -> the treatment that makes it true."""


class StuckError(Exception):
    """This draft is a dead end."""


class WonError(Exception):
    """The goal holds, perhaps early: a thing in two receptacles is taken out of only one."""


class Draft:
    """A partial plan and the state it leads to."""

    def __init__(self, game: Game, state: State) -> None:
        self.game = game
        self.state = state.copy()
        self.commands: list[str] = []

    # ------------------------------------------------------------ what things cost, in commands

    def cost_to_reach(self, receptacle: str, location: str) -> int:
        """Return the cost of going from ``location`` to an open receptacle."""
        game = self.game
        closed = receptacle in game.openable and receptacle not in self.state.opened
        return (game.location_of[receptacle] != location) + closed

    def find_source(self, thing: str, location: str) -> tuple[int, str] | None:
        """Return the cost of taking an object, and the receptacle to take it from; None if that is impossible."""
        if thing not in self.game.pickupable:
            return None
        holding = [one for one in self.game.receptacles if thing in self.state.contents[one]]
        return min(((self.cost_to_reach(one, location) + 1, one) for one in holding), default=None)

    def cost_to_fetch(self, thing: str) -> tuple[int, str] | None:
        """Return the cost of holding an object, and where the agent is then; None if that is impossible."""
        if thing == self.state.held:
            return 0, self.state.location
        source = self.find_source(thing, self.state.location)
        if source is None:
            return None
        # What is held must be put down first, often where the object is taken, for one command.
        return source[0] + (self.state.held is not None), self.game.location_of[source[1]]

    def find_appliance(self, treatment: Treatment, thing: str, location: str, then: str | None) -> str | None:
        """Return a receptacle to treat an object with: here, else where the object goes next, else the first one."""
        game = self.game
        found = [one for one in game.receptacles if game.can_treat(one, treatment, thing)]
        if not found:
            return None
        return min(found, key=lambda one: (game.location_of[one] != location, game.location_of[one] != then))

    def cost_to_place(self, thing: str, receptacle: str | None, missing: Sequence[Treatment]) -> int | None:
        """Return the cost of having an object treated and in ``receptacle`` (None: in the hand), or None."""
        fetched = self.cost_to_fetch(thing)
        if fetched is None:
            return None
        total, location = fetched
        goal = None if receptacle is None else self.game.location_of[receptacle]
        for treatment in missing:
            appliance = self.find_appliance(treatment, thing, location, goal)
            if appliance is None:
                return None
            total += (self.game.location_of[appliance] != location) + 1
            location = self.game.location_of[appliance]
        if receptacle is not None:
            if not self.game.accepts(receptacle, thing):
                return None
            total += self.cost_to_reach(receptacle, location) + 1
        return total

    def list_missing(self, thing: str, wanted: Set[str]) -> list[Treatment]:
        """Return the treatments that an object still needs."""
        return [_GAINED[one] for one in sorted(wanted) if thing not in getattr(self.state, _GAINED[one].gained)]

    # ------------------------------------------------------------ steps

    def _note(self, command: str) -> None:
        self.commands.append(command)
        if self.game.goal.holds(self.state):
            raise WonError

    def go(self, receptacle: str) -> None:
        """Go to a receptacle."""
        location = self.game.location_of[receptacle]
        if location != self.state.location:
            self.state.location = location
            self._note(f"go to {self.game.names[receptacle]}")

    def reach(self, receptacle: str) -> None:
        """Go to a receptacle and open it if it can be opened."""
        self.go(receptacle)
        if receptacle in self.game.openable and receptacle not in self.state.opened:
            self.state.opened |= {receptacle}
            self._note(f"open {self.game.names[receptacle]}")

    def put(self, receptacle: str) -> None:
        """Put what is held into a receptacle."""
        self.reach(receptacle)
        thing = self.state.held
        assert thing is not None
        self._add(self.state.contents, receptacle, thing)
        self._add(self.state.lying, self.state.location, thing)
        self.state.held = None
        begin, middle = self.game.wording.put
        self._note(f"{begin}{self.game.names[thing]}{middle}{self.game.names[receptacle]}")

    def fetch(self, thing: str) -> None:
        """Hold an object; put down on the way what is held."""
        if self.state.held == thing:
            return
        source = self.find_source(thing, self.state.location)
        if source is None:
            raise StuckError
        if self.state.held is not None:
            self._put_away(self.state.held, source[1])
            source = self.find_source(thing, self.state.location)
            assert source is not None
        self.reach(source[1])
        self._drop(self.state.contents, source[1], thing)
        self._drop(self.state.lying, self.state.location, thing)
        self.state.held = thing
        self._note(f"take {self.game.names[thing]} from {self.game.names[source[1]]}")

    def _put_away(self, thing: str, towards: str) -> None:
        """Put what is held down where it costs least on the way to ``towards``."""
        game = self.game
        goal = game.location_of[towards]
        accepting = [one for one in game.receptacles if game.accepts(one, thing)]
        if not accepting:
            raise StuckError

        def cost(receptacle: str) -> tuple[int, bool]:
            if receptacle == towards:
                return 0, False  # it must be reached anyway
            where = game.location_of[receptacle]
            way = self.cost_to_reach(receptacle, goal if where == goal else self.state.location)
            return way, where != goal

        chosen = min(accepting, key=cost)
        self.put(chosen)

    @staticmethod
    def _add(groups: dict[str, tuple[str, ...]], key: str, thing: str) -> None:
        groups[key] = tuple(sorted({*groups.get(key, ()), thing}))

    @staticmethod
    def _drop(groups: dict[str, tuple[str, ...]], key: str, thing: str) -> None:
        groups[key] = tuple([one for one in groups.get(key, ()) if one != thing])

    def treat(self, thing: str, wanted: Set[str], goal: str | None) -> None:
        """Treat the held object as still needed."""
        for treatment in self.list_missing(thing, wanted):
            appliance = self.find_appliance(treatment, thing, self.state.location, goal)
            if appliance is None:
                raise StuckError
            self.go(appliance)
            setattr(self.state, treatment.gained, getattr(self.state, treatment.gained) | {thing})
            if treatment.lost is not None:
                setattr(self.state, treatment.lost, getattr(self.state, treatment.lost) - {thing})
            self._note(f"{treatment.verb.value} {self.game.names[thing]} with {self.game.names[appliance]}")

    def light(self, lamp: str, receptacle: str) -> None:
        """Go to a lamp and switch it on if it is not."""
        self.go(receptacle)
        if lamp not in self.state.toggled:
            self.state.toggled |= {lamp}
            self._note(f"use {self.game.names[lamp]}")


_MOST_PLACINGS = 256


def plan(game: Game, state: State) -> list[str]:
    """Return commands that win from ``state``; empty if it is won already, or if no plan is found.

    Every way to fulfil the goal is tried with every receptacle that differs from the others, and the shortest plan is
    taken. Within one try, things are fetched cheapest first, so a shorter plan may exist for two things. Plans are
    found for goals that place things in receptacles, have them clean, hot or cool, have one held, and lamps lit; they
    are only returned if the goal holds at the end.
    """
    if game.goal.holds(state):
        return []
    best: list[str] = []
    for requirement in read_requirements(game.goal.expression):
        for draft in _draft_plans(game, state, requirement):
            if not best or len(draft.commands) < len(best):
                best = draft.commands
    return best


def is_winnable(game: Game) -> bool:
    """Return whether a game is not won at its start and the plan wins it, command by command, in the interpreter."""
    play = Interpreter(game)
    if play.won:
        return False
    for command in plan(game, play.state):
        if play.won or play.step(command)[1] is None:
            return False
    return play.won


def list_wanted(game: Game, state: State) -> list[str]:
    """Return things that the goal may be about, wherever they are: to be moved, held or lit, by their types."""
    found: set[str] = set()
    for requirement in read_requirements(game.goal.expression):
        for term in _list_objects(requirement):
            found.update(_list_candidates(game, state, requirement, term))
    return sorted(found)


def _draft_plans(game: Game, state: State, requirement: Requirement) -> Iterator[Draft]:
    """Yield a winning plan for each choice of receptacles that makes a difference."""
    candidates = {term: _list_candidates(game, state, requirement, term) for term in _list_objects(requirement)}
    targets = sorted({receptacle for _, receptacle in requirement.placed})
    options = [_list_targets(game, state, requirement, term, candidates) for term in targets]
    for chosen in islice(product(*options), _MOST_PLACINGS):
        draft = Draft(game, state)
        try:
            _fill_draft(draft, requirement, candidates, dict(zip(targets, chosen, strict=True)))
        except WonError:
            yield draft
        except StuckError:
            continue


def _list_objects(requirement: Requirement) -> list[str]:
    return sorted({*(thing for thing, _ in requirement.placed), *requirement.held, *requirement.lit})


def _fits(game: Game, state: State, name: str, literals: Sequence[Literal]) -> bool:
    """Return whether facts that plans do not change hold for a thing."""
    for predicate, _, *others in literals:
        if predicate == "type":
            if others[0] not in (game.problem.objects[name], "object"):
                return False
        elif predicate in FLUENTS:
            if not state.has_property(predicate, name):
                return False
        elif (name, *others) not in game.problem.rows(predicate):
            return False
    return True


def _list_candidates(game: Game, state: State, requirement: Requirement, term: str) -> list[str]:
    """Return things that a term may stand for."""
    if not term.startswith("?"):
        return [term]
    literals = requirement.kinds.get(term, ())
    typed = next((literal for literal in literals if literal[0] in ("objecttype", "receptacletype")), None)
    names = sorted(game.problem.objects)
    if typed is not None:
        names = sorted(name for name, kind in game.problem.rows(typed[0]) if kind == typed[2])
    return [name for name in names if _fits(game, state, name, literals)]


def _list_targets(
    game: Game, state: State, requirement: Requirement, term: str, candidates: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return receptacles that a term may stand for, one of each group that is equivalent for a plan."""
    things = {name for thing, receptacle in requirement.placed if receptacle == term for name in candidates[thing]}
    spots = {game.location_of[one] for one in game.receptacles if not things.isdisjoint(state.contents[one])}
    spots |= {game.location_of[one] for one in game.receptacles if _is_appliance(game, one)} | {state.location}
    different: dict[tuple[object, ...], str] = {}
    for receptacle in _list_candidates(game, state, requirement, term):
        location = game.location_of.get(receptacle)
        if location is not None:
            key = (
                location if location in spots else "",
                receptacle in game.openable and receptacle not in state.opened,
                tuple(thing for thing in state.contents[receptacle] if thing in things),
                game.receptacle_types.get(receptacle),
            )
            different.setdefault(key, receptacle)
    return list(different.values())


def _is_appliance(game: Game, receptacle: str) -> bool:
    kinds = game.receptacle_types.get(receptacle, frozenset())
    return not kinds.isdisjoint({"fridgetype", "microwavetype", *game.wording.sinks})


def _fill_draft(
    draft: Draft, requirement: Requirement, candidates: Mapping[str, Sequence[str]], targets: Mapping[str, str]
) -> None:
    """Place things, cheapest first; then take what is to be held; then light the lamps."""
    chosen: dict[str, str] = {}  # object term -> object
    waiting = list(requirement.placed)
    for thing, target in requirement.placed:  # what is already right stays there
        contents = draft.state.contents[targets[target]]
        for name in candidates[thing]:
            right = name in contents and not draft.list_missing(name, requirement.needs(thing))
            if right and thing not in chosen and _is_free(requirement, thing, name, chosen):
                chosen[thing] = name
                waiting.remove((thing, target))
    while waiting:
        options = []
        for thing, target in waiting:
            for name in candidates[thing]:
                if chosen.get(thing, name) == name and _is_free(requirement, thing, name, chosen):
                    missing = draft.list_missing(name, requirement.needs(thing))
                    cost = draft.cost_to_place(name, targets[target], missing)
                    if cost is not None:
                        options.append((cost, thing, target, name))
        if not options:
            raise StuckError
        _, thing, target, name = min(options)
        chosen[thing] = name
        waiting.remove((thing, target))
        draft.fetch(name)
        draft.treat(name, requirement.needs(thing), draft.game.location_of[targets[target]])
        draft.put(targets[target])
    _hold_and_light(draft, requirement, candidates, chosen)


def _is_free(requirement: Requirement, term: str, name: str, chosen: Mapping[str, str]) -> bool:
    """Return whether a term may stand for ``name``, given the terms that must differ from it."""
    for left, right in requirement.different:
        other = right if left == term else left if right == term else None
        if other is not None and chosen.get(other, other) == name:
            return False
    return True


def _hold_and_light(
    draft: Draft, requirement: Requirement, candidates: Mapping[str, Sequence[str]], chosen: Mapping[str, str]
) -> None:
    """Take what is to be held and go to the lit lamp, as far as the goal wants that."""
    state, location_of = draft.state, draft.game.location_of
    lamps = _list_lamps(draft, requirement, candidates)
    if not requirement.held:
        if lamps:
            here = state.location
            draft.light(*min(lamps, key=lambda one: (location_of[one[1]] != here, one[0] not in state.toggled, one)))
        return
    (term,) = requirement.held[:1]  # there is one pair of hands
    options: list[tuple[int, str, int]] = []
    for name in candidates[term]:
        cost = draft.cost_to_place(name, None, draft.list_missing(name, requirement.needs(term)))
        fetched = draft.cost_to_fetch(name)
        if cost is None or fetched is None or name in chosen.values() or not _is_free(requirement, term, name, chosen):
            continue
        for number, (lamp, stand) in enumerate(lamps):
            options.append((cost + (location_of[stand] != fetched[1]) + (lamp not in state.toggled), name, number))
        if not lamps:
            options.append((cost, name, 0))
    if not options:
        raise StuckError
    _, name, number = min(options)
    draft.fetch(name)
    draft.treat(name, requirement.needs(term), None)
    if lamps:
        draft.light(*lamps[number])


def _list_lamps(
    draft: Draft, requirement: Requirement, candidates: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """Return lamps that are lit or can be, each with a receptacle that holds it; empty if the goal wants none."""
    game, state = draft.game, draft.state
    lamps = [
        (lamp, receptacle)
        for term in requirement.lit[:1]
        for lamp in candidates[term]
        for receptacle in game.receptacles
        if lamp in state.contents[receptacle] and (lamp in game.toggleable or lamp in state.toggled)
    ]
    if requirement.lit and not lamps:
        raise StuckError
    return lamps


_MOST_COMMANDS = 200


def find_shown(game: Game, state: State, action: Action) -> str | None:
    """Return the receptacle whose contents a command has just shown, if any."""
    receptacle = action.receptacle
    if action.verb not in (Verb.GO, Verb.OPEN, Verb.EXAMINE):
        return None
    return None if receptacle in game.openable and receptacle not in state.opened else receptacle


def search(game: Game, state: State, shown: Set[str]) -> list[str]:
    """Return commands that win from ``state``, each chosen without knowing receptacles that were not shown before it.

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
    """Return the command towards the next receptacle that was not shown; empty if all were."""
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
    """Return a thought before the first of an expert's ``commands``: what is missing, or what comes next and why.

    It knows only what was shown: a thing in a receptacle that was not shown counts as missing.
    """
    if not commands:
        return ""
    words = {name: place for place, name in game.names.items()}
    seen = {state.held, *(thing for place in shown for thing in state.contents[place])}

    def find_unseen(command: str) -> str:
        verb, _, rest = command.partition(" ")
        thing, _, source = rest.partition(" from ")
        if verb == "take":
            return "" if words.get(source) in shown else thing
        return thing if verb == "use" and words.get(thing) not in seen else ""

    purposes = [one for one in commands if not _WAY.match(one)] or commands[-1:]
    purpose, first = purposes[0], commands[0]
    there = _WAY.sub("", first)
    lamps_there = state.contents.get(words.get(there, ""), ())
    leads = purpose == first or purpose.endswith(f" {there}") or words.get(purpose.removeprefix("use ")) in lamps_there
    # A search may go on for what a later command needs: for the lamp, or the second of two things.
    unseen = find_unseen(purpose) or ("" if leads else next(filter(None, map(find_unseen, purposes)), ""))
    if unseen:
        kind = unseen.rpartition(" ")[0] or unseen
        article = "an" if kind[0] in "aeiou" else "a"
        if any(one is not None and game.names[one].rpartition(" ")[0] == kind for one in seen):
            article = "another"
        return f"I have not found {article} {kind} yet. I will look further: {first}."
    if purpose == first:
        return f"I can do the next step here: {purpose}."
    return f"The next step is: {purpose}. For that I {first}."


_WAY = re.compile("(?:go to|open|examine) ")
"""Beginning of a command that leads to others."""
