"""The ``spear`` node of a composed configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic.dataclasses import dataclass

from spear_agents.records import EPISODES, SETTINGS
from spear_agents.trajectory import Trajectory, TrajectoryWriter
from spear_envs.core.errors import SpearError
from spear_envs.data.files import explain_unwritable, write_json, write_text
from spear_training.algorithms.records import STRICT, Record, number
from spear_training.algorithms.settings import SpearSettings
from spear_training.checkpoints import Resume
from spear_training.environments import EnvironmentSettings
from spear_training.step.ahead import RolloutSettings

FOLDER = "rollouts"
"""Folder of training episodes within a run."""
VALIDATIONS = "validations"
"""Folder of validation episodes (``trainer.log_val_generations`` of each)."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, config=STRICT)
class RecordSettings(Record, path="spear.record"):
    """The ``spear.record`` node: keep ``episodes`` (0 for none) at step 1 and every ``every`` steps after it."""

    every: int = number(10, at_least=1)
    episodes: int = number(4, at_least=0)

    def count(self, step: int) -> int:
        """Number of episodes kept of a step (from 1)."""
        return self.episodes if (step - 1) % self.every == 0 else 0


class EpisodeRecorder:
    """Appends episodes to ``episodes.jsonl`` in a ``folder`` of a run. Failures here do not stop the training.

    The page shows ``identity`` (``model``, ``env_kwargs`` and ``split``) and the name of the folder.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], folder: str = FOLDER) -> None:
        self._path = out / folder / EPISODES
        self._identity = identity

    def resume_after(self, step: int) -> None:
        """Drop the episodes of later steps, which will be played again, and a torn last line."""
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
        """Keep the episodes of a step; return their number. On a full disk, warn and return 0."""
        if not episodes:
            return 0
        try:
            settings = self._path.with_name(SETTINGS)
            if not settings.exists():
                write_json(settings, self._identity)
            # Opened each time: a line torn by a full disk is cut off before the next.
            with TrajectoryWriter(self._path) as writer:
                for episode in episodes:
                    writer.write(replace(episode, step=step))
        except (OSError, SpearError) as error:
            told = explain_unwritable(self._path, error) if isinstance(error, OSError) else error
            _log.warning("the episodes of step %d are not recorded, the training continues: %s", step, told)
            return 0
        return len(episodes)


def _read_step(line: str) -> float:
    """The step of a line; infinite if it is torn."""
    if not line.endswith("\n"):
        return float("inf")
    try:
        return float(json.loads(line)["step"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return float("inf")


@dataclass(frozen=True, config=STRICT)
class RunSettings(Record, path="spear"):
    """Settings of a run and its algorithm."""

    env: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    seed: int = number(0, at_least=0)
    deterministic: bool = True
    """Batch requests in a canonical order."""
    resume: Resume = Resume.EXACT
    keep_best: str | None = "success/all"
    """Validation metric of the best checkpoint."""
    checkpoint_store: str | None = None
    """Address to which checkpoints are uploaded, of any file system of fsspec; None for the run folder only."""
    tries: int = number(3, at_least=1)
    """Tries of an episode with a fault, before it is left out of the loss."""
    agent: str | None = None
    """The program that plays the episodes, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``; None for our own loop."""
    agent_timeout: float = number(3600.0, above=0)
    """Time limit of an episode in seconds."""
    record: RecordSettings = field(default_factory=RecordSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    warm_start: Mapping[str, Any] | None = None
    """Changes to the recipe of the policy that the run makes first; None if it does not make one."""
    vision_start: Mapping[str, Any] | None = None
    """The same for a vision policy."""
    algorithm: SpearSettings = field(default_factory=SpearSettings)

    @property
    def repeats(self) -> bool:
        """Whether batches have a canonical order, which agent programs and asynchronous weight updates prevent."""
        return self.deterministic and self.agent is None and self.rollout.staleness == 0

    @property
    def makes_policy(self) -> bool:
        """Whether the run makes its own tiny policy before it starts."""
        return self.warm_start is not None or self.vision_start is not None

    @classmethod
    def from_config(cls, config: DictConfig) -> RunSettings:
        """Read the ``spear`` node of a composed configuration.

        Raises SettingsError for an unknown key or a wrong value, SpearError for an unknown environment.
        """
        node: Any = OmegaConf.to_container(config.spear, resolve=True)
        own = {item.name: node.pop(item.name) for item in fields(cls) if item.name in node}
        return cls(**own, algorithm=SpearSettings.from_mapping(node))
