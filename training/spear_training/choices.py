"""The groups that a training is put together from, and what each offers: ``spear train GROUP=CHOICE``."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import yaml

from spear_envs.core.errors import SpearError

GROUPS = ("preset", "algorithm", "model", "cluster", "environment")
CONFIG = Path(__file__).parent / "config"
"""Folder of the configuration: a folder for each group, and in it a file for each choice."""
OFFICIAL = "official"
"""Folder of presets as the authors' published code has them."""
CONFIG_DIR = "SPEAR_CONFIG_DIR"
"""Variable that names a folder like :data:`CONFIG` with a user's own choices."""
HEADER = "# @package _global_"
_LABELS = re.compile(r" \((?:tab|ablation):\w+\)")
"""Where in the paper's source a figure stands, which is for readers of the file."""


def find_user_folder(config_dir: Path | None = None) -> list[Path]:
    """The folder with a user's own choices, given or named by the environment, if there is one.

    Raises:
        SpearError: there is no such folder.
    """
    named = config_dir or os.environ.get(CONFIG_DIR)
    if not named:
        return []
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise SpearError(f"there is no folder {folder} of configurations: --config-dir or {CONFIG_DIR} names it")
    return [folder]


def find_files(group: str, config_dir: Path | None = None) -> dict[str, Path]:
    """Files of the choices of one of :data:`GROUPS`, sorted by name: ours, and those in ``config_dir/GROUP``.

    Args:
        config_dir: None for the folder that ``SPEAR_CONFIG_DIR`` names, if it does.

    Raises:
        SpearError: there is no such folder, or a file in it has the name of one of ours.
    """
    ours = {path.stem: path for path in (CONFIG / group).glob("*.yaml")}
    theirs = {path.stem: path for folder in find_user_folder(config_dir) for path in (folder / group).glob("*.yaml")}
    for name in ours.keys() & theirs.keys():
        raise SpearError(f"{theirs[name]} has the name of a choice that is there already: rename it")
    return dict(sorted((ours | theirs).items()))


def list_choices(group: str, config_dir: Path | None = None) -> dict[str, str]:
    """Choices of one of :data:`GROUPS` with what their files say of them, sorted by name."""
    found = find_files(group, config_dir)
    return {
        name: _LABELS.sub("", " ".join(read_comment(file)).partition(". ")[0].rstrip(".:"))
        for name, file in found.items()
    }


def read_comment(file: Path) -> list[str]:
    """Lines of the comment a file begins with, up to an empty one.

    Raises:
        SpearError: the file is not text.
    """
    lines = []
    for line in _read_text(file).splitlines():
        if not line.startswith("#") or line.strip() == "#":
            break
        if not line.startswith(HEADER):
            lines.append(line.lstrip("# "))
    return lines


def check_choice(group: str, choice: str, config_dir: Path | None = None) -> None:
    """Do nothing if ``group`` offers ``choice``.

    Raises:
        SpearError: it does not; the message names the nearest one and all there are. Or the file is a user's, and
            Hydra could not read it.
    """
    known = find_files(group, config_dir)
    if choice in known:
        file = known[choice]
        if file.parent != CONFIG / group and read_config(file) and not _read_text(file).startswith(HEADER):
            raise SpearError(f"{file} must begin with the line {HEADER!r}, so that its keys are those of the whole")
    elif choice != "null" and not (group == "preset" and choice in list_official()):
        near = difflib.get_close_matches(choice.rpartition("/")[2], known, 1)
        hint = f"did you mean {near[0]}? There are" if near else "choose"
        raise SpearError(f"there is no {group} {choice!r}; {hint} {', '.join(known)}")


def list_official() -> list[str]:
    """Presets as the authors' published code has them."""
    return sorted(f"{OFFICIAL}/{path.stem}" for path in (CONFIG / "preset" / OFFICIAL).glob("*.yaml"))


def read_config(file: Path) -> dict[str, Any]:
    """A file as it stands, without what it is based on.

    Raises:
        SpearError: it is not YAML or no mapping.
    """
    try:
        content = yaml.safe_load(_read_text(file))
    except yaml.YAMLError as error:
        raise SpearError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SpearError(f"{file} is not a mapping of settings")
    return content


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise SpearError(f"{file} cannot be read: {error}") from None
