"""Metrics of a run that goes on or is over, as rules read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance.advice import Advice

WINDOW = 5
"""Steps that a finding about a run is averaged over."""


class History:
    """Metrics of the steps of a run, in order; what is missing or not finite in a step is left out."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.steps = [record for record in records if "training/global_step" in record]

    def __len__(self) -> int:
        return len(self.steps)

    def get(self, name: str) -> list[float]:
        """All values of a metric."""
        values = (step.get(name) for step in self.steps)
        return [float(value) for value in values if value is not None and np.isfinite(value)]

    def recent(self, name: str) -> float | None:
        """Mean of the last :data:`WINDOW` values; None where there are fewer."""
        values = self.get(name)[-WINDOW:]
        return float(np.mean(values)) if len(values) == WINDOW else None

    def usual(self, name: str) -> float | None:
        """Median of the last :data:`WINDOW` values, which one odd step does not move; None where there are fewer."""
        values = self.get(name)[-WINDOW:]
        return float(np.median(values)) if len(values) == WINDOW else None


Rule = Callable[[History, SpearSettings], Advice | None]
