"""Asynchronous rollouts: batches of tasks that are played before the step that learns from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from pydantic.dataclasses import dataclass as checked

from spear_training.algorithms.records import STRICT, Record, number
from spear_training.step.records import Rollout

Playing = TypeVar("Playing")
Tasks = list[str]


@checked(frozen=True, config=STRICT)
class RolloutSettings(Record):
    """The ``spear.rollout`` node: a step may learn from episodes of weights that are ``staleness`` versions old."""

    PATH: ClassVar[str] = "spear.rollout"

    staleness: int = number(0, at_least=0)


@dataclass(frozen=True)
class Batch(Generic[Playing]):
    """The tasks of a step, and what stands for their episodes while they are played."""

    tasks: Tasks
    playing: Playing


class BatchesAhead(Generic[Playing]):
    """Begins batches before their steps: with lead N, those of the N steps that follow the one under way.

    A batch is begun after at least N updates fewer than its own step sees, so no token is more than N versions old.

    Args:
        lead: N; with 0 a batch is begun by its own step.
        draw: gives the tasks of the next batch.
        begin: begins to play tasks as those of a step (from 1).
    """

    def __init__(self, lead: int, draw: Callable[[], Tasks], begin: Callable[[int, Tasks], Playing]) -> None:
        self._lead = lead
        self._draw = draw
        self._begin = begin
        self._drawn: deque[Tasks] = deque()
        self._batches: deque[Batch[Playing]] = deque()

    def reach(self, step: int, last: int) -> None:
        """Begin what is missing of the batches of ``step`` and of those that follow it, up to that of step ``last``."""
        while len(self._batches) <= min(self._lead, last - step):
            tasks = self._drawn.popleft() if self._drawn else self._draw()
            self._batches.append(Batch(tasks, self._begin(step + len(self._batches), tasks)))

    def take(self) -> Playing:
        """The batch of the step under way; each is taken once, in the order of their steps."""
        return self._batches.popleft().playing

    def list_drawn(self) -> list[Tasks]:
        """Tasks of all batches that were drawn and not taken: a checkpoint keeps them, and they are played again."""
        return [batch.tasks for batch in self._batches] + list(self._drawn)

    def restore(self, drawn: Iterable[Tasks]) -> None:
        """Play what :meth:`list_drawn` gave before anything new is drawn."""
        self._drawn = deque(drawn)


def summarize_versions(rollout: Rollout, version: int) -> dict[str, float]:
    """How old the weights were that wrote a step's rows.

    Args:
        rollout: of the step.
        version: of the weights that the step begins with, its number less one.

    Returns:
        mean and maximum over rows of the age of their oldest token, in versions, and the share of the episodes that
        went on across a push of weights.
    """
    ages = version - rollout.rows.version[rollout.rows.version >= 0]
    if not len(ages):
        return {}
    crossed = [len(record.versions) > 1 for record in rollout.records if record.versions]
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/crossed_push": sum(crossed) / max(1, len(crossed)),
    }


def summarize_ratios(log_probs: Any, rollout_log_probs: Any) -> dict[str, float]:
    """Importance ratios of policy tokens [K] before anything is clipped: trainer's probability over the rollout's."""
    ratios = np.exp(np.asarray(log_probs, dtype=np.float64) - np.asarray(rollout_log_probs, dtype=np.float64))
    return {
        "staleness/ratio_mean": float(ratios.mean()),
        "staleness/ratio_min": float(ratios.min()),
        "staleness/ratio_max": float(ratios.max()),
        "staleness/ratio_ess": float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
    }
