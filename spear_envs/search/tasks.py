"""Questions as tasks: ids, splits, fingerprints, and the published benchmarks and their files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import NumberedTaskSet, Task, TaskSet, check_split
from spear_envs.data import data_folder
from spear_envs.data.rows import (
    FileState,
    MalformedRowError,
    is_rows_file,
    list_splits,
    look_at,
    parse_rows,
    write_number,
)
from spear_envs.search.embedded import SPLITS, open_base
from spear_envs.search.grading import normalize_answer

BOUNDED = 20_000
"""Most questions of a set that is enumerated."""


class Question(NamedTuple):
    """A question with its answers. A tuple, not a dataclass, since there may be hundreds of thousands."""

    question: str
    golden_answers: tuple[str, ...]
    """Right answers, any of which counts."""
    subtask: str
    """The benchmark, or the number of hops: success is reported by it."""
    gold_passages: tuple[str, ...] = ()
    """Ids of the passages that lead to the answer, in order, if known."""
    oracle_queries: tuple[str, ...] = ()
    """A query for each gold passage."""

    def to_content(self) -> dict[str, Any]:
        """Return the definition as JSON values."""
        content: dict[str, Any] = {"question": self.question, "golden_answers": list(self.golden_answers)}
        if self.gold_passages:
            content["gold_passages"] = list(self.gold_passages)
            content["oracle_queries"] = list(self.oracle_queries)
        return content


def _normalize_question(task: Task) -> str:
    return normalize_answer(task.instruction) or task.instruction


class QuestionTaskSet(NumberedTaskSet):
    """Questions of one split as tasks, made on demand.

    Ids are ``search/<dataset>/<split>/<index within the split>``, five digits or more. Tasks have the same content if
    their questions are equal up to case, punctuation and articles.

    Args:
        dataset: the second part of the ids, such as ``mini`` or ``hotpotqa``.
    """

    def __init__(self, dataset: str, split: str, questions: Sequence[Question]) -> None:
        super().__init__(
            f"search/{dataset}",
            split,
            len(questions),
            digest=_normalize_question,
        )
        self.bounded = len(questions) <= BOUNDED
        self.questions = questions

    def _make_task(self, index: int) -> Task:
        asked = self.questions[index]
        return Task(self.id_of(index), self.split, asked.subtask, asked.question, asked.to_content())

    def _definition(self) -> Any:
        return {
            "name": self.name,
            "split": self.split,
            "questions": [{"subtask": asked.subtask, **asked.to_content()} for asked in self.questions],
        }


ANSWER_SPLIT = "<|answer_split|>"
"""Separator of the gold answers in DeepResearcher's files."""
_QUESTION_MARK = "Question:"
"""The question is what follows the last of these in a prompt."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can escape a lone one, but tokenizers refuse it."""


class RawQuestion(NamedTuple):
    """A question of a file."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    benchmark: str


def read_questions(path: Path, benchmark: str | None = None) -> Iterator[RawQuestion]:
    """Yield the questions of a file, in order.

    A ``.jsonl`` file (also packed as ``.xz`` or ``.gz``) has rows ``{"id", "question", "golden_answers"}``, as FlashRAG
    writes them; a ``.parquet`` file has ``reward_model.ground_truth``, which is ``{"target": [...]}`` (Search-R1, verl)
    or one string with the golds joined by ``<|answer_split|>`` (DeepResearcher), and the question in a column, in
    ``extra_info`` or at the end of ``prompt``. Golds are stripped; blank and repeated ones are left out.

    Args:
        benchmark: name of the benchmark; by default from each row, else the file's name.

    Raises:
        SpearError: the file cannot be read, or a row is not a question; the message names the row.
    """

    def parse(row: Mapping[str, Any], number: int) -> RawQuestion:
        golds = _clean(_find_golds(row))
        if not golds:
            raise MalformedRowError("it has no gold answer")
        question = _find_question(row)
        if _SURROGATE.search(" ".join((question, *golds))):
            raise MalformedRowError("it contains a lone surrogate")
        return RawQuestion(
            str(_first_present(row.get("id"), _dig(row, "extra_info", "index"), number)),
            question,
            golds,
            benchmark or _find_benchmark(row) or path.name.partition(".")[0],
        )

    example = '{"id": "1", "question": "…", "golden_answers": ["…"]}'
    return parse_rows(path, "search", parse, noun="question", example=example)


def _dig(row: Any, *keys: str) -> Any:
    """Return the value at a path of keys, or None."""
    for key in keys:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def _first_present(*values: Any) -> Any:
    return next((value for value in values if value not in (None, "")), None)


def _find_golds(row: Mapping[str, Any]) -> Any:
    if row.get("golden_answers") is not None:
        return row["golden_answers"]
    truth = _first_present(_dig(row, "reward_model", "ground_truth"), row.get("ground_truth"))
    return truth.get("target") if isinstance(truth, Mapping) else truth


def _clean(golds: Any) -> tuple[str, ...]:
    if isinstance(golds, str):
        golds = golds.split(ANSWER_SPLIT)
    if golds is None:
        return ()
    golds = write_number(golds)
    if isinstance(golds, str):
        golds = [golds]
    if isinstance(golds, Sequence):
        golds = list(map(write_number, golds))
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise MalformedRowError("its gold answers are not a list of strings or numbers")
    return tuple(dict.fromkeys(gold.strip() for gold in golds if gold.strip()))


def _find_question(row: Mapping[str, Any]) -> str:
    found = _first_present(row.get("question"), _dig(row, "extra_info", "question"))
    if found is None:
        found = _find_in_prompt(row.get("prompt"))
    if not isinstance(found, str) or not found.strip():
        raise MalformedRowError("it has no question")
    return found.strip()


def _find_in_prompt(prompt: Any) -> str | None:
    """Return the text after the last mark of a prompt, which is a text or a list of messages."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = _dig(prompt[-1], "content") if prompt else None
    if not isinstance(prompt, str):
        return None
    return prompt.rpartition(_QUESTION_MARK)[2]


