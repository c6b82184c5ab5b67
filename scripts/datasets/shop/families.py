"""The products of one shelf: families of a wanted product and its near misses, and a few odd ones out.

A family has a product that goals are made of (``wanted``), one of the same query that lacks an attribute of the goal,
and one that has them all but costs more than any ceiling that could be drawn. A ceiling is at most 40 dollars above
the price of the wanted product and never less than 10.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shop.words import BRANDS, COLORS, EXOTIC, EXTRAS, STYLES, Attribute, Form, Shelf
from spear_envs.core.dice import Dice

FAMILIES = 6
ODD = 2
ODDITIES = 11
"""Changes of the odd products, in turn."""
SHELF_SIZE = 3 * FAMILIES + ODD
CEILING_MARGIN = 40
DEAR_EVERY = 12
"""One shelf in this many has a product too expensive for a ceiling."""
TRIES = 200

Options = Mapping[str, Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class Listing:
    """A product before its texts are written."""

    shelf: Shelf
    attributes: tuple[Attribute, ...]
    """Attributes that the title names."""
    hidden: tuple[Attribute, ...] = ()
    """Attributes that only the features name."""
    brand: str = ""
    style: str = ""
    extra: str = ""
    """Further words of the title."""
    noun: str = ""
    emphatic: bool = False
    """Features and description name the attributes again, which search rewards."""
    sentences: int = 0
    """Length of the description; 0 for none."""
    features: int = 2
    empty_feature: bool = False
    features_as_text: bool = False
    options: Options = field(default_factory=dict)
    price: int | None = 0
    """Whole dollars; None for a record without a price."""
    price_to: int | None = None
    """Upper end of a range."""
    cents: str = "00"
    goal: tuple[Attribute, ...] = ()
    """Attributes that its instruction asks for; empty without one."""
    listed: bool = True
    """Whether the attribute file has it."""
    words_key: str = ""
    """Listings with equal keys have equal descriptions and features."""


def fill_shelf(shelf: Shelf, number: int, dice: Dice) -> list[Listing]:
    """Make the ``SHELF_SIZE`` products of shelf ``number``, in random order."""
    goals = _pick_goals(shelf, dice)
    listings: list[Listing] = []
    for i, goal in enumerate(goals):
        dear = i == 0 and number % DEAR_EVERY == DEAR_EVERY // 2
        listings += _make_family(shelf, goal, goals, dice, dear)
    for i in range(ODD):
        kind = (number * ODD + i) % ODDITIES
        listings.append(_make_odd(kind, _make_other(shelf, goals, dice), listings, dice))
    named = [
        listing if listing.words_key else replace(listing, words_key=f"{number}/{i}")
        for i, listing in enumerate(listings)
    ]
    return dice.sample(named, SHELF_SIZE)


# ---------------------------------------------------------------- goals


def _pick_goals(shelf: Shelf, dice: Dice) -> list[tuple[Attribute, ...]]:
    """Choose sets of one to three attributes, none of which contains another."""
    goals: list[tuple[Attribute, ...]] = []
    for _ in range(TRIES):
        size = 1 if dice.chance(0.04) else 2 if dice.chance(0.6) else 3
        chosen = set(dice.sample(range(len(shelf.attributes)), size))
        goal = tuple(attribute for i, attribute in enumerate(shelf.attributes) if i in chosen)
        if _fits_title(goal) and not any(set(goal) <= set(other) or set(other) <= set(goal) for other in goals):
            goals.append(goal)
        if len(goals) == FAMILIES:
            return goals
    raise AssertionError(f"no {FAMILIES} sets of attributes found for {shelf.query!r}")


def _add_attribute(
    shelf: Shelf,
    attributes: tuple[Attribute, ...],
    avoid: Sequence[Attribute],
    goals: Sequence[tuple[Attribute, ...]],
    dice: Dice,
) -> tuple[Attribute, ...]:
    """Add an attribute, unless the result would answer another goal of the shelf."""
    for attribute in dice.sample(shelf.attributes, len(shelf.attributes)):
        more = {*attributes, attribute}
        if attribute in attributes or attribute in avoid or any(more.issuperset(goal) for goal in goals):
            continue
        if _fits_title(more):
            return tuple(known for known in shelf.attributes if known in more)
    return attributes


def _fits_title(attributes: Collection[Attribute]) -> bool:
    """Return whether a title of ten words can name them all: three only if two of them come before the noun."""
    return len(attributes) < 3 or sum(attribute.form is Form.BEFORE for attribute in attributes) >= 2


# ---------------------------------------------------------------- families


def _make_family(
    shelf: Shelf, goal: tuple[Attribute, ...], goals: Sequence[tuple[Attribute, ...]], dice: Dice, dear: bool
) -> list[Listing]:
    others = [other for other in goals if other != goal]
    exotic = dice.chance(0.06)
    buried = dice.chance(0.5)
    twins = not dear and dice.chance(0.08)
    hidden = (dice.pick(goal),) if len(goal) > 1 and dice.chance(0.15) else ()
    shown = tuple(attribute for attribute in goal if attribute not in hidden)
    options = _pick_options(shelf, dice, exotic)
    low, high = shelf.prices
    price = dice.between(985, 1290) if dear else None if dice.chance(0.07) else dice.between(low, high)
    spread = dice.between(2, 8) if price is not None and dice.chance(0.09) else None
    wanted = replace(
        _dress(shelf, dice, options, emphatic=not buried, exotic=exotic),
        attributes=shown if len(goal) > 1 else _add_attribute(shelf, shown, (), others, dice),
        hidden=hidden,
        noun=shelf.alias if buried and dice.chance(0.85) else shelf.noun,
        sentences=dice.between(7, 9) if buried else dice.pick((0, 3, 3, 4)),
        price=price,
        price_to=None if price is None or spread is None else price + spread,
        goal=goal,
    )
    base = 100 if price is None else price
    lacking = _make_lacking(wanted, goals, options, base, dice)
    if dear:
        return [wanted, lacking, _make_lacking(wanted, goals, options, base, dice)]
    too_dear = base + (spread or 0) + CEILING_MARGIN + dice.between(3, 42)
    if twins:
        twin = replace(wanted, goal=(), price=too_dear, price_to=None, words_key=f"twin {dice.below(1 << 30)}")
        return [replace(wanted, words_key=twin.words_key), lacking, twin]
    rich = replace(
        _dress(shelf, dice, options, emphatic=True, exotic=False),
        attributes=wanted.attributes,
        hidden=hidden,
        price=too_dear,
        price_to=too_dear + dice.between(5, 20) if dice.chance(0.1) else None,
    )
    return [wanted, lacking, rich]


def _make_lacking(
    wanted: Listing, goals: Sequence[tuple[Attribute, ...]], options: Options, base: int, dice: Dice
) -> Listing:
    """Make a listing like ``wanted``, cheap enough, that lacks one attribute of the goal everywhere."""
    missing = dice.pick(wanted.hidden or wanted.goal)
    kept = tuple(attribute for attribute in wanted.attributes if attribute is not missing)
    listing = _dress(wanted.shelf, dice, options, emphatic=dice.chance(0.7), exotic=False)
    price = max(3, base + dice.between(-4, 5))
    return replace(
        listing,
        attributes=kept if wanted.hidden else _add_attribute(wanted.shelf, kept, wanted.goal, goals, dice),
        price=price,
        price_to=price + dice.between(1, 4) if dice.chance(0.1) else None,
    )


def _make_other(shelf: Shelf, goals: Sequence[tuple[Attribute, ...]], dice: Dice) -> Listing:
    first = _add_attribute(shelf, (), (), goals, dice)
    listing = _dress(shelf, dice, _pick_options(shelf, dice, False), emphatic=dice.chance(0.5), exotic=False)
    low, high = shelf.prices
    return replace(listing, attributes=_add_attribute(shelf, first, (), goals, dice), price=dice.between(low, high))


def _dress(shelf: Shelf, dice: Dice, options: Options, *, emphatic: bool, exotic: bool) -> Listing:
    """Make a listing without attributes and price."""
    return Listing(
        shelf=shelf,
        attributes=(),
        brand=dice.pick(BRANDS),
        style=dice.pick(STYLES) if dice.chance(0.4) else "",
        extra=dice.pick(EXTRAS[shelf.category]) if exotic or dice.chance(0.03) else "",
        noun=shelf.noun if dice.chance(0.8) else shelf.alias,
        emphatic=emphatic,
        sentences=dice.pick((0, 3, 3, 4, 5)),
        features=dice.between(1, 3),
        empty_feature=dice.chance(0.06),
        options=options,
        cents=dice.pick(("00", "00", "00", "49", "50", "95", "99")),
    )


def _pick_options(shelf: Shelf, dice: Dice, exotic: bool) -> Options:
    if exotic:
        name, values = EXOTIC[shelf.category]
        return {name: values}
    count = 0 if dice.chance(0.16) else 1 if dice.chance(0.78) else 2
    if not count:
        return {shelf.groups[0][0]: None} if dice.chance(0.3) else {}
    chosen = dice.sample(shelf.groups, count)
    return {name: dice.sample(values, 2 if count == 2 else dice.pick((2, 2, 3, 4))) for name, values in chosen}


# ---------------------------------------------------------------- oddities of real data


def _make_odd(kind: int, listing: Listing, listings: list[Listing], dice: Dice) -> Listing:
    """Change a product, given the shelf so far, in one of ``ODDITIES`` ways."""
    if kind == 0:  # two groups share a value
        return replace(listing, options={"color": (dice.pick(COLORS), "natural"), "finish": ("natural", "matte")})
    if kind == 1:  # empty groups
        return replace(listing, options={"material": None, "color": dice.sample(COLORS, 2), "style": None})
    if kind == 2:  # a value twice
        first, second = dice.sample(COLORS, 2)
        return replace(listing, options={"color": (first, second, first)})
    if kind == 3:  # a group twice, in other letters
        first, second, third = dice.sample(COLORS, 3)
        return replace(listing, options={"Color": (first.upper(), second), "COLOR": (third.title(), second)})
    if kind == 4:
        return replace(listing, features_as_text=True)
    if kind == 5:
        return replace(listing, features=0, empty_feature=True, emphatic=False)
    if kind == 6:
        return replace(listing, price=None)
    if kind == 7:
        return replace(listing, listed=False)
    if kind == 9:
        return _copy_listing(listing, listings, dice)
    return replace(listing, price_to=(listing.price or 0) + dice.between(3, 20))


def _copy_listing(listing: Listing, listings: list[Listing], dice: Dice) -> Listing:
    """Copy the words of a product that no goal asks for: an equal score in every search."""
    found = next(other for other in listings if not other.goal and not other.words_key)
    index = listings.index(found)
    key = f"copy {dice.below(1 << 30)}"
    listings[index] = replace(found, words_key=key)
    return replace(found, words_key=key, price=listing.price, cents=listing.cents)
