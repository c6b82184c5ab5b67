"""The immutable part of a game, shared by all environments that play it."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from spear_envs.alfworld.goals import Condition, compile_condition, split_goal
from spear_envs.alfworld.grammar import Wording
from spear_envs.alfworld.pddl import ROOT_TYPE, Fact, GameError, Problem, name_things, read_problem
from spear_envs.alfworld.state import PROPERTIES, TREATMENTS, Action, State, Treatment, Verb

KNIFE_TYPES = frozenset({"knifetype", "butterknifetype"})
"""Types of objects that slice."""


@dataclass(frozen=True)
class Game:
    """The immutable part of a game; the rest is in :class:`State`. Ids are those of the PDDL problem in lower case."""

    task: str
    """The sentence after ``Your task is to: ``, such as ``put a hot apple in fridge.``"""
    wording: Wording
    problem: Problem
    """The parsed PDDL; ``problem.rows("inreceptacle")`` has the initial facts."""
    goal: Condition
    """``goal.holds(state)`` returns whether the game is won; ``goal.expression`` is the condition as nested tuples."""
    names: Mapping[str, str]
    """Id -> name in observations and commands (``apple 1``)."""
    agent: str
    receptacles: tuple[str, ...]
    """Receptacles with a location, sorted by id: the order in which texts list them."""
    location_of: Mapping[str, str]
    """Receptacle -> its location."""
    receptacles_at: Mapping[str, tuple[str, ...]]
    """Location -> receptacles there, sorted by id; locations without one are left out."""
    object_types: Mapping[str, frozenset[str]]
    """Object -> its types, such as ``{"appletype"}``; objects without a type are left out."""
    receptacle_types: Mapping[str, frozenset[str]]
    """Receptacle -> its types, such as ``{"fridgetype"}``."""
    openable: frozenset[str]
    pickupable: frozenset[str]
    toggleable: frozenset[str]
    sliceable: frozenset[str]
    containers: frozenset[str]
    """Objects that may hold others (``isreceptacleobject``); nothing can be put into them."""
    inside: Mapping[str, tuple[str, ...]]
    """Object that holds others -> these, sorted by id. Never changes."""
    initial: State
    """The initial state; :meth:`new_state` copies it."""

    @classmethod
    def from_problem(cls, problem: str, task: str, wording: Wording) -> Game:
        """Read a game from the text of its PDDL problem.

        Args:
            problem: the ``pddl_problem`` of a game file, or from the synthesizer.
            task: the sentence with its full stop.

        Raises:
            GameError: the text is not a problem of ALFWorld's domain; the message names the fault, not the place.
        """
        read = read_problem(problem)
        agent, start = _find_agent(read)
        location_of = _find_receptacles(read)
        _check_types(read)
        at: defaultdict[str, list[str]] = defaultdict(list)
        for receptacle, location in location_of.items():
            at[location].append(receptacle)
        inside: defaultdict[str, list[str]] = defaultdict(list)
        for inner, outer in sorted(read.rows("inreceptacleobject")):
            if inner != outer:  # TextWorld never lists a thing within itself
                inside[outer].append(inner)
        return cls(
            task=task,
            wording=wording,
            problem=read,
            goal=compile_condition(read.goal, read),
            names=_name_all(read),
            agent=agent,
            receptacles=tuple(location_of),
            location_of=location_of,
            receptacles_at={location: tuple(here) for location, here in at.items()},
            object_types=_group(read.rows("objecttype")),
            receptacle_types=_group(read.rows("receptacletype")),
            openable=read.having("openable"),
            pickupable=read.having("pickupable"),
            toggleable=read.having("toggleable"),
            sliceable=read.having("sliceable"),
            containers=read.having("isreceptacleobject"),
            inside={outer: tuple(inner) for outer, inner in inside.items()},
            initial=_make_initial(read, agent, start, location_of),
        )

    def new_state(self) -> State:
        """Copy the initial state."""
        return self.initial.copy()

    def accepts(self, receptacle: str, thing: str) -> bool:
        """Return whether a receptacle may hold an object (``cancontain`` of their types)."""
        allowed = self.problem.rows("cancontain")
        kinds = self.object_types.get(thing, ())
        return any((outer, kind) in allowed for outer in self.receptacle_types.get(receptacle, ()) for kind in kinds)

    def can_treat(self, receptacle: str, treatment: Treatment, thing: str) -> bool:
        """Return whether an object held at a receptacle can be treated with it."""
        kinds = self.wording.sinks if treatment.verb is Verb.CLEAN else _APPLIANCES[treatment.verb]
        return (thing,) in self.problem.rows(treatment.able) and not kinds.isdisjoint(
            self.receptacle_types.get(receptacle, ())
        )

    def is_knife(self, thing: str) -> bool:
        """Return whether an object slices."""
        return not KNIFE_TYPES.isdisjoint(self.object_types.get(thing, ()))

    @cached_property
    def commands(self) -> CommandTable:
        """Return the table of admissible commands."""
        return CommandTable(self)

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """Return the goal conditions that ALFRED would count, see :mod:`spear_envs.alfworld.goals`."""
        return tuple(compile_condition(part, self.problem) for part in split_goal(self.goal.expression))


class CommandTable:
    """The admissible commands of one game, shared by all who play it."""

    def __init__(self, game: Game) -> None:
        self._game = game
        names = game.names
        self._moves = {f"go to {names[one]}": Action(Verb.GO, receptacle=one) for one in game.receptacles}
        self._moves_from: dict[str, tuple[str, ...]] = {}
        self._always = {"inventory": Action(Verb.INVENTORY), "look": Action(Verb.LOOK)}
        if game.wording.help is not None:
            self._always["help"] = Action(Verb.HELP)

    def find_move(self, state: State, command: str) -> Action | None:
        """Return the action of an admissible ``go to``."""
        action = self._moves.get(command)
        if action is None or self._game.location_of[action.receptacle] == state.location:
            return None
        return action

    def list_commands(self, state: State) -> tuple[dict[str, Action], tuple[str, ...]]:
        """Return the admissible commands of a state.

        Returns:
            All but the ``go to`` ones with their actions, and the texts of all, sorted as strings.
        """
        local = self._list_local(state)
        texts = sorted(local)
        at = bisect(texts, "go to")
        return local, (*texts[:at], *self._list_moves(state.location), *texts[at:])

    def _list_moves(self, location: str) -> tuple[str, ...]:
        moves = self._moves_from.get(location)
        if moves is None:
            where = self._game.location_of
            moves = tuple(sorted(text for text, move in self._moves.items() if where[move.receptacle] != location))
            self._moves_from[location] = moves
        return moves

    def _list_local(self, state: State) -> dict[str, Action]:
        game, held = self._game, state.held
        names, wording = game.names, game.wording
        table = self._always.copy()
        if held is not None:
            mine = names[held]
            table[f"examine {mine}"] = Action(Verb.INSPECT, held)
            if game.is_knife(held):
                for thing in state.lying.get(state.location, ()):
                    if thing in game.sliceable:
                        table[f"slice {names[thing]} with {mine}"] = Action(Verb.SLICE, thing, held)
        for receptacle in game.receptacles_at.get(state.location, ()):
            place = names[receptacle]
            table[f"examine {place}"] = Action(Verb.EXAMINE, receptacle=receptacle)
            reachable = True
            if receptacle in game.openable:
                reachable = receptacle in state.opened
                verb = Verb.CLOSE if reachable else Verb.OPEN
                table[f"{verb.value} {place}"] = Action(verb, receptacle=receptacle)
            for thing in state.contents[receptacle]:
                if thing in game.toggleable:
                    table[f"use {names[thing]}"] = Action(Verb.USE, thing)
                if reachable and held is None and thing in game.pickupable:
                    table[f"take {names[thing]} from {place}"] = Action(Verb.TAKE, thing, receptacle)
            if held is not None:
                if reachable and game.accepts(receptacle, held):
                    begin, middle = wording.put
                    table[f"{begin}{mine}{middle}{place}"] = Action(Verb.MOVE, held, receptacle)
                for treatment in TREATMENTS:
                    if game.can_treat(receptacle, treatment, held):
                        table[f"{treatment.verb.value} {mine} with {place}"] = Action(treatment.verb, held, receptacle)
        return table


_TYPES = {
    "atlocation": ("agent", "location"),
    "holds": ("agent", ROOT_TYPE),
    "holdsany": ("agent",),
    "inreceptacle": (ROOT_TYPE,),
    "inreceptacleobject": (ROOT_TYPE,),
    "objectatlocation": (ROOT_TYPE,),
}
"""Exact declared types of the first arguments of a fact."""
_APPLIANCES = {Verb.COOL: frozenset({"fridgetype"}), Verb.HEAT: frozenset({"microwavetype"})}


def _group(pairs: Iterable[Fact]) -> dict[str, frozenset[str]]:
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for key, value in pairs:
        groups[key].add(value)
    return {key: frozenset(values) for key, values in groups.items()}


def _find_agent(problem: Problem) -> tuple[str, str]:
    """Return the id of the agent and where it starts."""
    agents = [name for name, kind in problem.objects.items() if kind == "agent"]
    if len(agents) != 1:
        raise GameError(f"its PDDL declares {len(agents)} agents instead of one")
    starts = sorted(location for who, location in problem.rows("atlocation") if who == agents[0])
    if len(starts) != 1:
        raise GameError(f"its PDDL puts the agent at {len(starts)} locations instead of one")
    return agents[0], starts[0]


def _find_receptacles(problem: Problem) -> dict[str, str]:
    """Return receptacles, sorted by id, and their locations."""
    found: dict[str, str] = {}
    for receptacle, location in sorted(problem.rows("receptacleatlocation")):
        if problem.objects[receptacle] != "receptacle" or problem.objects[location] != "location":
            continue  # no action's parameters could be these
        if found.setdefault(receptacle, location) != location:
            raise GameError(f"its PDDL puts the receptacle {receptacle!r} at two locations")
    return found


def _check_types(problem: Problem) -> None:
    """Refuse, say, a fridge in a drawer: TextWorld would list it in a different order."""
    for predicate, kinds in _TYPES.items():
        for row in sorted(problem.rows(predicate)):
            for name, kind in zip(row, kinds, strict=False):
                if problem.objects[name] != kind:
                    found = problem.objects[name]
                    raise GameError(
                        f"its PDDL has {name!r}, of type {found}, in ({predicate} …), which takes the type {kind}"
                    )


def _name_all(problem: Problem) -> Mapping[str, str]:
    names = name_things(problem.named)
    for name, count in Counter(names.values()).items():
        if count > 1:
            raise GameError(f"its PDDL has {count} things that are all called {name!r}: give them other names")
    return names


def _make_initial(problem: Problem, agent: str, start: str, receptacles: Iterable[str]) -> State:
    held = sorted(thing for who, thing in problem.rows("holds") if who == agent)
    if len(held) > 1 or bool(held) != ((agent,) in problem.rows("holdsany")):
        raise GameError("its PDDL lets the agent start with more than one thing, or with 'holds' but not 'holdsany'")
    contents: dict[str, list[str]] = {receptacle: [] for receptacle in receptacles}
    for thing, receptacle in sorted(problem.rows("inreceptacle")):
        contents.setdefault(receptacle, []).append(thing)
    lying: defaultdict[str, list[str]] = defaultdict(list)
    for thing, location in sorted(problem.rows("objectatlocation")):
        lying[location].append(thing)
    state = State.__new__(State)
    state.agent = agent
    state.location = start
    state.held = held[0] if held else None
    state.contents = {receptacle: tuple(things) for receptacle, things in contents.items()}
    state.lying = {location: tuple(things) for location, things in lying.items()}
    state.taken_out = frozenset()
    for predicate, name in PROPERTIES.items():
        setattr(state, name, problem.having(predicate))
    return state