_ALIASES = {"2wiki": "2wikimultihopqa", "tq": "triviaqa", "Bamboogle": "bamboogle"}
"""Names of benchmarks in DeepResearcher's files."""


def _find_benchmark(row: Mapping[str, Any]) -> str:
    """Return the benchmark that a row names; verl writes ``searchR1_nq``."""
    found = _first_present(_dig(row, "metadata", "benchmark"), row.get("data_source"))
    if not isinstance(found, str):
        return ""
    name = found.removeprefix("searchR1_")
    return _ALIASES.get(name, name)


SEVEN = "seven"
TRAINING = "nq_hotpotqa"
SAMPLES = "deepresearcher"
"""DeepResearcher's evaluation set: 512 questions each of six benchmarks, and all 125 of Bamboogle."""
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
"""Benchmarks in the order of the paper's tables."""

DATASETS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{item.name: {"test": (f"flashrag/{item.path}",)} for item in BENCHMARKS},
        SEVEN: {"test": tuple(f"flashrag/{item.path}" for item in BENCHMARKS)},
        TRAINING: {"train": ("search-r1/train.parquet",), "test": ("search-r1/test.parquet",)},
        SAMPLES: {"test": ("deepresearcher/test.parquet",)},
    }
)
"""Files of each split by name, below the folder ``search`` of the data folder."""


def name_source(dataset: str) -> str:
    """Return the name under which ``spear data get search`` fetches one of :data:`DATASETS`."""
    return {TRAINING: "train", SAMPLES: SAMPLES}.get(dataset, "questions")


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
                raise SpearError(f"{found} is missing: 'spear data get search {name_source(dataset)}' fetches it.")
            # FlashRAG has a folder for each benchmark; other files mix benchmarks, which their rows name.
            source, folder, *_ = path.split("/")
            groups.append(list(read_questions(found, folder if source == "flashrag" else None)))
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


MINI = "mini"
"""The default data set."""
EMBEDDED = {MINI: "standard", "mini-small": "small"}
"""Embedded data sets, and the sizes of their knowledge bases."""


def list_texts(dataset: str) -> tuple[list[dict[str, str]], list[str]]:
    """Return all passages and all questions of an embedded data set."""
    base = open_base(EMBEDDED[dataset])
    return base.corpus, [asked.question for questions in base.questions.values() for asked in questions]


def find_splits(dataset: str) -> tuple[str, ...]:
    """Return the splits of a data set, in the order of ``SpearEnv.splits``.

    Raises:
        SpearError: the data set is unknown.
    """
    return list_splits(dataset, dict.fromkeys(EMBEDDED, SPLITS), DATASETS)


def open_tasks(dataset: str, split: str | None, panel: int | None = None) -> TaskSet:
    """Open the questions of a split as tasks.

    Args:
        dataset: a name, or the path of a file of questions, which has the one split ``all``.
        split: its name; by default the first.
        panel: number of questions per benchmark, see :func:`choose_panel`.

    Raises:
        SpearError: the data set or split is unknown, or its file is missing or cannot be read.
    """
    splits = find_splits(dataset)
    chosen = check_split(splits[0] if split is None else split, splits)
    if is_rows_file(dataset):
        dataset = os.path.abspath(dataset)
        files = [Path(dataset)]
    else:
        files = [locate_file(path) for path in DATASETS[dataset][chosen]] if dataset in DATASETS else []
    return _open_tasks(dataset, chosen, panel, look_at(files))


@lru_cache(maxsize=16)
def _open_tasks(dataset: str, split: str, panel: int | None, _state: FileState) -> TaskSet:
    if dataset not in EMBEDDED:
        return open_benchmark(dataset, split, panel)
    if panel is not None:
        raise SpearError(f"panel={panel!r}: {dataset} is small enough to be played in full; leave panel out.")
    questions = tuple(
        Question(
            asked.question,
            tuple(asked.golden_answers),
            f"{asked.hops}hop",
            tuple(asked.gold_passages),
            tuple(asked.oracle_queries),
        )
        for asked in open_base(EMBEDDED[dataset]).questions[split]
    )
    return QuestionTaskSet(dataset, split, questions)
