"""Rare and common words for catalogues of a million products, as numerous as in real text."""

from __future__ import annotations

from spear_envs.core.dice import Dice

_ONSETS = (*"bdfghjklmnprstvz", "br", "dr", "gr", "kl", "pl", "st")
_NUCLEI = (*"aeiou", "ai", "ea", "ou")
_CODAS = ("", "n", "r", "l", "m", "k")
_SYLLABLES = tuple(onset + nucleus + coda for onset in _ONSETS for nucleus in _NUCLEI for coda in _CODAS)
_LENGTHS = (0, 0, 0, 0, 0, 0, 4, 8, 14, 20, 27, 35, 45, 58, 74, 93, 118, 150, 196, 380)
"""Numbers of invented words of a description, one for each twentieth of the products: with all words the median is near
75 and the mean near 110, as in the official 1,000 products."""


def write_tail(dice: Dice, products: int) -> tuple[str, str]:
    """Write the additions to title and description of one of ``products`` products.

    The probability of word r is about proportional to 1/r, and the vocabulary grows with the catalogue to the power
    0.6, from some ten thousand for a thousand products: both as measured on the official 1,000 products.
    """
    bits = 13 + 6 * (products // 1000).bit_length() // 10
    words = [_make_word(_draw_rank(dice, bits)) for _ in range(dice.pick(_LENGTHS))]
    model = f" {dice.pick(_SYLLABLES).upper()}{dice.below(10 * products)}" if dice.chance(0.5) else ""
    return model, " " + " ".join(words) if words else ""


def _draw_rank(dice: Dice, bits: int) -> int:
    """Draw a rank below 2 to the power ``bits + 1``, uniform on a logarithmic scale."""
    step = 1 << dice.below(bits + 1)
    return step + dice.below(step)


def _make_word(rank: int) -> str:
    word = ""
    while rank:
        rank, syllable = divmod(rank, len(_SYLLABLES))
        word += _SYLLABLES[syllable]
    return word
