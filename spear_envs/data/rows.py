"""Reading the rows of a data set's file: JSON lines, packed or not, and parquet."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from spear_envs.core.errors import SpearError

__all__ = ["read_rows"]

_ROWS = 1_024
_OPENERS: dict[str, Callable[..., IO[str]]] = {".jsonl": open, ".xz": lzma.open, ".gz": gzip.open}


def read_rows(path: Path, extra: str) -> Iterator[Any]:
    """The rows of a ``.jsonl`` (also packed as ``.jsonl.xz`` or ``.jsonl.gz``) or ``.parquet`` file, in order.

    Args:
        path: the file.
        extra: of this package, which brings what parquet files need.

    Raises:
        SpearError: the file cannot be read; the message names it, and the line of one that is no JSON.
    """
    return _read_parquet(path, extra) if path.suffix == ".parquet" else _read_lines(path)


def _read_lines(path: Path) -> Iterator[Any]:
    opener = _OPENERS.get(path.suffix)
    if opener is None:
        raise SpearError(f"{path} cannot be read: give a .jsonl (also .jsonl.xz, .jsonl.gz) or .parquet file.")
    number = 1
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    yield json.loads(line)
                number += 1
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpearError(f"{path}, line {number} cannot be read ({reason}): fetch or write it again.") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpearError(f"{path} cannot be read ({reason}): check the path, or fetch it again.") from error


def _read_parquet(path: Path, extra: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise SpearError(
            f"parquet files need a package ({error}): pip install 'spear-envs[{extra}]' brings it."
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also text that is not UTF-8
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpearError(f"{path} cannot be read ({reason}): check the path, or fetch it again.") from error
