"""Likeness of two short texts in the original's reward: thefuzz's ``token_set_ratio``, and folded colours."""

from __future__ import annotations

import re

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
