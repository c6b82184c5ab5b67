"""The configuration groups of a training and their choices: ``spear train GROUP=CHOICE``."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from spear_envs.core.errors import SpearError
from spear_envs.data.files import read_yaml_text

GROUPS = ("preset", "algorithm", "model", "cluster", "environment")
CONFIG = Path(__file__).parent / "config"
"""Folder of the configuration: a folder for each group, with a file for each choice."""
OFFICIAL = "official"
"""Folder of presets as the authors' published code has them."""
CONFIG_DIR = "SPEAR_CONFIG_DIR"
"""Variable with a folder like :data:`CONFIG` of a user's own choices."""
ORDER = ("grpo", "rloo", "ppo", "gigpo", "gigpo_nostd", "drbot", "drbot_gigpo")
"""First in a list of algorithms: the base algorithms in the order of the paper's table (``tab:ALFWorldwebshop``)."""
HEADER = "# @package _global_"
_LABELS = re.compile(r" \((?:tab|ablation):\w+\)")
"""Places in the paper's source, for readers of the file."""


def find_user_folder(config_dir: Path | None = None) -> list[Path]:
    """Folder with a user's own choices, given or from the environment, if any. Raises SpearError if it is missing."""
    named = config_dir or os.environ.get(CONFIG_DIR)
    if not named:
        return []
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise SpearError(f"the folder of configurations {folder} (--config-dir or {CONFIG_DIR}) does not exist")
    return [folder]


def search_configs(*folders: Path) -> str:
    """Hydra's override that adds verl's configuration, and ``folders``, to where it looks.

    Hydra's own ``pkg://`` would import verl, which takes three seconds. Raises SpearError if verl is not installed.
    """
    verl = find_spec("verl")
    if verl is None or verl.origin is None:
        raise SpearError("verl is not installed: pip install spear-training")
    places = (Path(verl.origin).parent / "trainer" / "config", *folders)
    return f"hydra.searchpath=[{','.join(quote_value(f'file://{folder.resolve()}') for folder in places)}]"


def quote_value(text: str) -> str:
    """Quote ``text``, such as a path, as the value of an override."""
    return "'" + text.replace("'", "\\'") + "'"


def find_files(group: str, config_dir: Path | None = None) -> dict[str, Path]:
    """Files of the choices of one of :data:`GROUPS`, sorted by name: ours, and those in ``config_dir/GROUP``.

    Raises SpearError if that folder does not exist, or a file in it has the name of one of ours.
    """
    ours = {path.stem: path for path in (CONFIG / group).glob("*.yaml")}
    theirs = {path.stem: path for folder in find_user_folder(config_dir) for path in (folder / group).glob("*.yaml")}
    for name in ours.keys() & theirs.keys():
        raise SpearError(f"{theirs[name]} has the name of an existing choice: rename it")
    return dict(sorted((ours | theirs).items()))


def list_choices(group: str, config_dir: Path | None = None) -> dict[str, str]:
    """Choices of one of :data:`GROUPS` with the comments of their files, sorted by name."""
    return {
        name: _LABELS.sub("", " ".join(read_comment(file)).partition(". ")[0].rstrip(".:"))
        for name, file in find_files(group, config_dir).items()
    }


def read_comment(file: Path) -> list[str]:
    """Lines of the comment at the start of a file, up to an empty one. Raises SpearError if it is not text."""
    lines = []
    for line in _read_text(file).splitlines():
        if not line.startswith("#") or line.strip() == "#":
            break
        if not line.startswith(HEADER):
            lines.append(line.lstrip("# "))
    return lines


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


def check_choice(group: str, choice: str, config_dir: Path | None = None) -> None:
    """Raise SpearError, with the valid choices, unless ``group`` offers ``choice`` and Hydra can read its file."""
    known = find_files(group, config_dir)
    if choice in known:
        file = known[choice]
        if file.parent != CONFIG / group and read_config(file) and not _read_text(file).startswith(HEADER):
            raise SpearError(f"{file} must start with the line {HEADER!r}, so that its keys are global")
    elif choice != "null" and not (group == "preset" and choice in list_official()):
        near = difflib.get_close_matches(choice.rpartition("/")[2], known, 1)
        hint = f"did you mean {near[0]}? There are" if near else "choose"
        raise SpearError(f"there is no {group} {choice!r}; {hint} {', '.join(known)}")


def list_official() -> list[str]:
    """Presets as the authors' published code has them."""
    return sorted(f"{OFFICIAL}/{path.stem}" for path in (CONFIG / "preset" / OFFICIAL).glob("*.yaml"))


def read_config(file: Path) -> dict[str, Any]:
    """Read a file without its bases. Raises SpearError if it is not a mapping in YAML."""
    try:
        content = yaml.safe_load(read_yaml_text(file))
    except (OSError, UnicodeError) as error:
        raise SpearError(f"{file} cannot be read: {error}") from None
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
