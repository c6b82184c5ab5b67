"""The seven benchmarks of the paper and Search-R1's training questions: their files, and panels of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from spear_envs.core.errors import SpearError
from spear_envs.data import data_folder
from spear_envs.search.question_files import RawQuestion, read_questions
from spear_envs.search.tasks import Question, QuestionTaskSet

SEVEN = "seven"
TRAINING = "nq_hotpotqa"
PANEL_SALT = "spear-panel-1"
"""Salt of the hash that draws panels; another salt draws other panels."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as FlashRAG publishes it. The figures are those of Search-R1's evaluation."""

    name: str
    test: str
    """Name of the evaluation file: some benchmarks publish no answers to their test set."""
    count: int
    """Questions in the file."""

    @property
    def path(self) -> str:
        """Return the path of the file below FlashRAG's data sets."""
        return f"{self.name}/{self.test}.jsonl"


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark("nq", "test", 3_610),
    Benchmark("triviaqa", "test", 11_313),
    Benchmark("popqa", "test", 14_267),
    Benchmark("hotpotqa", "dev", 7_405),
    Benchmark("2wikimultihopqa", "dev", 12_576),
    Benchmark("musique", "dev", 2_417),
    Benchmark("bamboogle", "test", 125),
)
"""In the order of the paper's tables."""

DATASETS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{item.name: {"test": (f"flashrag/{item.path}",)} for item in BENCHMARKS},
        SEVEN: {"test": tuple(f"flashrag/{item.path}" for item in BENCHMARKS)},
        TRAINING: {"train": ("search-r1/train.parquet",), "test": ("search-r1/test.parquet",)},
    }
)
"""Files of each split by name, below the folder ``search`` of the data folder."""


def locate_file(path: str) -> Path:
    """Return the path of a file of :data:`DATASETS`: as fetched, or packed by xz or gzip."""
    plain = data_folder() / "search" / path
    packed = (plain.with_name(f"{plain.name}{ending}") for ending in (".xz", ".gz"))
    return next((one for one in (plain, *packed) if one.is_file()), plain)


def open_benchmark(dataset: str, split: str, panel: int | None = None) -> QuestionTaskSet:
    """Open the questions of a benchmark or a file.

    Args:
        dataset: one of :data:`DATASETS`, or the path of a file.
        panel: number of questions per benchmark, see :func:`choose_panel`; None for all.

    Raises:
        SpearError: a file is missing or cannot be read.
    """
    groups: list[Sequence[RawQuestion]] = []
    if dataset in DATASETS:
        for path in DATASETS[dataset][split]:
            found = locate_file(path)
            if not found.is_file():
                what = "train" if dataset == TRAINING else "questions"
                raise SpearError(f"{found} is missing: 'spear data get search {what}' fetches it.")
            # Training files mix benchmarks; their rows name them.
            groups.append(list(read_questions(found, None if dataset == TRAINING else path.split("/")[1])))
        name = dataset
    else:
        groups.append(list(read_questions(Path(dataset))))
        name = Path(dataset).name.partition(".")[0]
    if panel is not None:
        groups = [choose_panel(part, panel) for whole in groups for part in _by_benchmark(whole)]
    questions = [Question(raw.question, raw.golden_answers, raw.benchmark) for group in groups for raw in group]
    return QuestionTaskSet(name, split, questions)


def _by_benchmark(questions: Iterable[RawQuestion]) -> list[list[RawQuestion]]:
    parts: dict[str, list[RawQuestion]] = {}
    for raw in questions:
        parts.setdefault(raw.benchmark, []).append(raw)
    return list(parts.values())


def choose_panel(questions: Sequence[RawQuestion], size: int) -> list[RawQuestion]:
    """Choose ``size`` questions (or all, if there are fewer), always the same, in the order of the file.

    They have the lowest salted hashes of benchmark and text: the order and ids of the file do not matter, and a larger
    panel contains every smaller one.
    """
    keys = [
        hashlib.sha256(f"{PANEL_SALT}\0{raw.benchmark}\0{raw.question}".encode("utf-8", "replace")).digest()
        for raw in questions
    ]
    return [questions[i] for i in sorted(sorted(range(len(keys)), key=keys.__getitem__)[:size])]
