"""What SPEAR keeps from step to step on the driver: both buffers, the covariance bounds, the random stream."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spear_agents.engines.base import derive_seed
from spear_envs.core.errors import SpearError
from spear_training.algorithms import BaselineBuffer, BoundsMode, ReplayBuffer
from spear_training.algorithms.settings import SpearSettings
from spear_training.checkpoints import FORMAT, read_state, write_state


class SpearState:
    """Baseline buffer D_R, replay buffer D, covariance bounds, and the generator that deals rows into mini-batches.

    Args:
        settings: ``spear`` node.
        seed: of the replay buffer's and the dealer's streams.
    """

    def __init__(self, settings: SpearSettings, seed: int) -> None:
        replay = settings.replay
        self.baseline = BaselineBuffer(settings.baseline.capacity) if settings.baseline.capacity else None
        self.replay = ReplayBuffer(
            replay.capacity,
            unit=replay.unit.value,
            trigger_ratio=settings.sil.trigger_ratio,
            max_age=replay.max_age,
            require_tool_call=replay.require_tool_call,
            power_of_two=replay.power_of_two,
            seed=derive_seed(seed, "replay") % 2**63,
        )
        self.rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "deal")))
        self.bounds: tuple[float, float] | None = None
        """Covariance bounds; None until measured on the first replayed rows."""
        if settings.cov.bounds is BoundsMode.FIXED:
            self.bounds = (float(settings.cov.lower), float(settings.cov.upper))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to draw what this one would have drawn."""
        return {
            "baseline": self.baseline.state_dict() if self.baseline is not None else None,
            "replay": self.replay.state_dict(),
            "rng": self.rng.bit_generator.state,
            "bounds": self.bounds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        if (state["baseline"] is None) != (self.baseline is None):
            raise SpearError("the checkpoint was written with another spear.baseline.capacity: start a new run folder")
        if self.baseline is not None:
            self.baseline.load_state_dict(state["baseline"])
        self.replay.load_state_dict(state["replay"])
        self.rng.bit_generator.state = state["rng"]
        self.bounds = tuple(state["bounds"]) if state["bounds"] is not None else None

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Write the state into a checkpoint folder, with what else a resumed run should know."""
        write_state(folder, {"format": FORMAT, **about, "state": self.state_dict()})

    def load(self, folder: Path) -> dict[str, Any]:
        """Take over the state of a checkpoint folder; returns what it was saved with.

        Raises:
            SpearError: it is missing, torn or of another format, or its buffers have another size.
        """
        saved = read_state(folder)
        self.load_state_dict(saved.pop("state"))
        return saved
