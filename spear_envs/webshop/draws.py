"""Random draws of a catalogue: the prices of products with a range, and the ceilings of goals."""

from __future__ import annotations

import hashlib
from enum import Enum
from random import Random
from typing import Protocol

from spear_envs.core.errors import choose_member
from spear_envs.core.tasks import canonical_json

NO_CEILING = 1_000_000.0
"""``price_upper`` of a goal whose text names no ceiling."""
STEPS = tuple(10.0 * i for i in range(1, 100))


class DrawMode(str, Enum):
    """The source of a catalogue's random numbers."""

    KEYED = "keyed"
    """Each from the SHA-256 of seed, ASIN and instruction, independent of the catalogue's order and size."""
    SEQUENTIAL = "sequential"
    """All from ``random.Random(seed)``, prices first, in the order of the file, as in the original under a seed."""


class Draws(Protocol):
    """A source of prices and ceilings. The price of every product is drawn before the first ceiling."""

    def draw_price(self, asin: str, prices: tuple[float, ...]) -> float:
        """Return the price in dollars that the reward uses: the amount, or one drawn from the range."""

    def draw_ceiling(self, asin: str, number: int, price: float) -> float:
        """Draw ``price_upper`` for instruction ``number`` of a product: the larger of two of the next four tens."""


def ceilings_above(price: float) -> tuple[float, ...]:
    """Return the first four of 10, 20, …, 990 dollars above a price."""
    first = max(0, int(min(price, 1_000.0) // 10))
    return STEPS[first : first + 4]


class KeyedDraws:
    """One random number for each key (:attr:`DrawMode.KEYED`)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draw_price(self, asin: str, prices: tuple[float, ...]) -> float:
        """See :class:`Draws`."""
        if len(prices) == 1:
            return prices[0]
        low, high = prices
        return low + (high - low) * self._unit(asin)

    def draw_ceiling(self, asin: str, number: int, price: float) -> float:
        """See :class:`Draws`."""
        steps = ceilings_above(price)
        # The larger element of each pair: step i is the larger one of i pairs.
        larger = [step for i, step in enumerate(steps) for _ in range(i)]
        return larger[int(self._unit(asin, number) * len(larger))] if larger else NO_CEILING

    def _unit(self, *key: str | int) -> float:
        """Return a number in [0, 1) with 53 random bits."""
        digest = hashlib.sha256(canonical_json([self._seed, *key]).encode()).digest()
        return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


class SequentialDraws:
    """One generator for all (:attr:`DrawMode.SEQUENTIAL`)."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def draw_price(self, asin: str, prices: tuple[float, ...]) -> float:
        """See :class:`Draws`."""
        return prices[0] if len(prices) == 1 else self._random.uniform(*prices)

    def draw_ceiling(self, asin: str, number: int, price: float) -> float:
        """See :class:`Draws`."""
        steps = ceilings_above(price)
        return NO_CEILING if len(steps) < 2 else max(self._random.sample(steps, 2))


def make_draws(mode: str | DrawMode, seed: int) -> Draws:
    """Make the draws of a mode.

    Raises:
        SpearError: the mode is unknown.
    """
    kind = KeyedDraws if choose_member(DrawMode, mode, "draws") is DrawMode.KEYED else SequentialDraws
    return kind(seed)
