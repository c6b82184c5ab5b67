"""Problems as tasks: ids, splits, fingerprints, and the published problems and their files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import NumberedTaskSet, Task, check_split
from spear_envs.data import data_folder
from spear_envs.data.embedded import read_embedded
from spear_envs.data.rows import (
    FileState,
    MalformedRowError,
    is_rows_file,
    list_splits,
    look_at,
    parse_rows,
    write_number,
)

SPLITS = ("train", "valid", "test")
"""Splits of the embedded problems."""
MINI = "mini"
"""The default problem set."""
EMBEDDED = ("mini", "mini-disjoint", "mini-small")
"""Embedded problem sets: ``mini``; ``mini-disjoint``, whose splits share no family and so no wording; and
``mini-small`` for tiny word-level policies."""


@dataclass(frozen=True)
class Problem:
    """A problem with its answer."""

    text: str
    answer: str
    subtask: str
    """Family of embedded problems, else the benchmark; for reports of success."""
    level: int | None = None
    """1 to 3 of embedded problems."""
    code: str | None = None
    """Program that prints the answer, of embedded problems."""

    def to_content(self) -> dict[str, Any]:
        """Return the definition as JSON values."""
        content: dict[str, Any] = {"problem": self.text, "answer": self.answer}
        if self.level is not None:
            content["level"] = self.level
        if self.code is not None:
            content["code"] = self.code
        return content


@lru_cache(maxsize=4)
def open_problems(dataset: str) -> Mapping[str, Sequence[Problem]]:
    """Read the problems of an embedded set by split; families and levels take turns."""
    splits = read_embedded("code")[dataset]
    return {split: tuple(Problem(**problem) for problem in splits[split]) for split in SPLITS}


def normalize_text(text: str) -> str:
    """Normalize a problem for comparisons: lower case, runs of blanks as one."""
    return " ".join(text.lower().split())


def _normalize_instruction(task: Task) -> str:
    return normalize_text(task.instruction)


class ProblemTaskSet(NumberedTaskSet):
    """Problems of one split as tasks, made on demand.

    Ids are ``code/<dataset>/<split>/<index within the split>``, five digits or more. Tasks with the same text, without
    case and white space, have the same content.

    Args:
        dataset: the second part of the ids, such as ``mini``.
    """

    bounded = True

    def __init__(self, dataset: str, split: str, problems: Sequence[Problem]) -> None:
        super().__init__(f"code/{dataset}", split, len(problems), digest=_normalize_instruction)
        self.problems = problems

    def _make_task(self, index: int) -> Task:
        problem = self.problems[index]
        return Task(self.id_of(index), self.split, problem.subtask, problem.text, problem.to_content())

    def _definition(self) -> Any:
        return {
            "name": self.name,
            "split": self.split,
            "problems": [{"subtask": problem.subtask, **problem.to_content()} for problem in self.problems],
        }


# Text around each problem of DAPO and of verl's data, which asks for another form of the answer than the graded box.
_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
_TAILS = (
    'Remember to put your answer on its own line after "Answer:".',
    'Let\'s think step by step and output the final answer after "####".',  # verl's GSM8K
)


class RawProblem(NamedTuple):
    """A problem as in its file."""

    text: str
    answer: str


def read_problems(path: Path) -> Iterator[RawProblem]:
    """Read the problems of a file in order, with repetitions.

    Columns are ``problem`` and ``answer`` in either case (AIME), or a ``prompt`` of messages or text with
    ``reward_model.ground_truth`` (DAPO, verl), whose instructions around the problem are removed, since they ask for
    another form of the answer; the bare ``extra_info.question`` is taken where there is one. Of an answer in GSM8K's
    form, what follows ``####`` is taken.

    Raises:
        SpearError: the file cannot be read, or a row is not a problem; the message names the row.
    """
    return parse_rows(path, "sandbox", _read_row, noun="problem", example='{"problem": "…", "answer": "42"}')


def _read_row(row: Mapping[str, Any], number: int) -> RawProblem:
    return RawProblem(_find_text(row), _find_answer(row))


class Distinct(NamedTuple):
    """The problems of a file, each once."""

    problems: tuple[RawProblem, ...]
    rows: int
    """Number of rows in the file."""
    contradicted: int
    """Problems left out because their rows have different answers."""


def keep_distinct(rows: Iterator[RawProblem]) -> Distinct:
    """Keep each problem once, in order of first occurrence; those with several answers are left out.

    Texts are compared without case and white space. The published DAPO-Math-17k has each about 100 times.
    """
    found: dict[str, RawProblem] = {}
    contradicted: set[str] = set()
    count = 0
    for raw in rows:
        count += 1
        key = normalize_text(raw.text)
        if found.setdefault(key, raw).answer != raw.answer:
            contradicted.add(key)
    return Distinct(tuple(raw for key, raw in found.items() if key not in contradicted), count, len(contradicted))


def _find_text(row: Mapping[str, Any]) -> str:
    found = next((row[name] for name in ("problem", "Problem", "question") if row.get(name)), None)
    if found is None:
        extra = row.get("extra_info")
        found = (extra.get("question") if isinstance(extra, Mapping) else None) or row.get("prompt")
        if isinstance(found, Sequence) and not isinstance(found, str):
            found = found[-1].get("content") if found and isinstance(found[-1], Mapping) else None
    if not isinstance(found, str) or not found.strip():
        raise MalformedRowError("it lacks a problem")
    found = found.strip().removeprefix(_DAPO_HEAD)
    for tail in _TAILS:
        found = found.removesuffix(tail)
    return found.strip()


def _find_answer(row: Mapping[str, Any]) -> str:
    found = next((row[name] for name in ("answer", "Answer") if row.get(name) is not None), None)
    if found is None:
        model = row.get("reward_model")
        found = model.get("ground_truth") if isinstance(model, Mapping) else None
    found = write_number(found)
    answer = found.rpartition("####")[2].strip() if isinstance(found, str) else ""
    if not answer:
        raise MalformedRowError("it lacks an answer")
    return answer


@dataclass(frozen=True)
class Publication:
    """A data set on Hugging Face."""

    name: str
    repository: str
    pattern: str
    """Regular expression of its files in the repository."""
    count: int | None
    """Number of problems or solutions; None if no exact number is published."""

    @property
    def folder(self) -> Path:
        """Return the folder of its fetched files."""
        return data_folder() / "code" / self.name


@dataclass(frozen=True)
class Benchmark(Publication):
    """Published problems."""

    split: str
    """Name of its only split."""


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        item.name: item
        for item in (
            # About 17,400 problems, each about 100 times in the file.
            Benchmark("dapo-math-17k", "BytedTsinghua-SIA/DAPO-Math-17k", r".*\.parquet", None, "train"),
            Benchmark("aime-2024", "Maxwell-Jia/AIME_2024", r".*\.(?:parquet|jsonl)", 30, "test"),
            Benchmark("aime-2025", "yentinglin/aime_2025", r".*\.(?:parquet|jsonl)", 30, "test"),
        )
    }
)
"""Benchmarks by name."""

RETOOL_SFT = Publication("retool-sft", "JoeYing/ReTool-SFT", r".*\.parquet", 2_000)
"""Solutions with code and its output, from ReTool (arXiv:2504.11536): what the paper's authors fine-tune on first."""


