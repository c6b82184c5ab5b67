"""Data sets by name: embedded ones, published ones, and the user's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from spear_envs.core.errors import SpearError, suggest_name

ALL = "all"
"""The only split of a user's file."""

FileState: TypeAlias = "tuple[tuple[str, tuple[int, int] | None], ...]"
"""Paths with size and modification time, as a cache key."""


def list_splits(
    dataset: str, embedded: Mapping[str, Iterable[str]], published: Mapping[str, Iterable[str]]
) -> tuple[str, ...]:
    """Names of the splits of a data set, in the order of ``SpearEnv.splits``.

    Args:
        dataset: a name, or the path of a file that :func:`spear_envs.data.rows.parse_rows` reads.
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
    """Whether this is a file rather than the name of a data set."""
    return dataset.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet"))


def look_at(paths: Iterable[Path]) -> FileState:
    """Return what changes when a file is written or replaced."""
    found = ((path, path.stat() if path.exists() else None) for path in paths)
    return tuple((str(path), stat and (stat.st_size, stat.st_mtime_ns)) for path, stat in found)
