"""The interpreter that programs get, and the packages that they may import."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

__all__ = ["PACKAGES", "Installation", "find_installation"]

PACKAGES = ("numpy", "scipy", "sympy", "mpmath")
"""What programs may import beside the standard library, as far as it is installed."""

_SUBMODULES = {"scipy": ("scipy.linalg", "scipy.optimize", "scipy.stats")}


@dataclass(frozen=True)
class Installation:
    """What the sandbox shows of this machine, beside the system's own programs and libraries."""

    interpreter: str
    prefix: str
    """Where the interpreter lies; its ``bin`` and ``lib`` are shown, its installed packages are not."""
    guest: str
    """Folder of ``sandbox.guest``."""
    packages: dict[str, str]
    """Name in ``site-packages`` → path."""
    modules: tuple[str, ...]
    """What a warm interpreter imports before the first run; without their submodules these are ``names``."""
    names: tuple[str, ...]

    def is_needed(self, code: str) -> bool:
        """Whether a program may import one of the packages: their names stand somewhere in the text.

        A program that hides the name imports it all the same, only cold.
        """
        return bool(self.names) and re.search(rf"\b(?:{'|'.join(map(re.escape, self.names))})\b", code) is not None


def find_installation(packages: Sequence[str] = PACKAGES) -> Installation:
    """The interpreter of this process, outside any virtual environment, and those of the packages that it has."""
    paths: dict[str, str] = {}
    names: list[str] = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        names.append(name)
        place = Path(spec.origin)
        if spec.submodule_search_locations:
            place = place.parent
        paths[place.name] = os.path.realpath(place)
        for pattern in (f"{name}.libs", f"{name}-*.dist-info"):
            paths |= {os.path.basename(path): os.path.realpath(path) for path in glob(f"{place.parent}/{pattern}")}
    base = getattr(sys, "_base_executable", None) or sys.executable
    return Installation(
        interpreter=os.path.realpath(base),
        prefix=os.path.realpath(sys.base_prefix),
        guest=str(Path(__file__).resolve().parent / "guest"),
        packages=paths,
        modules=tuple(module for name in names for module in (name, *_SUBMODULES.get(name, ()))),
        names=tuple(names),
    )
