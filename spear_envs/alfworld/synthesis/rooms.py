"""Synthetic rooms: their receptacles, the objects in them, and where the agent stands to reach them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from random import Random
from types import MappingProxyType

from spear_envs.alfworld.gamefile import TaskType
from spear_envs.core import dice


class Dice(dice.Dice):
    """A :class:`spear_envs.core.dice.Dice` with the seeds of the embedded games.

    Args:
        key: what the choices are for; its parts are joined by slashes.
    """

    def __init__(self, *key: str | int) -> None:
        digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
        self._random = Random(int.from_bytes(digest, "big")).random


class RoomSize(str, Enum):
    """How much there is in a room."""

    STANDARD = "standard"
    """16 to 40 receptacles, as in official games."""
    SMALL = "small"
    """9 to 15 receptacles and fewer objects, so that a room can be searched within 20 turns."""


@dataclass(frozen=True, eq=False)
class RoomKind:
    """What rooms of one kind have in common.

    Attributes:
        receptacles: receptacle kind -> (least, most) in a standard room.
        small: the same in a small room.
        objects: kinds of objects that may occur.
        lamp: kind of its lamp, if it has one.
        first_scene: ALFRED's number of its first layout.
    """

    name: str
    receptacles: Mapping[str, tuple[int, int]]
    small: Mapping[str, tuple[int, int]]
    objects: tuple[str, ...]
    lamp: str | None
    first_scene: int

    def counts(self, size: RoomSize) -> Mapping[str, tuple[int, int]]:
        """Return the (least, most) number of each kind of receptacle in rooms of a size."""
        return self.receptacles if size is RoomSize.STANDARD else self.small


@dataclass(frozen=True)
class Receptacle:
    """A receptacle of a layout."""

    kind: str
    identifier: str
    location: str


@dataclass(frozen=True)
class Layout:
    """The receptacles of one room; games in it differ in their objects."""

    room: RoomKind
    scene: int
    receptacles: tuple[Receptacle, ...]

    @property
    def name(self) -> str:
        """Return the name, such as ``kitchen-7``."""
        return f"{self.room.name}-{self.scene}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


KITCHEN = RoomKind(
    "kitchen",
    {
        "Cabinet": (5, 16), "CoffeeMachine": (1, 1), "CounterTop": (1, 3), "DiningTable": (0, 2), "Drawer": (2, 9),
        "Fridge": (1, 1), "GarbageCan": (1, 1), "Microwave": (1, 1), "Shelf": (0, 3), "SideTable": (0, 1),
        "SinkBasin": (1, 1), "StoveBurner": (2, 6), "Toaster": (1, 1),
    },
    {
        "Cabinet": (1, 4), "CoffeeMachine": (0, 1), "CounterTop": (1, 2), "DiningTable": (0, 1), "Drawer": (1, 3),
        "Fridge": (1, 1), "GarbageCan": (1, 1), "Microwave": (1, 1), "Shelf": (0, 1), "SinkBasin": (1, 1),
        "StoveBurner": (1, 2), "Toaster": (0, 1),
    },
    _words("Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle Lettuce Mug "
        "Pan PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Tomato Vase WineBottle"),
    None,
    1,
)  # fmt: skip
LIVING_ROOM = RoomKind(
    "livingroom",
    {
        "ArmChair": (1, 3), "Cabinet": (0, 5), "CoffeeTable": (1, 2), "DiningTable": (0, 1), "Drawer": (3, 12),
        "Dresser": (0, 1), "GarbageCan": (1, 1), "Ottoman": (0, 1), "Shelf": (0, 7), "SideTable": (1, 4),
        "Sofa": (1, 2), "TVStand": (0, 1),
    },
    {
        "ArmChair": (1, 2), "Cabinet": (0, 2), "CoffeeTable": (1, 1), "Drawer": (1, 3), "Dresser": (0, 1),
        "GarbageCan": (1, 1), "Ottoman": (0, 1), "Shelf": (0, 2), "SideTable": (1, 2), "Sofa": (1, 1),
        "TVStand": (0, 1),
    },
    _words("Book Box Candle CellPhone CreditCard KeyChain Laptop Newspaper Pillow Plate RemoteControl "
        "Statue TissueBox Vase Watch WateringCan"),
    "FloorLamp",
    201,
)  # fmt: skip
BEDROOM = RoomKind(
    "bedroom",
    {
        "ArmChair": (0, 1), "Bed": (1, 2), "Cabinet": (0, 2), "Desk": (1, 2), "Drawer": (4, 13), "Dresser": (0, 1),
        "GarbageCan": (1, 1), "LaundryHamper": (0, 1), "Safe": (0, 1), "Shelf": (1, 9), "SideTable": (1, 2),
    },
    {
        "ArmChair": (0, 1), "Bed": (1, 1), "Desk": (1, 2), "Drawer": (1, 4), "Dresser": (0, 1), "GarbageCan": (1, 1),
        "LaundryHamper": (0, 1), "Safe": (0, 1), "Shelf": (1, 3), "SideTable": (1, 2),
    },
    _words("AlarmClock BaseballBat BasketBall Book Bowl CD CellPhone CreditCard KeyChain Laptop Mug Pen "
        "Pencil Pillow TeddyBear"),
    "DeskLamp",
    301,
)  # fmt: skip
BATHROOM = RoomKind(
    "bathroom",
    {
        "BathtubBasin": (0, 1), "Cabinet": (2, 8), "CounterTop": (1, 2), "Drawer": (1, 7), "GarbageCan": (1, 1),
        "HandTowelHolder": (1, 4), "Shelf": (0, 4), "SideTable": (0, 1), "SinkBasin": (1, 2), "Toilet": (1, 1),
        "ToiletPaperHanger": (1, 1), "TowelHolder": (1, 2),
    },
    {
        "BathtubBasin": (0, 1), "Cabinet": (1, 3), "CounterTop": (1, 1), "Drawer": (0, 2), "GarbageCan": (1, 1),
        "HandTowelHolder": (1, 1), "Shelf": (0, 1), "SideTable": (0, 1), "SinkBasin": (1, 2), "Toilet": (1, 1),
        "ToiletPaperHanger": (1, 1), "TowelHolder": (0, 1),
    },
    _words("Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper Towel"),
    None,
    401,
)  # fmt: skip

ROOMS = (KITCHEN, LIVING_ROOM, BEDROOM, BATHROOM)

_ROOMS_OF: Mapping[TaskType, tuple[RoomKind, ...]] = MappingProxyType(
    {
        TaskType.PICK: ROOMS,
        TaskType.LOOK: (LIVING_ROOM, BEDROOM),
        TaskType.CLEAN: (KITCHEN, BATHROOM),
        TaskType.HEAT: (KITCHEN,),
        TaskType.COOL: (KITCHEN,),
        TaskType.PICK2: ROOMS,
    }
)

LAYOUTS: Mapping[str, range] = MappingProxyType(
    {"train": range(0, 24), "valid_seen": range(0, 24), "valid_unseen": range(24, 32)}
)
"""Split -> layouts of each room kind in its games."""

_BOUNDS = {RoomSize.STANDARD: (16, 40), RoomSize.SMALL: (9, 15)}
_SHARED_SPOT = 0.15
"""Share of receptacles reached from the spot of the previous one; 3 of 4 official games have some."""


def rooms_of(task_type: TaskType) -> tuple[RoomKind, ...]:
    """Return room kinds for tasks of this type."""
    return _ROOMS_OF[task_type]


def draw_identifier(dice: Dice, kind: str) -> str:
    """Draw an identifier in ALFRED's form: the kind and three coordinates in metres."""
    parts = [kind]
    for _ in range(3):
        value = dice.below(801) - 400
        parts.append(f"_{'minus' if value < 0 else 'plus'}_{abs(value) // 100:02d}_dot_{abs(value) % 100:02d}")
    return "_bar_".join(parts)


