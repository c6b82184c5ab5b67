"""A policy, a critic and rollouts for a step that needs none of verl: they remember what they are asked."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from spear_training.algorithms import RowTable
from spear_training.step.records import Rollout
from spear_training.step.state import SpearState
from spear_training.step.update import Pass, Sums
from tests.training.episodes import Episode, play

BOUNDS = (0.25, 2.5)
"""What each replayed pass measures."""


def mark_tokens(rows: RowTable) -> np.ndarray:
    """The loss mask of rows whose loss tokens come first."""
    place = np.concatenate([np.zeros(0, np.int64), *map(np.arange, rows.response_length)])
    return place < rows.spread(rows.loss_tokens)


class FakeActor:
    """:class:`spear_training.step.update.Actor`. ``log`` has each pass, and what the buffers held then."""

    ranks = 1

    def __init__(self, state: SpearState) -> None:
        self.state = state
        self.log: list[Any] = []

    def collect(self, rows: RowTable, metrics: dict[str, Any]) -> RowTable:
        mask = mark_tokens(rows)
        return rows.add(mask=mask, log_probs=np.full(len(mask), -0.5))

    def read_tokens(self, rows: RowTable) -> RowTable:
        return rows.add(ids=np.full(int((rows.prompt_length + rows.response_length).sum()), 7))

    def write(self, rows: RowTable) -> RowTable:
        return rows.add(key=[f"replay_{n}" for n in range(len(rows))])

    def train(self, update: Pass) -> Sums:
        baseline = None if self.state.baseline is None else len(self.state.baseline)
        self.log.append(SimpleNamespace(update=update, stored=len(self.state.replay), baseline=baseline))
        rows = update.rows
        tokens, replayed = float(rows.loss_tokens.sum()), float(rows.loss_tokens[rows.replayed].sum())
        rate = {} if update.hold_learning_rate else {"lr": 0.1}
        names = ("clipped", "dual_clipped", "covariance_clipped", "kl", "kl_old")
        return {
            **dict.fromkeys(names, 0.0),
            **{"on_policy": 0.5, "self_imitation": -0.25, "tokens": tokens, "replay_tokens": replayed},
            **{"replay_ratio": replayed, "replay_ratio_squared": 2 * replayed, "grad_norm": 1.0, "seconds": 0.1},
            **{"cov_lower": replayed * BOUNDS[0], "cov_upper": replayed * BOUNDS[1], **rate},
        }


class FakeCritic:
    """:class:`spear_training.step.step.Critic`: the value of a token follows from its row's key and its place."""

    def __init__(self, actor: FakeActor, scale: float = 0.5) -> None:
        self.actor = actor
        self.scale = scale
        self.learned: list[RowTable] = []
        self.passes_before: list[int] = []

    def value(self, rows: RowTable) -> RowTable:
        values = [self.say_values(key, length) for key, length in zip(rows.key, rows.response_length, strict=True)]
        return rows.add(mask=mark_tokens(rows), values=np.concatenate(values))

    def say_values(self, key: str, length: int) -> np.ndarray:
        return self.scale * np.random.default_rng([ord(letter) for letter in key]).normal(size=length)

    def update(self, rows: RowTable, metrics: dict[str, Any]) -> None:
        self.learned.append(rows)
        self.passes_before.append(len(self.actor.log))


class FakeRollouts:
    """:class:`spear_training.step.step.Rollouts` of given episodes, a list for each batch of tasks."""

    def __init__(self, *batches: Sequence[Episode]) -> None:
        self.batches = batches
        self.played: list[int] = []
        self.finished_after: list[int] = []

    def play(self, number: int) -> Rollout:
        self.played.append(number)
        return play(self.batches[number])

    def finish(self) -> None:
        self.finished_after.append(len(self.played))
