"""Things in synthetic rooms: kinds of objects, what can be done to them, and where they may be."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from spear_envs.alfworld.task_types import TaskType


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FOOD = _words("Apple Bread Egg Lettuce Potato Tomato")
_CROCKERY = _words("Bowl Cup Mug Plate")
_COOKWARE = _words("Kettle Pan Pot")
_CUTLERY = _words("ButterKnife Fork Knife Ladle Spatula Spoon")
_TABLE_GOODS = _words("Glassbottle PepperShaker SaltShaker WineBottle")
_SINK_GOODS = _words("DishSponge SoapBottle")
_PAPERS = _words("Book Newspaper")
_DESK_GOODS = _words("AlarmClock CD Laptop Pen Pencil")
_POCKET_GOODS = _words("CellPhone CreditCard KeyChain RemoteControl Watch")
_ORNAMENTS = _words("Box Candle Statue TissueBox Vase WateringCan")
_WASH_GOODS = _words("Cloth HandTowel SoapBar SprayBottle ToiletPaper")

_TABLE_TOP = (
    _FOOD | _CROCKERY | _COOKWARE | _CUTLERY | _TABLE_GOODS | _SINK_GOODS | _PAPERS | _DESK_GOODS | _POCKET_GOODS
) | _ORNAMENTS
_SEAT = _PAPERS | _POCKET_GOODS - {"Watch"} | {"Box", "Laptop", "Pillow"}

HOLDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "ArmChair": _SEAT,
        "BathtubBasin": _words("Cloth DishSponge HandTowel SoapBar"),
        "Bed": _words("BaseballBat BasketBall Book CellPhone Laptop Newspaper Pillow TeddyBear"),
        "Cabinet": _CROCKERY | _COOKWARE | _TABLE_GOODS | _SINK_GOODS | _PAPERS | _WASH_GOODS
        | _words("Box Candle Ladle TissueBox Vase WateringCan"),
        "CoffeeMachine": _words("Cup Mug"),
        "CoffeeTable": _PAPERS | _POCKET_GOODS | _ORNAMENTS | _words("Bowl Laptop Mug Pen Pencil Plate"),
        "CounterTop": _TABLE_TOP | _WASH_GOODS,
        "Desk": _DESK_GOODS | _POCKET_GOODS | _PAPERS | _ORNAMENTS - {"Candle"} | _words("BasketBall Bowl Cup Mug"),
        "DiningTable": _TABLE_TOP,
        "Drawer": _CUTLERY | _POCKET_GOODS | _PAPERS | _SINK_GOODS | _WASH_GOODS
        | _words("CD Candle Pen Pencil PepperShaker SaltShaker TissueBox"),
        "Dresser": _DESK_GOODS | _POCKET_GOODS | _PAPERS | _ORNAMENTS | _words("BasketBall Bowl Mug TeddyBear"),
        "Fridge": _FOOD | _CROCKERY | _words("Glassbottle Pan Pot WineBottle"),
        "GarbageCan": _FOOD | _WASH_GOODS | _words("CD DishSponge Newspaper Pen Pencil SoapBottle TissueBox"),
        "HandTowelHolder": _words("HandTowel"),
        "LaundryHamper": _words("Cloth HandTowel"),
        "Microwave": _FOOD - {"Lettuce"} | _CROCKERY,
        "Ottoman": _SEAT,
        "Safe": _words("CD CellPhone CreditCard KeyChain Statue Vase Watch"),
        "Shelf": _CROCKERY | _TABLE_GOODS | _SINK_GOODS | _PAPERS | _POCKET_GOODS | _ORNAMENTS | _WASH_GOODS
        | _words("AlarmClock BasketBall CD Kettle Pen Pencil Pot TeddyBear"),
        "SideTable": _TABLE_TOP | _WASH_GOODS,
        "SinkBasin": _FOOD - {"Bread"} | _CROCKERY | _COOKWARE | _CUTLERY
        | _words("Cloth DishSponge HandTowel SoapBar"),
        "Sofa": _SEAT | {"BasketBall", "TeddyBear"},
        "StoveBurner": _COOKWARE,
        "TVStand": _POCKET_GOODS | _ORNAMENTS | _words("CD Newspaper"),
        "Toaster": frozenset(),
        "Toilet": _WASH_GOODS | _words("Candle DishSponge SoapBottle TissueBox"),
        "ToiletPaperHanger": _words("ToiletPaper"),
        "TowelHolder": _words("Towel"),
    }
)  # fmt: skip
"""Receptacle kind -> kinds of objects that may be put there."""

OPENABLE = _words("Cabinet Drawer Fridge Microwave Safe")
"""Receptacles that start closed."""

ABILITIES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cleanable": _FOOD - {"Bread"} | _CROCKERY | _COOKWARE | _CUTLERY | _words("Cloth DishSponge SoapBar"),
        "coolable": _FOOD | _CROCKERY | _words("Pan Pot WineBottle"),
        "heatable": _FOOD - {"Lettuce"} | _CROCKERY - {"Bowl"},
        "isReceptacleObject": _CROCKERY | _words("Box Pan Pot"),
        "sliceable": _FOOD,
    }
)
"""Predicate -> kinds of objects that it holds for."""

CONTAINERS = ABILITIES["isReceptacleObject"]
SLENDER = _CUTLERY | _words("CreditCard KeyChain Pen Pencil Watch")
"""Objects that may lie in a container, such as a fork in a cup."""

LAMP_STANDS = _words("CoffeeTable Desk Dresser Shelf SideTable TVStand")
"""Where a lamp may stand."""

TREATMENTS: Mapping[TaskType, tuple[str, str]] = MappingProxyType(
    {
        TaskType.CLEAN: ("cleanable", "isClean"),
        TaskType.HEAT: ("heatable", "isHot"),
        TaskType.COOL: ("coolable", "isCool"),
    }
)
"""Task type -> ability that an object needs, and the predicate that must hold in the end."""


def has_ability(kind: str, task_type: TaskType) -> bool:
    """Whether an object of this kind can be treated as the task type wants; True if it needs none."""
    treatment = TREATMENTS.get(task_type)
    return treatment is None or kind in ABILITIES[treatment[0]]