PUBLISHED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **{item.name: {item.split: item.name} for item in BENCHMARKS.values()},
        # The paper's training and evaluation data as splits of one data set.
        "dapo-aime": {"train": "dapo-math-17k", "valid": "aime-2024", "test": "aime-2025"},
    }
)
"""The benchmark behind each split of a data set, by its name."""


def list_files(item: Publication) -> list[Path]:
    """List the fetched files of a data set, preferring parquet to ``.jsonl``."""
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


def find_splits(dataset: str) -> tuple[str, ...]:
    """Return the names of the splits of a data set, in the order of ``SpearEnv.splits``.

    Raises:
        SpearError: the data set is unknown.
    """
    return list_splits(dataset, dict.fromkeys(EMBEDDED, SPLITS), PUBLISHED)


def open_tasks(dataset: str, split: str | None) -> ProblemTaskSet:
    """Open the problems of a split as tasks.

    Args:
        dataset: a name, or the path of a file of problems, which has the one split ``all``.
        split: its name; by default the first.

    Raises:
        SpearError: the data set or split is unknown, or its file is missing or cannot be read.
    """
    splits = find_splits(dataset)
    chosen = check_split(splits[0] if split is None else split, splits)
    if is_rows_file(dataset):
        dataset = os.path.abspath(dataset)
        files = [Path(dataset)]
    else:
        files = list_files(BENCHMARKS[PUBLISHED[dataset][chosen]]) if dataset in PUBLISHED else []
    return _open_tasks(dataset, chosen, look_at(files))


@lru_cache(maxsize=16)
def _open_tasks(dataset: str, split: str, _state: FileState) -> ProblemTaskSet:
    if dataset in EMBEDDED:
        return ProblemTaskSet(dataset, split, open_problems(dataset)[split])
    return open_benchmark(dataset, split)
