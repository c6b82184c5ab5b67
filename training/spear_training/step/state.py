"""State of SPEAR between steps: both buffers, the covariance bounds, the random stream, the last metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from spear_agents.engines.base import derive_seed
from spear_envs.core.errors import SpearError, name_error
from spear_training.algorithms import BaselineBuffer, BoundsMode, ReplayBuffer, SpearSettings
from spear_training.run.checkpoints import FORMAT, read_state, write_state

REMEMBERED_ANCHORS = 2**18
"""Maximum number of remembered state names; the oldest are dropped first."""
TIMES = ("perf/", "timing_s/")
"""Metrics that differ between runs, hidden from schedules and checkpoints."""
WATCHED = ("entropy/token-mean", "success/all", "anchors/new")
"""Metrics of our schedules that a step may lack: without a trained row, an episode from its start, or any row."""


class SpearState:
    """Baseline buffer D_R, replay buffer D, covariance bounds, and the generator that deals rows into mini-batches."""

    def __init__(self, settings: SpearSettings, seed: int) -> None:
        replay, cov = settings.replay, settings.cov
        self.baseline = BaselineBuffer(settings.baseline.capacity) if settings.baseline.capacity else None
        self.replay = ReplayBuffer(
            replay.capacity,
            unit=replay.unit.value,
            trigger_ratio=settings.sil.trigger_ratio,
            trigger=settings.sil.trigger.value,
            max_age=replay.max_age,
            require_tool_call=replay.require_tool_call,
            power_of_two=replay.power_of_two,
            seed=derive_seed(seed, "replay") % 2**63,
        )
        self.rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "deal")))
        self.bounds: tuple[float, float] | None = None
        """Covariance bounds; None until measured on the first replayed rows."""
        self._is_fixed = cov.bounds is BoundsMode.FIXED
        if self._is_fixed:
            self.bounds = (float(cov.lower), float(cov.upper))  # type: ignore[arg-type]
        self._momentum = {BoundsMode.RUNNING: cov.momentum}.get(cov.bounds, 1.0)
        self.metrics: dict[str, float] = {}
        """Metrics of the last step, for schedules."""
        self._anchors: dict[int, None] = {}

    def move_bounds(self, measured: tuple[float, float]) -> None:
        """Update the covariance bounds with those of a replay: the first ones stay, or start a running mean."""
        # The first measurement replaces nothing: a running mean that started at 0 would let too many tokens through.
        if self.bounds is None:
            self.bounds = measured
        keep = self._momentum
        self.bounds = tuple(keep * old + (1.0 - keep) * new for old, new in zip(self.bounds, measured, strict=True))  # type: ignore[assignment]

    def meet(self, anchors: Iterable[str]) -> float:
        """Remember the states of a step; return the share of new ones (each counted once)."""
        # Four bytes for a name of any length. Of 2**18 names one in 16,000 collides, which the share does not show.
        met = {crc32(anchor.encode("utf-8", "surrogatepass")) for anchor in anchors}
        new = met - self._anchors.keys()
        self._anchors.update(dict.fromkeys(sorted(new)))
        for _ in range(len(self._anchors) - REMEMBERED_ANCHORS):
            del self._anchors[next(iter(self._anchors))]
        return len(new) / max(1, len(met))

    def remember(self, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step for the schedules of the next one."""
        last = {name: self.metrics[name] for name in WATCHED if name in self.metrics}
        self.metrics = last | {name: float(value) for name, value in metrics.items() if not name.startswith(TIMES)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run draws the same."""
        return {
            "baseline": self.baseline.state_dict() if self.baseline is not None else None,
            "replay": self.replay.state_dict(),
            "rng": self.rng.bit_generator.state,
            "bounds": self.bounds,
            "metrics": self.metrics,
            "anchors": torch.tensor(list(self._anchors), dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if (state["baseline"] is None) != (self.baseline is None):
            raise SpearError("the checkpoint was written with another baseline.capacity: start a new run folder")
        if self.baseline is not None:
            self.baseline.load_state_dict(state["baseline"])
        self.replay.load_state_dict(state["replay"])
        self.rng.bit_generator.state = state["rng"]
        if not self._is_fixed:
            self.bounds = tuple(state["bounds"]) if state["bounds"] is not None else None
        self.metrics = dict(state["metrics"])
        self._anchors = dict.fromkeys(state["anchors"].tolist())

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Write the state and ``about`` into a checkpoint folder."""
        write_state(folder, {"format": FORMAT, **about, "state": self.state_dict()})

    def load(self, folder: Path) -> dict[str, Any]:
        """Load the state of a checkpoint folder; return the ``about`` it was saved with.

        Raises SpearError if it is missing, damaged or of another format, or its buffers have another size.
        """
        saved = read_state(folder)
        try:
            self.load_state_dict(saved.pop("state"))
        except SpearError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SpearError(f"the state in {folder} is damaged ({name_error(error)}): name another --out") from error
        return saved
