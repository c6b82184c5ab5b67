"""The ``spear`` node of a composed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic.dataclasses import dataclass

from spear_training.algorithms.records import STRICT, Record, number
from spear_training.algorithms.settings import SpearSettings
from spear_training.checkpoints import Resume
from spear_training.environments import EnvironmentSettings
from spear_training.recording import RecordSettings
from spear_training.step.ahead import RolloutSettings


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
