"""Digests of what a training reads besides its settings; they stand in its checkpoints, so that it resumes the same."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml

from spear_agents.models import digest_model
from spear_envs.core.errors import SpearError
from spear_envs.data.files import YAML_MISREAD, digest_file, read_yaml_text
from spear_training.run.checkpoints import HASHED_BYTES, OVERRIDE, ROOMS
from spear_training.run.config import RunConfig
from spear_training.run.environments import EnvironmentFacts

TASKS_FILE = "tasks.json"
"""File of a run with its :func:`describe_inputs`."""
_EDGE = 2**20
_CODE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w/.-]*")
"""``module:function``."""


def describe_inputs(config: RunConfig, played: EnvironmentFacts, *, changeable: Sequence[str]) -> dict[str, Any]:
    """Return fingerprints of the tasks, ids of a validation on some, and digests of the model and of the files that it
    names.

    Files of files of YAML and own modules that own modules import count too; keys in ``changeable`` do not.
    """
    model = Path(str(config.model.path))
    if config.env.kwargs.get("server") is not None:  # whose calls the run itself records
        changeable = (*changeable, "env.kwargs.recording")
    # ``module:name`` is looked up by its name; the module itself is among the texts of the configuration.
    spec = gym.registry.get(played.id.rpartition(":")[2])
    entry = None if spec is None else spec.entry_point
    texts = [text for key, text in _list_texts(config.to_mapping())
             if not any(f"{key}.".startswith(f"{name}.") for name in changeable)]  # fmt: skip
    files: dict[str, str | None] = {str(model): None}  # may be made by the run
    for text in [*texts, entry if isinstance(entry, str) else ""]:
        _add_files(text, files)
    return {
        "environment": played.id,
        "train": asdict(played.train),
        "valid": asdict(played.valid),
        "validated": None if played.validated is None else list(played.validated),
        "model": digest_model(model) if (model / "config.json").is_file() else None,
        "files": {place: files[place] for place in sorted(files) if files[place] is not None},
    }


def compare_inputs(out: Path, before: Any, now: Mapping[str, Any]) -> None:
    """Raise SpearError if what the run in ``out`` reads is not what its checkpoint was trained with."""
    try:
        name = before["environment"]
        pairs = [(f"the tasks of {name} ({split})", before[split], now[split]) for split in ("train", "valid")]
        if before["model"] and now["model"]:
            pairs.append(("the model's folder", before["model"], now["model"]))
        pairs += [(place, old, now["files"].get(place)) for place, old in before["files"].items()]
    except (LookupError, TypeError, AttributeError) as error:
        raise SpearError(f"a checkpoint in {out} does not say what it was trained with: name another --out") from error
    for name, old, new in pairs:
        if old != new:
            raise SpearError(
                f"{name} changed since {out} began: restore the old to resume, name another --out for a new run, or add"
                f" {OVERRIDE} to continue with the new"
            )


def _list_texts(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Return the texts in nested plain data, by dotted key."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        if isinstance(value, str):
            yield f"{prefix}{name}", value
        else:
            yield from _list_texts(value, f"{prefix}{name}.")


def _add_files(text: str, files: dict[str, str | None], folder: str = "") -> None:
    """Add the files that a text names: by a path, ``FILE:FUNCTION``, ``FILE#NAME``, ``MODULE:NAME`` or a command."""
    if found := _CODE.fullmatch(text):
        for path in _find_modules(found[1].split("."), ""):
            _add_file(path, files)
    for word in {text, text.rpartition(":")[0], text.rpartition("#")[0], *text.split()}:
        place = os.path.join(folder, os.path.expanduser(word))
        if "/" in word or Path(word).suffix:  # a single word may be the name of a file by chance
            _add_file(place, files)


def _add_file(place: str, files: dict[str, str | None]) -> None:
    """Add a file, or a folder of a model or of data with a manifest, and what it names in its turn."""
    if place in files:
        return
    if os.path.isdir(place):
        if os.path.isfile(os.path.join(place, "config.json")):
            files[place] = digest_model(place)
            return
        place = os.path.join(place, "manifest.json")
    if not os.path.isfile(place) or place in files:
        return
    try:
        files[place] = _digest(place)
        if place.endswith((".yaml", ".yml")):
            for _, text in _list_texts([yaml.safe_load(read_yaml_text(place))]):
                _add_files(text, files)
                _add_files(text, files, os.path.dirname(place))
        elif place.endswith(".py"):
            for imported in _list_imports(place):
                _add_file(imported, files)
    except (OSError, SyntaxError, yaml.YAMLError, *YAML_MISREAD):
        return  # who reads the file says what is wrong with it


def _digest(place: str) -> str:
    size = os.path.getsize(place)
    if size <= HASHED_BYTES:
        return digest_file(Path(place))
    with open(place, "rb") as file:
        digest = hashlib.sha256(f"{size} ".encode() + file.read(_EDGE))
        file.seek(size - _EDGE)
        digest.update(file.read())
    return digest.hexdigest()


def _list_imports(place: str) -> Iterator[str]:
    """Return the files of the user's own modules that the file of a module imports anywhere in it."""
    folder = os.path.dirname(place)
    for node in ast.walk(ast.parse(Path(place).read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _find_modules(alias.name.split("."), folder)
        elif isinstance(node, ast.ImportFrom):
            start = os.path.join(folder, *[".."] * (node.level - 1))
            for alias in node.names:  # which may be a module
                names = [*(node.module or "").split("."), alias.name]
                yield from _find_modules([name for name in names if name], start, anywhere=not node.level)


def _find_modules(names: Sequence[str], folder: str, *, anywhere: bool = True) -> Iterator[str]:
    """Return the files of a module ``names`` and its packages, in ``folder`` or where Python looks for them."""
    folders = [folder]
    if anywhere:
        if names[0] in sys.stdlib_module_names or names[0] in ROOMS:
            return
        folders = list(dict.fromkeys([folder, os.getcwd(), *_find_folder(names[0])]))
    for start in folders:
        for count in range(1, len(names) + 1):
            base = os.path.join(start, *names[:count])
            for path in (f"{base}.py", os.path.join(base, "__init__.py")):
                if os.path.isfile(path):
                    yield os.path.realpath(path)


@lru_cache
def _find_folder(name: str) -> tuple[str, ...]:
    """Return the folders that hold a package or module of the user's; none for an installed one, which its version
    describes.
    """
    with suppress(ImportError, ValueError, AttributeError):
        spec = find_spec(name)
        if spec is not None:
            places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
            return tuple(os.path.dirname(place) for place in places if not re.search("(site|dist)-packages", place))
    return ()
