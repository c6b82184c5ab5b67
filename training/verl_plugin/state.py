"""What SPEAR keeps from step to step on the driver: both buffers, the covariance bounds, the random stream."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.engines.base import derive_seed
from spear_envs.core.errors import SpearError
from training.algorithms import BaselineBuffer, BoundsMode, ReplayBuffer
from training.algorithms.settings import SpearSettings

FILE = "spear.pt"
VERSION = 1


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
            "version": VERSION,
            "baseline": self.baseline.state_dict() if self.baseline is not None else None,
            "replay": self.replay.state_dict(),
            "rng": self.rng.bit_generator.state,
            "bounds": self.bounds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        if state.get("version") != VERSION:
            raise SpearError(
                f"{FILE} of the checkpoint has version {state.get('version')}, this code reads {VERSION}: start anew"
            )
        if (state["baseline"] is None) != (self.baseline is None):
            raise SpearError("the checkpoint was written with another spear.baseline.capacity: start a new run folder")
        if self.baseline is not None:
            self.baseline.load_state_dict(state["baseline"])
        self.replay.load_state_dict(state["replay"])
        self.rng.bit_generator.state = state["rng"]
        self.bounds = tuple(state["bounds"]) if state["bounds"] is not None else None

    def save(self, folder: Path) -> None:
        """Write ``spear.pt`` into a checkpoint folder, under a temporary name first."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / (FILE + ".tmp")
        torch.save(self.state_dict(), temporary)
        os.replace(temporary, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read ``spear.pt`` of a checkpoint folder.

        Raises:
            SpearError: the file is missing, torn or of another version, or its buffers have another size.
        """
        path = folder / FILE
        if not path.is_file():
            raise SpearError(f"{folder} has no {FILE}: it is no checkpoint of this trainer; name another run folder")
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise SpearError(f"{path} cannot be read: resume from another checkpoint or start a new run") from error
        self.load_state_dict(state)
