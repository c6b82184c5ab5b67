"""A sample of a training's episodes and of its validations', kept for people to look at with ``spear view``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from spear_agents.files import explain_unwritable, write_json, write_text
from spear_agents.records import EPISODES, SETTINGS
from spear_agents.trajectory import Trajectory, TrajectoryWriter
from spear_envs.core.errors import SpearError
from spear_training.algorithms.records import STRICT, Record, number

FOLDER = "rollouts"
"""Folder of the episodes within a run."""
VALIDATIONS = "validations"
"""Folder of those that validations played (``trainer.log_val_generations`` of each)."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, config=STRICT)
class RecordSettings(Record):
    """The ``spear.record`` node: at step 1 and every ``every`` steps after it, ``episodes`` are kept; 0 for none."""

    PATH: ClassVar[str] = "spear.record"

    every: int = number(10, at_least=1)
    episodes: int = number(4, at_least=0)

    def count(self, step: int) -> int:
        """Episodes that are kept of a step (from 1)."""
        return self.episodes if (step - 1) % self.every == 0 else 0


class EpisodeRecorder:
    """Appends episodes to ``episodes.jsonl`` in a folder of a run. Nothing that goes wrong here stops a training.

    Args:
        out: run folder.
        identity: what the page needs to know: ``model``, ``env_kwargs``, ``split``.
        folder: within the run; the page names it beside the step.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], folder: str = FOLDER) -> None:
        self._path = out / folder / EPISODES
        self._identity = identity

    def resume_after(self, step: int) -> None:
        """Forget the episodes of later steps, which are about to be played again, and a torn last line."""
        try:
            if not self._path.exists():
                return
            lines = self._path.read_text(encoding="ascii").splitlines(keepends=True)
            kept = [line for line in lines if _read_step(line) <= step]
            if len(kept) < len(lines):
                write_text(self._path, "".join(kept))
        except (OSError, ValueError, SpearError) as error:
            _log.warning("recorded episodes of steps after %d stay in %s: %s", step, self._path, error)

    def write(self, step: int, episodes: Sequence[Trajectory]) -> int:
        """Keep the episodes of a step; returns how many. A disk that is full is a warning, and 0."""
        if not episodes:
            return 0
        try:
            settings = self._path.with_name(SETTINGS)
            if not settings.exists():
                write_json(settings, self._identity)
            # Opened anew each time: what a full disk tore is cut off before anything follows it.
            with TrajectoryWriter(self._path) as writer:
                for episode in episodes:
                    writer.write(replace(episode, step=step))
        except (OSError, SpearError) as error:
            told = explain_unwritable(self._path, error) if isinstance(error, OSError) else error
            _log.warning("the episodes of step %d are not recorded, the training goes on: %s", step, told)
            return 0
        return len(episodes)


def _read_step(line: str) -> float:
    """The step of a line; beyond all steps where it is torn."""
    if not line.endswith("\n"):
        return float("inf")
    try:
        return float(json.loads(line)["step"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return float("inf")
