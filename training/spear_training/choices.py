"""The groups that a training is put together from, and what each offers: ``spear train GROUP=CHOICE``."""

from __future__ import annotations

import difflib
import re
from importlib import resources

from spear_envs.core.errors import SpearError
from spear_training.catalogue import check_algorithm
from spear_training.presets.loader import FLAVOURS, list_presets

GROUPS = ("preset", "algorithm", "model", "cluster", "environment")
"""Folders of ``config``; to ``preset`` the paper's are added, which are tables of :mod:`spear_training.presets`."""
_LABELS = re.compile(r" \((?:tab|ablation):\w+\)")
"""Where in the paper's source a figure stands, which is for readers of the file."""


def list_choices(group: str) -> dict[str, str]:
    """Choices of one of :data:`GROUPS` with what their files say of them, sorted by name."""
    folder = resources.files("spear_training") / "config" / group
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    if group == "preset":
        tables = resources.files("spear_training") / "presets"
        files += [tables / f"{name}.yaml" for name in list_presets()]
    return {
        file.name[:-5]: _read_title(file.read_text(encoding="utf-8")) for file in sorted(files, key=lambda f: f.name)
    }


def _read_title(text: str) -> str:
    """First sentence of the comment a file begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# "))
    return _LABELS.sub("", " ".join(lines).partition(". ")[0].rstrip(".:"))


def check_choice(group: str, choice: str) -> None:
    """Do nothing if ``group`` offers ``choice``.

    Raises:
        SpearError: it does not; the message names the nearest one, or all there are.
    """
    if group == "algorithm":
        check_algorithm(choice)
        return
    known = list(list_choices(group))
    if choice in (*known, "null") or (group == "preset" and choice in list_official()):
        return
    near = difflib.get_close_matches(choice.rpartition("/")[2], known, 1)
    hint = f"did you mean {near[0]}? There are" if near else "choose"
    raise SpearError(f"there is no {group} {choice!r}; {hint} {', '.join(known)}")


def list_official() -> list[str]:
    """Presets as the authors' published code has them."""
    return [f"{FLAVOURS[1]}/{name}" for name in list_presets()]
