"""Questions as tasks: ids, splits, fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from spear_envs.core.tasks import NumberedTaskSet, Task
from spear_envs.search.grading import normalize_answer

BOUNDED = 20_000
"""Larger sets are not enumerated."""


class Question(NamedTuple):
    """A question with its answers. A tuple, not a dataclass, since there may be hundreds of thousands."""

    question: str
    golden_answers: tuple[str, ...]
    """Each of them is right."""
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
