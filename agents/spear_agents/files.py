"""Atomic writes of files, and digests of model folders."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.data.files import put_file

_MIB = 2**20
_MODEL_FILES = (".safetensors", ".bin", ".jinja", ".txt")
_MODEL_JSON = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, as :func:`write_text` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it. Raises SpearError if the folder cannot be written."""
    with draft_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def require_replaceable(path: Path) -> None:
    """Raise SpearError for a folder, a device or a pipe: a rename would make ``/dev/null`` an ordinary file."""
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a folder: name a file in it" if os.path.isdir(path) else "a device or a pipe: name a file"
        raise SpearError(f"{path} is {kind}")


@contextlib.contextmanager
def draft_file(path: Path) -> Iterator[Path]:
    """Temporary file next to ``path``, which it replaces unless the block fails. Raises SpearError if unwritable.

    A link stays one: what it leads to is replaced.
    """
    require_replaceable(path)
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        put_file(draft, target)
    except OSError as error:
        raise explain_unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def explain_unwritable(path: Path, error: OSError) -> SpearError:
    """The error for a file that cannot be written."""
    if error.errno == errno.EISDIR:
        return SpearError(f"{path} is a folder: name a file in it")
    return SpearError(f"{path} cannot be written ({error.strerror}): choose another folder or free the disk")


def require_model_file(folder: str | Path, name: str) -> Path:
    """A file of a model's folder. Raises SpearError if there is none."""
    path = Path(folder) / name
    if not path.is_file():
        is_folder = Path(folder).is_dir()
        found = f"does not contain {name}" if is_folder else "is a file" if path.parent.exists() else "does not exist"
        raise SpearError(
            f"{folder} {found}: give a Hugging Face folder, as `spear models get` and `spear warmstart` write; "
            "--engine openai with --base-url asks a server"
        )
    return path


def digest_model(folder: str | Path) -> str:
    """SHA-256 over name, size, first and last MiB of a model's files: changes when weights are retrained in place."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in _MODEL_FILES and path.name not in _MODEL_JSON:
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_MIB))
            file.seek(max(_MIB, size - _MIB))
            digest.update(file.read())
    return digest.hexdigest()


def has_words(model: str | Path) -> bool:
    """Whether a folder's tokenizer is on the word level, as those of `spear warmstart` are."""
    try:
        inner = json.loads((Path(model) / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        return inner["type"] == "WordLevel" or inner.get("merges") == []
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return False
