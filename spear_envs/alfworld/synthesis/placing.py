"""Objects of a synthetic room, including the corner cases of official games."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spear_envs.alfworld.synthesis.dice import Dice
from spear_envs.alfworld.synthesis.rooms import Layout, Receptacle, RoomSize, draw_identifier
from spear_envs.alfworld.synthesis.things import ABILITIES, CONTAINERS, HOLDS, LAMP_STANDS, SLENDER

COPIES: Mapping[RoomSize, tuple[int, ...]] = MappingProxyType(
    {RoomSize.STANDARD: (0, 1, 1, 2, 3), RoomSize.SMALL: (0, 0, 1, 1, 2)}
)
"""Numbers of objects of a kind, equally likely."""

# Frequencies of oddities of official games.
_IN_TWO_PLACES = 0.02
_IN_NO_RECEPTACLE = 0.04
_IN_CONTAINER = 0.3
_COOL_IN_FRIDGE = 0.3


@dataclass(frozen=True)
class PlacedObject:
    """An object and its place."""

    kind: str
    identifier: str
    place: Receptacle
    """Its location is that of this receptacle."""
    loose: bool = False
    """It is at the location but not in a receptacle, so it cannot be taken."""
    second: Receptacle | None = None
    """A second receptacle that lists it."""
    container: str | None = None
    """Identifier of the object it lies in."""
    cool: bool = False
    """Whether it is cool at the start."""


def _pick_place(places: list[Receptacle], dice: Dice) -> Receptacle:
    """Pick a receptacle: first its kind, so that ten cabinets do not get everything."""
    kinds = sorted({place.kind for place in places})
    kind = dice.pick(kinds)
    return dice.pick([place for place in places if place.kind == kind])


def draw_objects(layout: Layout, size: RoomSize, dice: Dice) -> list[PlacedObject]:
    """Draw the objects of one game; the lamp, if any, comes last."""
    objects: list[PlacedObject] = []
    taken: set[str] = set()

    def draw_new(kind: str) -> str:
        while (identifier := draw_identifier(dice, kind)) in taken:
            pass
        taken.add(identifier)
        return identifier

    for kind in layout.room.objects:
        places = [place for place in layout.receptacles if kind in HOLDS[place.kind]]
        if not places:
            continue
        for _ in range(dice.pick(COPIES[size])):
            place = _pick_place(places, dice)
            second = dice.pick(layout.receptacles) if dice.chance(_IN_TWO_PLACES) else None
            container = None
            if kind in SLENDER and dice.chance(_IN_CONTAINER):
                near = [item for item in objects if item.place is place and item.kind in CONTAINERS]
                container = near[0].identifier if near else None
            objects.append(
                PlacedObject(
                    kind,
                    draw_new(kind),
                    place,
                    loose=dice.chance(_IN_NO_RECEPTACLE),
                    second=None if second is place else second,
                    container=container,
                    cool=place.kind == "Fridge" and kind in ABILITIES["coolable"] and dice.chance(_COOL_IN_FRIDGE),
                )
            )
    lamp = layout.room.lamp
    if lamp is not None:
        stands = [place for place in layout.receptacles if place.kind in LAMP_STANDS]
        objects.append(PlacedObject(lamp, draw_new(lamp), dice.pick(stands)))
    return objects
