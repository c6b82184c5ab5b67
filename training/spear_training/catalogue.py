"""The algorithms a training can run: a YAML file each in ``config/algorithm``, read here for their titles."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from spear_envs.core.errors import SpearError

FOLDER = Path(__file__).parent / "config" / "algorithm"
ORDER = ("grpo", "rloo", "ppo", "gigpo", "gigpo_nostd", "drbot", "drbot_gigpo")
"""Base algorithms in the order of the paper's table (``tab:ALFWorldwebshop``)."""
ADDITIONS = ("", "_sil", "_spear")
"""What a base algorithm is run with: nothing, self-imitation, self-imitation and the tool-call reward."""


@dataclass(frozen=True)
class Algorithm:
    """A row of the paper's tables: its name on the command line, what the paper calls it, and what that means."""

    name: str
    title: str
    meaning: str


def list_algorithms() -> list[Algorithm]:
    """All algorithms, each base one followed by the same with self-imitation and with the whole of SPEAR."""
    return [_read_algorithm(f"{base}{addition}") for base in ORDER for addition in ADDITIONS]


def check_algorithm(name: str) -> str:
    """Return ``name``.

    Raises:
        SpearError: there is no such algorithm; the nearest one is named.
    """
    names = [f"{base}{addition}" for base in ORDER for addition in ADDITIONS]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "`spear algorithms` lists them"
        raise SpearError(f"there is no algorithm {name!r}; {hint}")
    return name


def _read_algorithm(name: str) -> Algorithm:
    """The second line of a file says ``# TITLE: MEANING``."""
    line = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[1]
    title, _, meaning = line.lstrip("# ").partition(": ")
    return Algorithm(name, title, meaning)
