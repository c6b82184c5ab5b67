"""Problems as tasks: ids, splits, fingerprints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spear_envs.core.tasks import NumberedTaskSet, Task
from spear_envs.data.embedded import read_embedded

SPLITS = ("train", "valid", "test")
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
        """The definition as JSON values."""
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