def _draw_location(dice: Dice) -> str:
    """Draw a spot on the floor in ALFRED's form: place in steps of 25 cm, direction, angle of view."""
    steps = (dice.below(41) - 20, dice.below(41) - 20, dice.below(4), dice.pick((0, 30, 45, 60)))
    return "loc_bar_" + "_bar_".join(f"_minus_{-step}" if step < 0 else str(step) for step in steps)


def _draw_receptacles(room: RoomKind, size: RoomSize, dice: Dice) -> tuple[Receptacle, ...]:
    receptacles: list[Receptacle] = []
    taken: set[str] = set()

    def draw_new(draw: str) -> str:
        while True:
            new = _draw_location(dice) if draw == "location" else draw_identifier(dice, draw)
            if new not in taken:
                taken.add(new)
                return new

    for kind, (least, most) in room.counts(size).items():
        for _ in range(dice.between(least, most)):
            stem = kind.removesuffix("Basin")  # a basin is part of a larger thing: Sink…_bar_SinkBasin
            identifier = draw_new(stem) + (f"_bar_{kind}" if stem != kind else "")
            shares = bool(receptacles) and dice.chance(_SHARED_SPOT)
            location = receptacles[-1].location if shares else draw_new("location")
            receptacles.append(Receptacle(kind, identifier, location))
    return tuple(receptacles)


