"""The algorithms a training can run: a YAML file each in ``config/algorithm``, and a user's own beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spear_training.choices import find_files, read_comment

ORDER = ("grpo", "rloo", "ppo", "gigpo", "gigpo_nostd", "drbot", "drbot_gigpo")
"""What a list begins with: base algorithms in the order of the paper's table (``tab:ALFWorldwebshop``)."""


@dataclass(frozen=True)
class Algorithm:
    """A row of the paper's tables: its name on the command line, what the paper calls it, and what that means."""

    name: str
    title: str
    meaning: str


def list_algorithms(config_dir: Path | None = None) -> list[Algorithm]:
    """All algorithms: the paper's, each base one followed by what adds to it, then others by name.

    A file's comment says ``TITLE: MEANING``; without one its name is the title.
    """
    files = find_files("algorithm", config_dir)
    return [_read_algorithm(name, files[name]) for name in sorted(files, key=_rank)]


def _rank(name: str) -> tuple[int, str]:
    bases = [base for base in ORDER if f"{name}_".startswith(f"{base}_")]
    return (ORDER.index(max(bases, key=len)) if bases else len(ORDER), name)


def _read_algorithm(name: str, file: Path) -> Algorithm:
    title, _, meaning = next(iter(read_comment(file)), name).partition(": ")
    return Algorithm(name, title, meaning)
