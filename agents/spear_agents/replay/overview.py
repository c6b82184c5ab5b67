"""The overview of a run: settings and results by source and subtask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from spear_agents.statistics import estimate_mean, plain_estimate, split_numbers

SHOWN_SETTINGS = {"env_id": "environment", "env_kwargs": "keywords"} | {
    key: key for key in ("split", "engine", "model", "method", "temperature", "agent")
}
"""Settings of an evaluation shown in the overview, and their titles there."""


def describe_sources(
    rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One mapping for each source, and each step of a training's source.

    Rows of the list of episodes that do not count are ignored. Each mapping has ``name``, ``source``, ``step``,
    ``settings`` (as text), ``tokens``, ``cost`` (None without cost), and ``parts``: all episodes first, then each
    subtask, with success and its 95 % interval.
    """
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["counts"]:
            groups[row["source"], row["step"]].append(row)
    return [_describe(source, step, found, settings.get(source, {})) for (source, step), found in groups.items()]


def _describe(
    source: str, step: int | None, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    subtasks = sorted({row["subtask"] for row in rows}, key=split_numbers)
    parts = [_describe_part("all", rows)]
    if len(subtasks) > 1:
        parts += [_describe_part(name, [row for row in rows if row["subtask"] == name]) for name in subtasks]
    costs = [row["cost"] for row in rows if row["cost"] is not None]
    return {
        "name": source if step is None else f"{source} of step {step}",
        "source": source,
        "step": step,
        "settings": {
            title: ", ".join(f"{name}={each}" for name, each in value.items())
            if isinstance(value, Mapping)
            else str(value)
            for key, title in SHOWN_SETTINGS.items()
            if (value := settings.get(key))
        },
        "tokens": sum(row["tokens"] for row in rows),
        "cost": sum(costs) if costs else None,
        "parts": parts,
    }


def _describe_part(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    valid = [row for row in rows if row["stop"] != "fault"]
    won: dict[str, list[bool]] = defaultdict(list)
    for row in valid:
        won[row["task"]].append(row["won"])
    return {
        "name": name,
        "episodes": len(valid),
        "faults": len(rows) - len(valid),
        "success": plain_estimate(estimate_mean(list(map(fmean, won.values())))) if won else None,
        "score": _mean(row["score"] for row in valid),
        "turns": _mean(row["turns"] for row in valid),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None
