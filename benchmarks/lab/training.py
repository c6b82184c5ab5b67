"""A training of the lab: the trainer's steps until a budget of tokens is used up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.lab.actor import LabActor
from benchmarks.lab.comparison import Arm, TrainingSettings
from benchmarks.lab.playing import LabRollouts
from benchmarks.lab.policy import BoardPolicy, Examiner
from benchmarks.lab.rooms import Rooms
from spear_agents.engines.base import derive_seed
from spear_training.algorithms import SpearSettings
from spear_training.algorithms.curriculum import Archive, TaskSource
from spear_training.algorithms.rows import Array
from spear_training.step.state import SpearState
from spear_training.step.step import SpearStep
from spear_training.step.tasks import rate_difficulty
from spear_training.step.update import UpdateSizes

WARMUP, LAST = 5, 0.05
"""Learning rate: steps of its warm-up, and its final share after a cosine over the budget."""
KEPT = ("success/all", "entropy/token-mean", "replay/drawn", "actor/grad_norm", "groups/equal")
"""Metrics of a step kept in a result."""


@dataclass(frozen=True)
class StepLine:
    """Record of a step: tokens so far, success of the groups from the start of their tasks, :data:`KEPT`."""

    tokens: int
    success: float
    metrics: dict[str, float]


class Training:
    """A training, which changes ``policy`` in place."""

    def __init__(
        self, rooms: Rooms, policy: BoardPolicy, arm: Arm, settings: TrainingSettings, *, rate: float, seed: int
    ) -> None:
        spear: SpearSettings = arm.compose(settings)
        self.policy, self._rooms, self._settings, self._rate = policy, rooms, settings, rate
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.01)
        self.state = SpearState(spear, seed)
        self._actor = LabActor(spear, policy, self._optimizer, epochs=arm.epochs)
        sizes = UpdateSizes(settings.minibatch, float(spear.loss.scale_factor or 1.0), arm.epochs)
        self._step = SpearStep(spear, self.state, self._actor, None, max_response_length=1, sizes=sizes)
        self._source = TaskSource([rate_difficulty(task) for task in rooms.tasks], spear.curriculum, settings.group)
        self._archive: Archive[int, int] = Archive(spear.branch)
        self._tree = arm.tree
        self._rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "lab")))
        self.steps = self.tokens = self.restored = 0

    @property
    def finished(self) -> bool:
        """Whether the budget is used up."""
        return self.tokens >= self._settings.budget

    def step(self) -> StepLine:
        """Make one training step."""
        settings, self.steps = self._settings, self.steps + 1
        share = min(1.0, self.tokens / settings.budget)
        cosine = LAST + (1.0 - LAST) * 0.5 * (1.0 + math.cos(math.pi * share))
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, self.steps / WARMUP) * cosine
        rollouts = LabRollouts(
            self.steps, self._rooms, self.policy, self._actor, self._source, self._archive, self._rng,
            groups=settings.tasks, members=settings.group, turns=settings.turns, tree=self._tree,
        )  # fmt: skip
        metrics = self._step.run(self.steps, rollouts).metrics
        self._actor.release()
        self.tokens += rollouts.tokens
        self.restored += rollouts.restored
        kept = {name: float(metrics[name]) for name in KEPT if name in metrics}
        return StepLine(self.tokens, rollouts.wins / max(1, rollouts.episodes), kept)

    def state_dict(self) -> dict[str, Any]:
        """State for another training of the same settings to continue exactly."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "spear": self.state.state_dict(),
            "source": self._source.state_dict(),
            "archive": self._archive.state_dict(),
            "rng": self._rng.bit_generator.state,
            "counts": (self.steps, self.tokens, self.restored),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.state.load_state_dict(state["spear"])
        self._source.load_state_dict(state["source"])
        self._archive.load_state_dict(state["archive"])
        self._rng.bit_generator.state = state["rng"]
        self.steps, self.tokens, self.restored = state["counts"]


def train(training: Training, examiner: Examiner, *, looks: int, budget: int) -> dict[str, Any]:
    """Make all steps of a training up to ``budget`` tokens; return its result as plain values.

    The panel of ``examiner`` is played ``looks`` times at equal shares of the budget; the last time gives the result.
    """
    lines: list[StepLine] = []
    curve: list[tuple[int, float]] = []
    while not training.finished:
        lines.append(training.step())
        passed = min(looks - 1, looks * training.tokens // budget)
        if len(curve) < passed:
            curve += [(training.tokens, float(examiner.examine(training.policy).mean()))] * (passed - len(curve))
    won = examiner.examine(training.policy)
    curve.append((training.tokens, float(won.mean())))
    return summarize_run(lines, won, curve) | {"restored_groups": training.restored}


def summarize_run(
    lines: Sequence[StepLine], won: Sequence[float] | Array, curve: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """The result of a run as plain values.

    ``won`` is the success on each level of the panel at the end, ``curve`` tokens and success at its examinations.
    """
    tenths = np.array_split(np.arange(len(lines)), min(10, len(lines)))
    return {
        "success": float(np.mean(won)),
        "won": [round(1000 * float(value)) for value in won],
        "curve": [[tokens, round(value, 5)] for tokens, value in curve],
        "rollouts": [round(float(np.mean([lines[n].success for n in part])), 4) for part in tenths],
        "entropy": [_average(lines, part, "entropy/token-mean") for part in (tenths[0], tenths[-1])],
        "equal_groups": [_average(lines, part, "groups/equal") for part in (tenths[0], tenths[-1])],
        "replayed": int(sum(line.metrics.get("replay/drawn", 0.0) for line in lines)),
        "steps": len(lines),
        "tokens": lines[-1].tokens,
    }


def _average(lines: Sequence[StepLine], part: Any, name: str) -> float:
    values = [lines[n].metrics[name] for n in part if name in lines[n].metrics]
    return round(float(np.mean(values)), 4) if values else 0.0
