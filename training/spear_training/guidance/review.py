"""All rules about the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance.advice import Advice
from spear_training.guidance.history import History
from spear_training.guidance.imitation import IMITATION_RULES
from spear_training.guidance.progress import PROGRESS_RULES


def review_history(records: Sequence[Mapping[str, Any]], settings: SpearSettings) -> list[Advice]:
    """What the metrics of a run say against its settings.

    Args:
        records: metrics as :func:`spear_agents.metrics.read_history` gives them.
        settings: ``spear`` node of the run.
    """
    history = History(records)
    return [advice for rule in (*IMITATION_RULES, *PROGRESS_RULES) if (advice := rule(history, settings)) is not None]
