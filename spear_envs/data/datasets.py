"""Data sets by the names that a user gives them: embedded ones, published ones, and files of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from spear_envs.core.errors import SpearError, suggest_name

ALL = "all"
"""The one split of a file of one's own."""

FileState: TypeAlias = "tuple[tuple[str, tuple[int, int] | None], ...]"
"""Paths with size and time of change: what was opened is kept for as long as they stay the same."""


def list_splits(
    dataset: str, embedded: Mapping[str, Iterable[str]], published: Mapping[str, Iterable[str]]
) -> tuple[str, ...]:
    """Names of the splits of a data set, in the order of ``SpearEnv.splits``.

    Args:
        dataset: a name, or the path of a file that :func:`spear_envs.data.rows.parse_rows` reads.
        embedded: splits of the embedded data sets, by name.
        published: likewise of the published ones.

    Raises:
        SpearError: there is no such data set.
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
    """Whether this names a file rather than a data set."""
    return dataset.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet"))


def look_at(paths: Iterable[Path]) -> FileState:
    """What changes when a file is written to, or another one lies in its place."""
    found = ((path, path.stat() if path.exists() else None) for path in paths)
    return tuple((str(path), stat and (stat.st_size, stat.st_mtime_ns)) for path, stat in found)
