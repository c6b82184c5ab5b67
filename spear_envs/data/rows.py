"""Data sets by name or file, and reading the rows of a file: JSON lines, packed or not, and parquet."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from spear_envs.core.errors import SpearError, first_line, suggest_name
from spear_envs.data.files import open_regular

Parsed = TypeVar("Parsed")

_ROWS = 1_024
_OPENERS: dict[str, Callable[..., IO[str]]] = {".jsonl": open, ".xz": lzma.open, ".gz": gzip.open}


class MalformedRowError(Exception):
    """A row is malformed; the message is a clause."""


def write_number(value: Any) -> Any:
    """Write a number as the text that stands for it in an answer, ``42`` for 42.0; return anything else unchanged."""
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def parse_rows(
    path: Path, extra: str, parse: Callable[[Mapping[str, Any], int], Parsed], *, noun: str, example: str
) -> Iterator[Parsed]:
    """Parse the rows of a file in order.

    Args:
        path: a ``.jsonl`` (also packed as ``.jsonl.xz`` or ``.jsonl.gz``) or ``.parquet`` file.
        extra: of this package, which installs what parquet files need.
        parse: called with each row and its number, from 1; may raise :class:`MalformedRowError`.
        noun: what a row is, such as ``problem``.

    Raises:
        SpearError: the file cannot be read or has no rows, or a line of it is not JSON, or a row cannot be parsed; the
            message names the line or the row.
    """
    rows = _read_parquet(path, extra) if path.suffix == ".parquet" else _read_lines(path)
    number = 0
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, Mapping):
                raise MalformedRowError("it is not an object")
            yield parse(row, number)
        except MalformedRowError as error:
            said = f"{path}, row {number}: this is not a {noun} ({error}). A row of .jsonl looks like {example}."
            raise SpearError(said) from None
    if number == 0:
        raise SpearError(f"{path} has no {noun}s: fetch or write it again.")


def _read_lines(path: Path) -> Iterator[Any]:
    opener = _OPENERS.get(path.suffix)
    if opener is None:
        raise SpearError(f"{path} cannot be read: give a .jsonl (also .jsonl.xz, .jsonl.gz) or .parquet file.")
    number = 1
    try:
        open_regular(path).close()
        with opener(path, "rt", encoding="utf-8-sig") as file:  # Windows programs write a byte order mark
            for line in file:
                if line.strip():
                    yield json.loads(line)
                number += 1
    except (ValueError, RecursionError) as error:
        reason = first_line(error)
        raise SpearError(f"{path}, line {number} cannot be read ({reason}): fetch or write it again.") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpearError(f"{path} cannot be read ({reason}): check the path, or fetch it again.") from error


def _read_parquet(path: Path, extra: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise SpearError(f"parquet files need a package ({error}): pip install 'spear-envs[{extra}]'.") from error
    try:
        open_regular(path).close()
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also text that is not UTF-8
        reason = first_line(error)
        raise SpearError(f"{path} cannot be read ({reason}): check the path, or fetch it again.") from error


ALL = "all"
"""The only split of a user's file."""

FileState: TypeAlias = "tuple[tuple[str, tuple[int, int] | None], ...]"
"""Paths with size and modification time, as a cache key."""


def list_splits(
    dataset: str, embedded: Mapping[str, Iterable[str]], published: Mapping[str, Iterable[str]]
) -> tuple[str, ...]:
    """Name the splits of a data set, in the order of ``SpearEnv.splits``.

    Args:
        dataset: a name, or the path of a file that :func:`parse_rows` reads.
        embedded: splits of the embedded data sets, by name.

    Raises:
        SpearError: the data set is unknown.
    """
    if dataset in embedded:
        return tuple(embedded[dataset])
    if is_rows_file(dataset):
        return (ALL,)
    if dataset not in published:
        known = [*embedded, *published]
        raise SpearError(
            f"dataset={dataset!r} is not valid: choose one of {', '.join(known)}, or give the path of a .jsonl or"
            f" .parquet file.{suggest_name(dataset, known)}"
        )
    return tuple(published[dataset])


def is_rows_file(dataset: str) -> bool:
    """Return whether this is a file rather than the name of a data set."""
    return dataset.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet"))


def look_at(paths: Iterable[Path]) -> FileState:
    """Return what changes when a file is written or replaced."""
    found = ((path, path.stat() if path.exists() else None) for path in paths)
    return tuple((str(path), stat and (stat.st_size, stat.st_mtime_ns)) for path, stat in found)
