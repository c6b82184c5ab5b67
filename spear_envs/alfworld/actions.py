"""Actions as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Verb(str, Enum):
    """What a command does; the value is its first words in release 2.1.2."""

    CLEAN = "clean"
    """Clean the held object with a sink."""
    CLOSE = "close"
    """Close a receptacle."""
    COOL = "cool"
    """Cool the held object with a fridge."""
    EXAMINE = "examine"
    """Read what is in a receptacle here."""
    INSPECT = "examine (object)"
    """Read the state of the held object; also written ``examine``."""
    GO = "go to"
    """Walk to another receptacle."""
    HEAT = "heat"
    """Heat the held object with a microwave."""
    HELP = "help"
    """Read the list of commands."""
    INVENTORY = "inventory"
    """Read what is held."""
    LOOK = "look"
    """Read what is here."""
    MOVE = "move"
    """Put the held object into or onto a receptacle."""
    OPEN = "open"
    """Open a receptacle."""
    SLICE = "slice"
    """Slice an object here with the held knife."""
    TAKE = "take"
    """Take an object out of a receptacle."""
    USE = "use"
    """Switch a lamp on."""


class Action(NamedTuple):
    """A parsed command, with ids instead of names."""

    verb: Verb
    thing: str = ""
    """The object it is about."""
    receptacle: str = ""
    """The receptacle it is about; for ``slice`` the knife."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """One of the three ways to change an object with a receptacle."""

    verb: Verb
    able: str
    """Predicate of the objects that can be treated."""
    gained: str
    """Attribute of a state that gains the object."""
    lost: str | None
    """Attribute of a state that loses it."""


TREATMENTS = (
    Treatment(Verb.CLEAN, "cleanable", "clean", None),
    Treatment(Verb.COOL, "coolable", "cool", "hot"),
    Treatment(Verb.HEAT, "heatable", "hot", "cool"),
)
