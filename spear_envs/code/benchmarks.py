"""The published problems for training and evaluation, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from spear_envs.code.problem_files import Distinct, keep_distinct, read_problems
from spear_envs.code.tasks import Problem, ProblemTaskSet
from spear_envs.core.errors import SpearError
from spear_envs.data import data_folder


@dataclass(frozen=True)
class Benchmark:
    """A data set on Hugging Face."""

    name: str
    repository: str
    pattern: str
    """Regular expression of its files in the repository."""
    split: str
    """Its one split."""
    count: int | None
    """Number of problems; None if no exact number is published."""
    summary: str

    @property
    def folder(self) -> Path:
        """Folder of its fetched files."""
        return data_folder() / "code" / self.name


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        item.name: item
        for item in (
            Benchmark(
                "dapo-math-17k",
                "BytedTsinghua-SIA/DAPO-Math-17k",
                r".*\.parquet",
                "train",
                None,
                "about 17,400 problems with integer answers, each about 100 times in the file",
            ),
            Benchmark("aime-2024", "Maxwell-Jia/AIME_2024", r".*\.(?:parquet|jsonl)", "test", 30, "30 problems"),
            Benchmark("aime-2025", "yentinglin/aime_2025", r".*\.(?:parquet|jsonl)", "test", 30, "30 problems"),
        )
    }
)
"""By name."""


PUBLISHED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **{item.name: {item.split: item.name} for item in BENCHMARKS.values()},
        # The paper's training and evaluation data as splits of one data set.
        "dapo-aime": {"train": "dapo-math-17k", "valid": "aime-2024", "test": "aime-2025"},
    }
)
"""The benchmark behind each split of a data set, by its name."""


def list_files(item: Benchmark) -> list[Path]:
    """List the fetched files of a benchmark, preferring parquet to ``.jsonl``."""
    paths = sorted(path for path in item.folder.rglob("*") if path.suffix in (".parquet", ".jsonl"))
    tables = [path for path in paths if path.suffix == ".parquet"]
    return tables or paths


def read_benchmark(item: Benchmark) -> Distinct:
    """Read its problems, each once.

    Raises:
        SpearError: its files are missing or cannot be read.
    """
    paths = list_files(item) if item.folder.is_dir() else []
    if not paths:
        raise SpearError(f"{item.folder} has no problems: 'spear data get code {item.name}' fetches them.")
    return keep_distinct(raw for path in paths for raw in read_problems(path))


def open_benchmark(dataset: str, split: str) -> ProblemTaskSet:
    """Open the problems of a benchmark or a file, each once.

    Args:
        dataset: one of :data:`PUBLISHED`, or the path of a file.

    Raises:
        SpearError: a file is missing or cannot be read.
    """
    if dataset in PUBLISHED:
        name, subtask = dataset, PUBLISHED[dataset][split]
        found = read_benchmark(BENCHMARKS[subtask])
    else:
        name = subtask = Path(dataset).name.partition(".")[0]
        found = keep_distinct(read_problems(Path(dataset)))
    if not found.problems:
        raise SpearError(f"dataset={dataset!r} has no problem with a single answer: look at its rows.")
    return ProblemTaskSet(name, split, [Problem(raw.text, raw.answer, subtask) for raw in found.problems])
