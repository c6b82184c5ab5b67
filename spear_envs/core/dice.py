"""Random choices that are the same on every machine and Python."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Choices from a key of strings and numbers.

    Only calls ``Random.random``, the one method whose numbers Python promises to keep.
    """

    def __init__(self, *key: str | int) -> None:
        digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
        self._random = Random(int.from_bytes(digest[:8], "big")).random

    def chance(self, share: float) -> bool:
        """Return True with this probability."""
        return self._random() < share

    def below(self, stop: int) -> int:
        """Draw a whole number in [0, stop)."""
        return int(self._random() * stop)

    def between(self, low: int, high: int) -> int:
        """Draw a whole number in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence[T]) -> T:
        """Draw one of the items."""
        return items[int(self._random() * len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Draw ``count`` items without replacement, in random order; all if there are fewer."""
        pool = list(items)
        count = min(count, len(pool))
        for i in range(count):
            j = i + int(self._random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]
