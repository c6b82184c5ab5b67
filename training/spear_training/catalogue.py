"""The algorithms of ``spear train``: a YAML file each in ``config/algorithm``, and a user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spear_training.choices import find_files, read_comment

ORDER = ("grpo", "rloo", "ppo", "gigpo", "gigpo_nostd", "drbot", "drbot_gigpo")
"""First in a list: base algorithms in the order of the paper's table (``tab:ALFWorldwebshop``)."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: its name on the command line, its name in the paper, and its meaning."""

    name: str
    title: str
    meaning: str


def list_algorithms(config_dir: Path | None = None) -> list[Algorithm]:
    """List the algorithms: the paper's, each base one followed by its extensions, then others by name.

    A file starts with the comment ``TITLE: MEANING``; without it the name is the title.
    """
    files, found = find_files("algorithm", config_dir), []
    for name in sorted(files, key=_rank):
        title, _, meaning = next(iter(read_comment(files[name])), name).partition(": ")
        found.append(Algorithm(name, title, meaning))
    return found


def _rank(name: str) -> tuple[int, str]:
    bases = [base for base in ORDER if f"{name}_".startswith(f"{base}_")]
    return (ORDER.index(max(bases, key=len)) if bases else len(ORDER), name)
