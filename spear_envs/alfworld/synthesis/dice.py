"""Random numbers of the embedded games."""

from __future__ import annotations

import hashlib
from random import Random

from spear_envs.core import dice


class Dice(dice.Dice):
    """A :class:`spear_envs.core.dice.Dice` with the seeds of the embedded games.

    Args:
        key: what the choices are for; its parts are joined by slashes.
    """

    def __init__(self, *key: str | int) -> None:
        digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
        self._random = Random(int.from_bytes(digest, "big")).random