@lru_cache(maxsize=16)
def list_layouts(room: RoomKind, size: RoomSize) -> tuple[Layout, ...]:
    """Draw all layouts of a kind of room, for every split.

    No two have the same numbers of the same receptacles, so a player can tell all apart.
    """
    least, most = _BOUNDS[size]
    layouts: list[Layout] = []
    seen: set[frozenset[tuple[str, int]]] = set()
    attempt = 0
    while len(layouts) < max(numbers.stop for numbers in LAYOUTS.values()):
        receptacles = _draw_receptacles(room, size, Dice("layout", size.value, room.name, attempt))
        attempt += 1
        signature = frozenset(Counter(item.kind for item in receptacles).items())
        if least <= len(receptacles) <= most and signature not in seen:
            seen.add(signature)
            layouts.append(Layout(room, room.first_scene + len(layouts), receptacles))
    return tuple(layouts)


def _kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FOOD = _kinds("Apple Bread Egg Lettuce Potato Tomato")
_CROCKERY = _kinds("Bowl Cup Mug Plate")
_COOKWARE = _kinds("Kettle Pan Pot")
_CUTLERY = _kinds("ButterKnife Fork Knife Ladle Spatula Spoon")
_TABLE_GOODS = _kinds("Glassbottle PepperShaker SaltShaker WineBottle")
_SINK_GOODS = _kinds("DishSponge SoapBottle")
_PAPERS = _kinds("Book Newspaper")
_DESK_GOODS = _kinds("AlarmClock CD Laptop Pen Pencil")
_POCKET_GOODS = _kinds("CellPhone CreditCard KeyChain RemoteControl Watch")
_ORNAMENTS = _kinds("Box Candle Statue TissueBox Vase WateringCan")
_WASH_GOODS = _kinds("Cloth HandTowel SoapBar SprayBottle ToiletPaper")

_TABLE_TOP = (
    _FOOD | _CROCKERY | _COOKWARE | _CUTLERY | _TABLE_GOODS | _SINK_GOODS | _PAPERS | _DESK_GOODS | _POCKET_GOODS
) | _ORNAMENTS
_SEAT = _PAPERS | _POCKET_GOODS - {"Watch"} | {"Box", "Laptop", "Pillow"}

HOLDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "ArmChair": _SEAT,
        "BathtubBasin": _kinds("Cloth DishSponge HandTowel SoapBar"),
        "Bed": _kinds("BaseballBat BasketBall Book CellPhone Laptop Newspaper Pillow TeddyBear"),
        "Cabinet": _CROCKERY | _COOKWARE | _TABLE_GOODS | _SINK_GOODS | _PAPERS | _WASH_GOODS
        | _kinds("Box Candle Ladle TissueBox Vase WateringCan"),
        "CoffeeMachine": _kinds("Cup Mug"),
        "CoffeeTable": _PAPERS | _POCKET_GOODS | _ORNAMENTS | _kinds("Bowl Laptop Mug Pen Pencil Plate"),
        "CounterTop": _TABLE_TOP | _WASH_GOODS,
        "Desk": _DESK_GOODS | _POCKET_GOODS | _PAPERS | _ORNAMENTS - {"Candle"} | _kinds("BasketBall Bowl Cup Mug"),
        "DiningTable": _TABLE_TOP,
        "Drawer": _CUTLERY | _POCKET_GOODS | _PAPERS | _SINK_GOODS | _WASH_GOODS
        | _kinds("CD Candle Pen Pencil PepperShaker SaltShaker TissueBox"),
        "Dresser": _DESK_GOODS | _POCKET_GOODS | _PAPERS | _ORNAMENTS | _kinds("BasketBall Bowl Mug TeddyBear"),
        "Fridge": _FOOD | _CROCKERY | _kinds("Glassbottle Pan Pot WineBottle"),
        "GarbageCan": _FOOD | _WASH_GOODS | _kinds("CD DishSponge Newspaper Pen Pencil SoapBottle TissueBox"),
        "HandTowelHolder": _kinds("HandTowel"),
        "LaundryHamper": _kinds("Cloth HandTowel"),
        "Microwave": _FOOD - {"Lettuce"} | _CROCKERY,
        "Ottoman": _SEAT,
        "Safe": _kinds("CD CellPhone CreditCard KeyChain Statue Vase Watch"),
        "Shelf": _CROCKERY | _TABLE_GOODS | _SINK_GOODS | _PAPERS | _POCKET_GOODS | _ORNAMENTS | _WASH_GOODS
        | _kinds("AlarmClock BasketBall CD Kettle Pen Pencil Pot TeddyBear"),
        "SideTable": _TABLE_TOP | _WASH_GOODS,
        "SinkBasin": _FOOD - {"Bread"} | _CROCKERY | _COOKWARE | _CUTLERY
        | _kinds("Cloth DishSponge HandTowel SoapBar"),
        "Sofa": _SEAT | {"BasketBall", "TeddyBear"},
        "StoveBurner": _COOKWARE,
        "TVStand": _POCKET_GOODS | _ORNAMENTS | _kinds("CD Newspaper"),
        "Toaster": frozenset(),
        "Toilet": _WASH_GOODS | _kinds("Candle DishSponge SoapBottle TissueBox"),
        "ToiletPaperHanger": _kinds("ToiletPaper"),
        "TowelHolder": _kinds("Towel"),
    }
)  # fmt: skip
"""Receptacle kind -> kinds of objects that may be put there."""

OPENABLE = _kinds("Cabinet Drawer Fridge Microwave Safe")
"""Receptacles that start closed."""

ABILITIES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cleanable": _FOOD - {"Bread"} | _CROCKERY | _COOKWARE | _CUTLERY | _kinds("Cloth DishSponge SoapBar"),
        "coolable": _FOOD | _CROCKERY | _kinds("Pan Pot WineBottle"),
        "heatable": _FOOD - {"Lettuce"} | _CROCKERY - {"Bowl"},
        "isReceptacleObject": _CROCKERY | _kinds("Box Pan Pot"),
        "sliceable": _FOOD,
    }
)
"""Predicate -> kinds of objects that it holds for."""

CONTAINERS = ABILITIES["isReceptacleObject"]
SLENDER = _CUTLERY | _kinds("CreditCard KeyChain Pen Pencil Watch")
"""Objects that may lie in a container, such as a fork in a cup."""

LAMP_STANDS = _kinds("CoffeeTable Desk Dresser Shelf SideTable TVStand")
"""Receptacles that a lamp may stand on."""

TREATMENTS: Mapping[TaskType, tuple[str, str]] = MappingProxyType(
    {
        TaskType.CLEAN: ("cleanable", "isClean"),
        TaskType.HEAT: ("heatable", "isHot"),
        TaskType.COOL: ("coolable", "isCool"),
    }
)
"""Task type -> ability that an object needs, and the predicate that must hold in the end."""


def has_ability(kind: str, task_type: TaskType) -> bool:
    """Return whether an object of this kind can be treated as the task type wants; True if it needs none."""
    treatment = TREATMENTS.get(task_type)
    return treatment is None or kind in ABILITIES[treatment[0]]


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
    """Receptacle at the location of the object."""
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
