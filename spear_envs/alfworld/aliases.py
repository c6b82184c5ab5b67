"""Other ways to write commands, from papers and policies trained elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum

from spear_envs.alfworld.wording import Wording


class Aliases(str, Enum):
    """Which other ways to write commands are understood."""

    NONE = "none"
    """None, as in TextWorld, so that numbers compare."""
    PAPER = "paper"
    """Those of the paper's list of actions and of other releases; also capitals and repeated blanks."""


_PUT = re.compile(r" (?:in/on|into|in|on) ")
_MOVE = re.compile(r" to ")


def rewrite_command(command: str, wording: Wording, is_admissible: Callable[[str], bool]) -> str:
    """Rewrite ``command`` to the admissible one that it means; return it unchanged if there is none.

    Understood are ``put O in/on R``, ``put O in R``, ``put O on R``, ``put O into R`` and ``move O to R``, whichever
    the game uses; ``goto R``; ``toggle O``, ``toggle O R`` and ``turn on O`` for ``use O``; capitals and
    repeated blanks. A command is only rewritten into an admissible one.
    """
    if is_admissible(command):
        return command
    plain = " ".join(command.lower().split())
    for candidate in _list_meanings(plain, wording, is_admissible):
        if is_admissible(candidate):
            return candidate
    return command


def _list_meanings(plain: str, wording: Wording, is_admissible: Callable[[str], bool]) -> Iterator[str]:
    yield plain
    verb, _, rest = plain.partition(" ")
    if verb in ("put", "move"):
        begin, middle = wording.put
        for found in (_PUT if verb == "put" else _MOVE).finditer(rest):
            yield f"{begin}{rest[: found.start()]}{middle}{rest[found.end() :]}"
    elif verb == "goto":
        yield f"go to {rest}"
    elif plain.startswith("turn on "):
        yield f"use {plain.removeprefix('turn on ')}"
    elif verb == "toggle":
        yield f"use {rest}"
        words = rest.split(" ")
        for cut in range(1, len(words)):
            # The receptacle must be here, which is when it can be examined.
            if is_admissible(f"examine {' '.join(words[cut:])}"):
                yield f"use {' '.join(words[:cut])}"
