"""Random numbers that are the same on every Python."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Random choices that depend on a text key alone.

    Of ``random.Random`` only ``random()`` is called, whose values for a seed are fixed by Python's documentation;
    ``choice`` and ``shuffle`` have changed between versions.

    Args:
        key: what the choices are for; its parts are joined by slashes.
    """

    def __init__(self, *key: str | int) -> None:
        digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
        self._random = random.Random(int.from_bytes(digest, "big")).random

    def below(self, number: int) -> int:
        """A whole number in [0, ``number``)."""
        return int(self._random() * number)

    def between(self, least: int, most: int) -> int:
        """A whole number in [``least``, ``most``]."""
        return least + int(self._random() * (most - least + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One of ``items``, each equally likely."""
        return items[int(self._random() * len(items))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability
