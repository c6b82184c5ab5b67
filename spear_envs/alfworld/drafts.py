"""Drafts of plans: what things cost from here, and the commands that do them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from spear_envs.alfworld.actions import TREATMENTS, Treatment
from spear_envs.alfworld.game import Game
from spear_envs.alfworld.state import State

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
        """Cost of going from ``location`` to an open receptacle."""
        game = self.game
        closed = receptacle in game.openable and receptacle not in self.state.opened
        return (game.location_of[receptacle] != location) + closed

    def find_source(self, thing: str, location: str) -> tuple[int, str] | None:
        """Cost of taking an object, and the receptacle to take it from; None if that is impossible."""
        if thing not in self.game.pickupable:
            return None
        holding = [one for one in self.game.receptacles if thing in self.state.contents[one]]
        return min(((self.cost_to_reach(one, location) + 1, one) for one in holding), default=None)

    def cost_to_fetch(self, thing: str) -> tuple[int, str] | None:
        """Cost of holding an object, and where the agent is then; None if that is impossible."""
        if thing == self.state.held:
            return 0, self.state.location
        source = self.find_source(thing, self.state.location)
        if source is None:
            return None
        # What is held must be put down first, often where the object is taken, for one command.
        return source[0] + (self.state.held is not None), self.game.location_of[source[1]]

    def find_appliance(self, treatment: Treatment, thing: str, location: str, then: str | None) -> str | None:
        """A receptacle to treat an object with: here, else where the object goes next, else the first one."""
        game = self.game
        found = [one for one in game.receptacles if game.can_treat(one, treatment, thing)]
        if not found:
            return None
        return min(found, key=lambda one: (game.location_of[one] != location, game.location_of[one] != then))

    def cost_to_place(self, thing: str, receptacle: str | None, missing: Sequence[Treatment]) -> int | None:
        """Cost of having an object treated and in ``receptacle`` (None: in the hand); None if that is impossible."""
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
        """The treatments that an object still needs."""
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
