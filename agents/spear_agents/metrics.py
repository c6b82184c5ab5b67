"""Metrics of a run, from the files of verl's logger: one per launch, where later launches replace steps."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.data.files import read_regular

METRICS_FOLDER = "metrics"
_MOST_BYTES = 1 << 30
"""A hundred thousand steps."""
TRAINED = ("training/global_step", "train/loss")
"""Metrics that mark a training step: of reinforcement learning, of supervised fine-tuning."""

Panel = tuple[str, tuple[tuple[str, str], ...]]
"""Title, and the metrics in it with their names."""

PANELS: tuple[Panel, ...] = (
    ("success", (("success/all", "training rollouts"), ("val/success/all", "validation panel"))),
    ("reward", (("reward/total", "total"), ("reward/outcome", "outcome"), ("reward/tool_call", "tool calls"))),
    (
        "schedules and P50",
        (("spear/gamma", "γ (self-imitation)"), ("spear/mu", "μ (tool calls)"), ("baseline/p50", "P50")),
    ),
    ("entropy (nats a token)", (("entropy/token-mean", "policy"),)),
    ("replay (rows)", (("replay/size", "in the buffer"), ("replay/drawn", "drawn"), ("rows/trained", "on-policy"))),
    (
        "clipped tokens (share)",
        (
            ("clip/ppo_fraction", "PPO clip"),
            ("clip/cov_fraction", "covariance clip"),
            ("clip/dual_fraction", "dual clip"),
        ),
    ),
)
"""The main plots of a training with SPEAR."""

FINE_TUNING: tuple[Panel, ...] = (("loss (nats a token)", (("train/loss", "samples of the step"),)),)
"""The main plots of a supervised fine-tuning."""


def measure_metrics(out: str | Path) -> int:
    """Bytes of the run's metrics: grows whenever :func:`read_history` has something new."""
    return sum(path.stat().st_size for path in (Path(out) / METRICS_FOLDER).glob("*.jsonl"))


def read_history(out: str | Path) -> list[dict[str, Any]]:
    """One mapping of metrics a step, ``step`` among them, in order of steps; a torn last line is left out.

    Steps of a resumed launch replace those of earlier launches after its checkpoint. Validation before the first step
    has ``step`` 0. Raises SpearError for a file that cannot be read.
    """
    history: dict[int, dict[str, Any]] = {}
    for path in sorted((Path(out) / METRICS_FOLDER).glob("*.jsonl")):
        launch: dict[int, dict[str, Any]] = {}
        try:
            lines = read_regular(path, _MOST_BYTES).split(b"\n")
        except OSError as error:
            raise SpearError(f"{path} cannot be read: {error.strerror}.") from error
        for line in lines:
            # A line may be empty, torn by a kill, or something else.
            with suppress(ValueError, RecursionError, LookupError, TypeError, OverflowError):
                record = json.loads(line)
                step, data = int(record["step"]), dict(record["data"])
                launch.setdefault(step, {}).update(data)
        if launch:
            # A resumed launch validates at its checkpoint's step first; that is not a new training step.
            trained = [step for step, data in launch.items() if any(name in data for name in TRAINED)]
            first = min(trained, default=max(launch) + 1)
            history = {step: data for step, data in history.items() if step < first}
            for step, data in launch.items():
                history.setdefault(step, {}).update(data)
    return [{"step": step, **history[step]} for step in sorted(history)]
