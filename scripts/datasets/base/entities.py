"""Entities of the invented worlds, their kinds, and the relations between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class Kind(str, Enum):
    """The kind of an entity."""

    COUNTRY = "country"
    """Has a capital and a currency."""
    CITY = "city"
    """Lies in a country, on a river."""
    PERSON = "person"
    """Has a trade; was born in a city, taught by a person, married to one."""
    ORGANISATION = "organisation"
    """Was founded by a person and has its seat in a city; some are presses."""
    WORK = "work"
    """Was written by a person and issued by a press."""
    RIVER = "river"
    """A name without a passage."""
    CURRENCY = "currency"
    """A name without a passage."""


class Relation(str, Enum):
    """A fact that a passage gives; each has at most one value."""

    CAPITAL = "capital"
    """Country to city, which lies in it."""
    CURRENCY = "currency"
    """Country to currency."""
    COUNTRY = "country"
    """City to country."""
    RIVER = "river"
    """City to river."""
    BIRTHPLACE = "birthplace"
    """Person to city."""
    TEACHER = "teacher"
    """Person to an older person."""
    SPOUSE = "spouse"
    """Person to person, both ways."""
    FOUNDER = "founder"
    """Organisation to person."""
    SEAT = "seat"
    """Organisation to city."""
    AUTHOR = "author"
    """Work to person."""
    PUBLISHER = "publisher"
    """Work to a press."""


LINKS: Mapping[Kind, tuple[tuple[Relation, Kind], ...]] = MappingProxyType(
    {
        Kind.COUNTRY: ((Relation.CAPITAL, Kind.CITY), (Relation.CURRENCY, Kind.CURRENCY)),
        Kind.CITY: ((Relation.COUNTRY, Kind.COUNTRY), (Relation.RIVER, Kind.RIVER)),
        Kind.PERSON: (
            (Relation.BIRTHPLACE, Kind.CITY),
            (Relation.TEACHER, Kind.PERSON),
            (Relation.SPOUSE, Kind.PERSON),
        ),
        Kind.ORGANISATION: ((Relation.FOUNDER, Kind.PERSON), (Relation.SEAT, Kind.CITY)),
        Kind.WORK: ((Relation.AUTHOR, Kind.PERSON), (Relation.PUBLISHER, Kind.ORGANISATION)),
        Kind.RIVER: (),
        Kind.CURRENCY: (),
    }
)
"""The relations of each kind, and their target kinds."""
WITH_NAMESAKES = frozenset({Kind.PERSON, Kind.WORK})
"""Kinds whose namesakes may have a passage; the label tells them apart."""


@dataclass(eq=False)
class Entity:
    """One entity of an invented world. It is filled while the world is drawn and then only read."""

    kind: Kind
    name: str
    aliases: tuple[str, ...] = ()
    """Other names, which only the entity's passage explains."""
    label: str = ""
    """Trade of a person, form of a work, type of an organisation."""
    year: int = 0
    """Of birth, foundation or publication."""
    has_namesake: bool = False
    """Whether a namesake has a passage, so that the name alone is ambiguous."""
    links: dict[Relation, Entity] = field(default_factory=dict)
    mentions: dict[Relation, str] = field(default_factory=dict)
    """Name of each relation's target in the entity's passage."""
    row: int = -1
    """Number of its passage in the corpus; -1 without one."""

    @property
    def answers(self) -> list[str]:
        """Return the name, then the aliases."""
        return [self.name, *self.aliases]

    @property
    def short_name(self) -> str:
        """Return the name with its article, for use inside a sentence."""
        return f"the {self.name}" if self.kind is Kind.ORGANISATION else self.name

    @property
    def full_name(self) -> str:
        """Return the short name with the label that tells it from a namesake."""
        return f"the {self.label} {self.name}" if self.kind in WITH_NAMESAKES else self.short_name
