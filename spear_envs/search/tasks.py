"""Questions as tasks: ids, splits, fingerprints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from spear_envs.core.tasks import Task, TaskSet
from spear_envs.search.grading import normalize_answer

__all__ = ["Question", "QuestionTaskSet"]

DIGITS = 5
CACHE_SIZE = 1_024
BOUNDED = 20_000
"""Larger sets are not to be looked at one by one."""


class Question(NamedTuple):
    """A question with its answers. A tuple and no dataclass since there may be hundreds of thousands."""

    question: str
    golden_answers: tuple[str, ...]
    """Any of them is right."""
    subtask: str
    """The benchmark, or the number of hops: what success is reported by."""
    gold_passages: tuple[str, ...] = ()
    """Ids of the passages that lead to the answer, in order, where they are known."""
    oracle_queries: tuple[str, ...] = ()
    """A query for each gold passage."""

    def to_content(self) -> dict[str, Any]:
        """The definition as JSON values."""
        content: dict[str, Any] = {"question": self.question, "golden_answers": list(self.golden_answers)}
        if self.gold_passages:
            content["gold_passages"] = list(self.gold_passages)
            content["oracle_queries"] = list(self.oracle_queries)
        return content


class QuestionTaskSet(TaskSet):
    """Questions of one split as tasks, each made when it is asked for.

    Ids are ``search/<dataset>/<split>/<index within the split>``, five digits or more. Two tasks are the same by
    content if their questions are, but for case, punctuation and articles.

    Args:
        dataset: the second part of the ids, such as ``mini`` or ``hotpotqa``.
        split: name of the split.
        questions: in order; at least one.
    """

    def __init__(self, dataset: str, split: str, questions: Sequence[Question]) -> None:
        super().__init__(
            f"search/{dataset}", split, lambda task: normalize_answer(task.instruction) or task.instruction
        )
        self.bounded = len(questions) <= BOUNDED
        self.questions = questions
        self._cache: OrderedDict[int, Task] = OrderedDict()

    def __len__(self) -> int:
        return len(self.questions)

    def id_of(self, index: int) -> str:
        """Id of the task at ``index``, without making the task."""
        return f"{self.name}/{self.split}/{index:0{DIGITS}d}"

    def _task_at(self, index: int) -> Task:
        task = self._cache.get(index)
        if task is None:
            asked = self.questions[index]
            task = Task(self.id_of(index), self.split, asked.subtask, asked.question, asked.to_content())
            self._cache[index] = task
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(index)
        return task

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
            "questions": [{"subtask": asked.subtask, **asked.to_content()} for asked in self.questions],
        }
