"""Problems as tasks: ids, splits, fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spear_envs.core.tasks import Task, TaskSet

__all__ = ["Problem", "ProblemTaskSet", "normalize_text"]

DIGITS = 5


@dataclass(frozen=True)
class Problem:
    """A problem with its answer."""

    text: str
    answer: str
    subtask: str
    """Family of embedded problems, else the benchmark: what success is reported by."""
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


def normalize_text(text: str) -> str:
    """The form in which the texts of problems are compared: lower case, every run of blanks one blank."""
    return " ".join(text.lower().split())


class ProblemTaskSet(TaskSet):
    """Problems of one split as tasks, each made when it is asked for.

    Ids are ``code/<dataset>/<split>/<index within the split>``, five digits or more. Two tasks are the same by content
    if their texts are, but for case and white space.

    Args:
        dataset: the second part of the ids, such as ``mini``.
        split: name of the split.
        problems: in order; at least one.
    """

    bounded = True

    def __init__(self, dataset: str, split: str, problems: Sequence[Problem]) -> None:
        super().__init__(f"code/{dataset}", split, lambda task: normalize_text(task.instruction))
        self.problems = problems
        self._make = lru_cache(maxsize=1_024)(self._make_task)

    def __len__(self) -> int:
        return len(self.problems)

    def id_of(self, index: int) -> str:
        """Id of the task at ``index``, without making the task."""
        return f"{self.name}/{self.split}/{index:0{DIGITS}d}"

    def _task_at(self, index: int) -> Task:
        return self._make(index)

    def _make_task(self, index: int) -> Task:
        problem = self.problems[index]
        return Task(self.id_of(index), self.split, problem.subtask, problem.text, problem.to_content())

    def index_of(self, task_id: str) -> int:
        """Position of a task; raises ``UnknownTaskError``."""
        number = task_id.rpartition("/")[2] if isinstance(task_id, str) else ""
        if number.isascii() and number.isdigit() and len(number) <= max(DIGITS, len(str(len(self)))):
            index = int(number)
            if index < len(self) and self.id_of(index) == task_id:
                return index
        raise self._unknown(task_id, "")

    def _definition(self) -> Any:
        return {
            "name": self.name,
            "split": self.split,
            "problems": [{"subtask": problem.subtask, **problem.to_content()} for problem in self.problems],
        }
