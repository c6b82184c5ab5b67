"""The score of a purchase, in [0, 1], as the original computes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spear_envs.core.rewards import Criterion
from spear_envs.webshop.goals import NO_CEILING, Goal
from spear_envs.webshop.products import Product

MATCH = 85
"""Texts match if their ratio exceeds this."""

_COLOURS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "
    "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
    "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey "
    "heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight "
    "mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow "
    "red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal "
    "tiger turquoise violet walnut wheat white wine yellow"
)
COLOURS = tuple(_COLOURS.split())
"""Colour words of the original, in alphabetical order, which is the order of the search."""

_DELETED = dict.fromkeys(range(0x80, 0x100))
_NOT_ALPHANUMERIC = re.compile(r"[\W_]")


def fold_colour(text: str) -> str:
    """Return the first of :data:`COLOURS` that occurs in ``text`` (``red`` in ``tired``), else ``text`` itself."""
    return next((colour for colour in COLOURS if colour in text), text)


def token_set_ratio(a: str, b: str) -> int:
    """Return the likeness in 0..100, equal to ``thefuzz.fuzz.token_set_ratio`` 0.22.1.

    U+0080 to U+00FF are deleted, other scripts stay; all but letters and digits separates words; case is ignored.
    100 if the texts share a word and one has no others; 0 if either has no words.
    """
    x, y = _split(a), _split(b)
    if not x or not y:
        return 0
    both, only_x, only_y = " ".join(x & y), " ".join(sorted(x - y)), " ".join(sorted(y - x))
    shared = len(both)
    if shared and not (only_x and only_y):
        return 100
    # The three strings that thefuzz compares begin with the shared words, so these count in the lengths alone.
    before = shared + 1 if shared else 0
    length_x, length_y = before + len(only_x), before + len(only_y)
    ratios = [100 - 100 * _count_indels(only_x, only_y) / (length_x + length_y)]
    if shared:
        ratios += [100 - 100 * (length - shared) / (shared + length) for length in (length_x, length_y)]
    return round(max(ratios))


def matches(a: str, b: str) -> bool:
    """Return whether two texts match for the reward."""
    return token_set_ratio(a, b) > MATCH


def _split(text: str) -> frozenset[str]:
    # İ alone has two letters in lower case; the original lowers code point by code point and gets one.
    text = text.translate(_DELETED).replace("\u0130", "i")
    return frozenset(_NOT_ALPHANUMERIC.sub(" ", text).lower().split())


def _count_indels(a: str, b: str) -> int:
    """Count the least deletions and insertions that turn ``a`` into ``b``.

    They follow from the longest common subsequence, whose length is computed a row of the table at a time, a bit for
    each character of ``a`` (Hyyrö, 2004, "Bit-parallel LCS-length computation revisited").
    """
    places: dict[str, int] = {}
    for i, letter in enumerate(a):
        places[letter] = places.get(letter, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full
    for letter in b:
        hits = row & places.get(letter, 0)
        row = (row + hits | row - hits) & full
    common = len(a) - row.bit_count()
    return len(a) + len(b) - 2 * common


NO_NOUNS_SCORE = 0.2
"""Likeness of titles if the goal's has no nouns."""


class Score(NamedTuple):
    """A purchase's score and its parts: (attributes + options + price) / (wanted + 1) * type."""

    reward: float
    """The score, in [0, 1]."""
    attribute_hits: int
    """Attributes of the goal that the product has."""
    option_hits: int
    """Options of the goal that are chosen."""
    price_ok: bool
    """The price does not exceed the goal's ceiling."""
    r_type: float
    """Factor for the kind of product: 1, 0.5, 0.1 or 0."""
    title_score: float
    """Share of the nouns of the goal's title that the product's title has."""
    query_match: bool
    """Product and goal were collected by the same query."""
    category_match: bool
    """At least two levels of the product category are shared."""


NOTHING_BOUGHT = Score(0.0, 0, 0, False, 0.0, 0.0, False, False)
"""The score before a purchase."""


def score_purchase(
    goal: Goal,
    product: Product,
    price: float,
    options: Mapping[str, str],
    nouns: Sequence[str],
    goal_nouns: Sequence[str],
) -> Score:
    """Score the purchase of ``product``.

    Args:
        price: its price in dollars, as drawn for the catalogue.
        nouns: nouns of the product's title, in lower case, repeats kept.
    """
    attribute_hits = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    option_hits = count_option_hits(options.values(), goal.options)
    price_ok = price <= goal.price_upper
    title_score = compare_titles(nouns, goal_nouns)
    query_match = product.query == goal.query
    category_match = len(_split_levels(product.product_category) & _split_levels(goal.product_category)) >= 2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:  # takes precedence over an equal query
        r_type = 0.1 if title_score else 0.0
    wanted = len(goal.attributes) + len(goal.options) + 1
    reward = (attribute_hits + option_hits + price_ok) / wanted * r_type
    return Score(reward, attribute_hits, option_hits, price_ok, r_type, title_score, query_match, category_match)


def list_criteria(
    goal: Goal, product: Product | None, price: float, options: Mapping[str, str], score: Score
) -> list[Criterion]:
    """List the wishes of a goal and how a purchase meets them; ``product`` is None before a purchase."""
    if product is None:
        return [Criterion("purchase", False, goal.title, "nothing was bought")]
    chosen = ", ".join(options.values()) or "none chosen"
    limit = "any price" if goal.price_upper >= NO_CEILING else f"at most ${goal.price_upper:,.2f}"
    return [
        Criterion("kind of product", score.r_type == 1.0, goal.title, product.title),
        *(
            Criterion("attribute", has, attribute, "yes" if has else "no")
            for attribute, has in ((one, _has_attribute(product, one)) for one in goal.attributes)
        ),
        *(
            Criterion(
                "option",
                bool(count_option_hits(options.values(), [wish])),
                wish if isinstance(wish, str) else f"{wish[0]}: {wish[1]}",
                chosen,
            )
            for wish in goal.options
        ),
        Criterion("price", score.price_ok, limit, f"${price:,.2f}"),
    ]


def compare_titles(nouns: Sequence[str], goal_nouns: Sequence[str]) -> float:
    """Return the share of the goal's nouns, repeats counted, that the other title has, each counted once."""
    return len({*nouns} & {*goal_nouns}) / len(goal_nouns) if goal_nouns else NO_NOUNS_SCORE


def count_option_hits(chosen: Iterable[str], wanted: Sequence[tuple[str, str] | str]) -> int:
    """Count the wanted options that match a chosen one, colours folded on both sides."""
    folded = [fold_colour(value) for value in chosen]
    if not folded:
        return 0
    return sum(any(matches(value, target) for value in folded) for target in map(_read_wish, wanted))


def _read_wish(wish: tuple[str, str] | str) -> str:
    """Return the text that a wanted option is compared as.

    The original passes the options of a synthetic goal as (group, value) pairs: folding then asks whether an element
    *is* a colour, and the ratio is that of the pair as Python prints it, with the group's name.
    """
    if isinstance(wish, str):
        return fold_colour(wish)
    colours = sorted(part for part in wish if part in COLOURS)
    return colours[0] if colours else str(tuple(wish))


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(matches(owned, attribute) for owned in product.attributes):
        return True
    return (
        attribute in product.title.lower()
        or attribute in " ".join(product.bullets).lower()
        or attribute in product.description.lower()
    )


def _split_levels(product_category: str) -> set[str]:
    return {level.strip() for level in product_category.split("›")}
