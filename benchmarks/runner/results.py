"""Results of benchmarks: one file each in a folder, all in one, and the verdict of every bar."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.runner.figures import Bar, Figure, Size, Status, find_pace
from benchmarks.runner.registry import Benchmark
from spear_envs.core.errors import SpearError
from spear_envs.data.files import write_json

__all__ = ["SUMMARY", "Judgement", "Result", "Verdict", "judge", "read_results", "read_summary", "write_summary"]
__all__ += ["read_result"]

SUMMARY = "bench.json"


class Verdict(str, Enum):
    """Verdict on a bar."""

    HELD = "held"
    """Measured, and it holds."""
    NOT_HELD = "NOT HELD"
    """Measured, and it does not."""
    NOT_MEASURED = "not measured"
    """There is no figure: see the reason."""


@dataclass(frozen=True)
class Result:
    """One run of one benchmark, finished or not."""

    benchmark: str
    size: Size
    status: Status
    reason: str
    date: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    load: tuple[float, ...]
    """Load averages at its start and end."""
    calibration: tuple[float, ...]
    """CPU seconds of the fixed piece of work, at its start and end."""
    seconds: float
    cpu_seconds: float
    figures: tuple[Figure, ...]

    @property
    def pace(self) -> float:
        """Pace of the core (:func:`~benchmarks.runner.figures.find_pace`)."""
        return find_pace(self.calibration)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Result:
        """Read a result from plain values."""
        return cls(
            **{
                **data,
                "size": Size(data["size"]),
                "status": Status(data["status"]),
                "load": tuple(data["load"]),
                "calibration": tuple(data["calibration"]),
                "figures": tuple(Figure(**row) for row in data["figures"]),
            }
        )

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **vars(self),
            "size": self.size.value,
            "status": self.status.value,
            "figures": [vars(figure) for figure in self.figures],
        }


@dataclass(frozen=True)
class Judgement:
    """A bar and what came of it."""

    benchmark: str
    bar: Bar
    verdict: Verdict
    value: float | None
    reason: str = ""
    """Why nothing was measured."""


def read_result(path: Path) -> Result | None:
    """The result in a file; None if there is none.

    Raises:
        SpearError: the file is not one of ours.
    """
    if not path.is_file():
        return None
    try:
        return Result.read(json.loads(path.read_text("utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise SpearError(f"{path} is not a result of spear bench ({error}): remove it.") from error


def read_results(out: Path, known: Sequence[Benchmark]) -> dict[str, Result]:
    """Return the results in the folder of a run, by name."""
    found = {benchmark.name: read_result(out / f"{benchmark.name}.json") for benchmark in known}
    return {name: result for name, result in found.items() if result is not None}


def judge(benchmark: Benchmark, result: Result | None) -> Iterator[Judgement]:
    """The verdict of each bar of a benchmark."""
    values = {figure.name: figure.value for figure in result.figures if not figure.of} if result else {}
    for bar in benchmark.bars:
        value = values.get(bar.name)
        if value is not None and result is not None and bar.applies_to(result.size):
            verdict = Verdict.HELD if bar.holds(value, result.pace) else Verdict.NOT_HELD
            yield Judgement(benchmark.name, bar, verdict, value)
        else:
            yield Judgement(benchmark.name, bar, Verdict.NOT_MEASURED, None, _explain(bar, result))


def _explain(bar: Bar, result: Result | None) -> str:
    if result is None:
        return "not run"
    if result.status is Status.LEFT_OUT:
        return result.reason
    if not bar.applies_to(result.size):
        return f"needs --{bar.size}" if bar.size != Size.STANDARD.value else "needs a run without --quick"
    if result.status is Status.RUNNING:
        return result.reason or "the benchmark did not end"
    return "what it needs is not here: see the log"


def write_summary(path: Path, known: Sequence[Benchmark], results: Mapping[str, Result]) -> None:
    """All results and verdicts as one JSON file."""
    verdicts = [
        {
            "benchmark": one.benchmark,
            "figure": one.bar.name,
            "bar": str(one.bar),
            "value": one.value,
            "verdict": one.verdict.value,
            "reason": one.reason,
        }
        for benchmark in known
        for one in judge(benchmark, results.get(benchmark.name))
    ]
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "bars": verdicts,
        "results": {name: result.describe() for name, result in results.items()},
    }
    write_json(path, content)


def read_summary(path: Path) -> dict[str, Result]:
    """The results in a file of :func:`write_summary`, or in the folder that holds it.

    Raises:
        SpearError: there is no such file, or it is not one of ours.
    """
    path = path / SUMMARY if path.is_dir() else path
    try:
        rows = json.loads(path.read_text("utf-8"))["results"]
        return {name: Result.read(row) for name, row in rows.items()}
    except FileNotFoundError:
        raise SpearError(f"There is no {path}: spear bench run writes one.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpearError(f"{path} is not a result of spear bench ({error}).") from error
