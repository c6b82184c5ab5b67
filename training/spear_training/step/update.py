"""The loss of an update (``eq:grpo_sal``), and the optimiser steps on fresh and replayed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spear_envs.core.errors import SpearError
from spear_training.algorithms import (
    Coupling,
    CovarianceClip,
    RowTable,
    SpearLoss,
    SpearSettings,
    bind_policy_loss,
    spear_loss,
)
from spear_training.step.minibatches import Deal, count_minibatches, deal_rows
from spear_training.step.state import SpearState

STEERING_WIDTH = 4


def compute_loss(
    settings: SpearSettings,
    log_probs: Tensor,
    steering: Tensor,
    columns: Mapping[str, Tensor],
    *,
    gamma: float,
    bounds: tuple[float, float] | None,
) -> SpearLoss:
    """Compute the loss of a micro-batch; ``log_probs`` is [B, T], ``gamma`` the weight of replayed rows.

    Args:
        steering: [B, 4], of each row: advantage, weight in the mini-batch, 1 if it is replayed, seed of random choices.
        columns: [B, T]: ``loss_mask``, ``old_log_probs``, and if present ``advantages`` of tokens, ``ref_log_probs``,
            ``rollout_weights`` and ``entropy`` (needed for its bonus, with a gradient).
        bounds: of the replayed rows' covariance clip; None: those of this micro-batch.
    """
    cov = settings.cov
    shared: dict[str, Any] = dict(scope=cov.scope.value, budget=cov.budget.value, floor_one=cov.floor_one)
    lower, upper = bounds or (None, None)
    measured: dict[str, Any] = dict(bounds=cov.bounds, lower_top=cov.lower_top, upper_top=cov.upper_top)
    on_policy = CovarianceClip(cov.on_policy_ratio, cov.on_policy_lower, cov.on_policy_upper, **shared)
    return spear_loss(
        log_probs,
        columns["old_log_probs"],
        columns.get("advantages", steering[:, 0]),
        columns["loss_mask"] > 0,
        steering[:, 2] > 0,
        gamma=gamma,
        policy=bind_policy_loss(settings),
        cov=CovarianceClip(cov.ratio, lower, upper, **shared, **measured),
        on_policy_cov=on_policy if cov.on_policy else None,
        weights=steering[:, 1],
        ref_log_probs=columns.get("ref_log_probs"),
        kl_coefficient=settings.kl.coefficient,
        entropy=columns.get("entropy"),
        entropy_coefficient=settings.loss.entropy_coefficient,
        rollout_weights=columns.get("rollout_weights"),
        # One generator per micro-batch, seeded by its rows, without touching a global stream.
        generator=torch.Generator().manual_seed(int(steering[:, 3].double().sum().item()) % 2**62),
    )


def measure_loss(result: SpearLoss) -> dict[str, float]:
    """Counts of a loss as additive numbers; covariance bounds are weighted by their tokens."""
    names = ("on_policy", "self_imitation", "tokens", "replay_tokens", "clipped", "dual_clipped", "covariance_clipped")
    sums = {
        name: float(getattr(result, name)) for name in (*names, "kl", "kl_old", "replay_ratio", "replay_ratio_squared")
    }
    lower, upper = result.bounds
    return sums | {"cov_lower": lower * sums["replay_tokens"], "cov_upper": upper * sums["replay_tokens"]}


SEED_RANGE = 2**20
"""Seeds of rows are exact integers in float32, and thousands of them add up exactly in float64."""
Sums = Mapping[str, float]
"""Fields of :class:`~spear_training.algorithms.objective.SpearLoss` by name, summed over the tokens of a mini-batch and
averaged over mini-batches, where ``cov_lower`` and ``cov_upper`` are weighted by ``replay_tokens``; and ``grad_norm``,
``lr`` (if the learning rate changed), ``seconds``.
"""
TRAINED = ("key", "prompt_length", "response_length", "loss_tokens", "advantage", "replayed", "log_probs")
OPTIONAL = ("token_advantages", "ref_log_probs", "rollout_weights")
"""Columns of an update."""


@dataclass(frozen=True)
class Pass:
    """One pass over rows, in mini-batches.

    Attributes:
        rows: with ``weight`` and ``seed``, and :data:`OPTIONAL` columns if any.
        deal: the rows of each mini-batch.
        pieces: micro-batches of each rank's share, so that none has more rows than a mini-batch without replay.
        gamma: weight of the replayed rows' loss.
        bounds: of their covariance clip; None: those of each micro-batch itself.
        hold_learning_rate: a further pass of the same training step follows.
    """

    rows: RowTable
    deal: Deal
    pieces: int
    gamma: float
    bounds: tuple[float, float] | None
    hold_learning_rate: bool


class Actor(Protocol):
    """The policy. Methods keep the rows of tables and their order, and add columns."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks, which share each mini-batch."""

    def collect(self, rows: RowTable, metrics: dict[str, Any]) -> RowTable:
        """Add ``mask``, ``log_probs`` and, if any, ``ref_log_probs`` and ``rollout_weights``."""

    def read_tokens(self, rows: RowTable) -> RowTable:
        """Add ``ids`` and, with a vision tower, ``pictures``."""

    def write(self, rows: RowTable) -> RowTable:
        """Write replayed rows back: add ``key`` and, with a reference policy, ``ref_log_probs``."""

    def train(self, update: Pass) -> Sums:
        """Make an optimiser step for each mini-batch."""


@dataclass(frozen=True)
class UpdateSizes:
    """Rows of an optimiser step, L of the -norm modes, epochs of a pass, and whether shares are balanced."""

    rows_per_minibatch: int
    scale_factor: float
    epochs: int = 1
    balance: bool = True


@dataclass(eq=False)
class Updater:
    """Makes the optimiser steps of a training step."""

    settings: SpearSettings
    state: SpearState
    actor: Actor
    sizes: UpdateSizes

    def update(self, fresh: RowTable, drawn: RowTable | None, gamma: float, metrics: dict[str, Any]) -> None:
        """Train on ``fresh`` rows and those ``drawn`` from the replay buffer; log into ``metrics``.

        ``fresh`` rows have ``advantage`` and the columns of :meth:`Actor.collect`. ``drawn`` ones were written back by
        the actor, with recalibrated advantages; their loss weighs ``gamma``.
        """
        fresh = fresh.select((*TRAINED, *OPTIONAL)).add(replayed=np.zeros(len(fresh), dtype=bool))
        count = count_minibatches(len(fresh), self.sizes.rows_per_minibatch)
        if drawn is None:
            self._log(self._train(fresh, count, gamma), metrics)
            replay_steps = 0.0
        elif self.settings.sil.coupling is Coupling.JOINT:
            # As many steps as without replay: under Adam, additional ones would repeat on-policy directions.
            self._log(self._train(RowTable.join([fresh, _match(drawn, fresh)]), count, gamma), metrics)
            replay_steps = len(drawn) / len(fresh)
        else:
            self._log(self._train(fresh, count, gamma, hold_learning_rate=True), metrics)
            more = count_minibatches(len(drawn), self.sizes.rows_per_minibatch)
            own: dict[str, Any] = {}
            self._log(self._train(_match(drawn, fresh), more, gamma), own)
            shared = ("loss/sil", "clip/cov_fraction", "replay/ess", "actor/lr")
            metrics.update({name: own[name] for name in shared if name in own})
            metrics.update({f"sil/{name}": own[name] for name in ("actor/grad_norm", "clip/ppo_fraction")})
            metrics["timing_s/train_replayed_rows"] = own["timing_s/train_rows"]
            replay_steps = more / count
        replayed = 0 if drawn is None else len(drawn)
        metrics["replay/n_sil"] = replay_steps
        metrics["replay/share"] = replayed / (len(fresh) + replayed)
        metrics["actor/optimizer_steps"] = float(count * self.sizes.epochs)

    def _train(
        self, rows: RowTable, count: int, gamma: float, *, hold_learning_rate: bool = False
    ) -> tuple[Pass, Sums]:
        replayed, sizes, rng = rows.replayed, self.sizes, self.state.rng
        # Replayed rows make a mini-batch larger. It is then cut into as many micro-batches as it has the size of one
        # without them, so that replay never needs more memory.
        pieces = -(-len(rows) // (count * sizes.rows_per_minibatch)) if replayed.any() else 1
        deal = deal_rows(
            [np.flatnonzero(~replayed), np.flatnonzero(replayed)],
            rows.prompt_length + rows.response_length,
            count=count,
            shares=self.actor.ranks * pieces,
            rng=rng,
            balance=sizes.balance,
        )
        mode = self.settings.loss.aggregation.value
        # Weights speak of the whole mini-batch: the loss is their sum, however rows are spread over ranks and
        # micro-batches.
        weights = deal.weigh(rows.loss_tokens, replayed, mode=mode, loss_scale_factor=sizes.scale_factor)
        rows = rows.add(weight=weights, seed=rng.integers(SEED_RANGE, size=len(rows)))
        update = Pass(rows, deal, pieces, gamma, self.state.bounds, hold_learning_rate)
        sums = self.actor.train(update)
        # verl leaves an optimiser step with such a gradient out and goes on, with a policy that learns nothing.
        require_finite("loss", sums["on_policy"] + sums["self_imitation"])
        require_finite("norm of the gradient", sums["grad_norm"])
        replay_tokens = sums["replay_tokens"]
        # Bounds measured by several micro-batches are averaged by their tokens (see measure_loss).
        if replay_tokens and self.settings.cov.ratio > 0:
            self.state.move_bounds((sums["cov_lower"] / replay_tokens, sums["cov_upper"] / replay_tokens))
        return update, sums

    def _log(self, trained: tuple[Pass, Sums], metrics: dict[str, Any]) -> None:
        update, sums = trained
        rows, tokens, replay_tokens = update.rows, max(1.0, sums["tokens"]), sums["replay_tokens"]
        metrics["loss/on_policy"] = sums["on_policy"]
        metrics["clip/ppo_fraction"] = sums["clipped"] / tokens
        metrics["clip/dual_fraction"] = sums["dual_clipped"] / tokens
        metrics["kl/old"] = sums["kl_old"] / max(1.0, sums["tokens"] - replay_tokens)
        if self.settings.kl.coefficient > 0:
            metrics["kl/reference"] = sums["kl"] / tokens
        if replay_tokens:
            metrics["loss/sil"] = sums["self_imitation"]
            metrics["clip/cov_fraction"] = sums["covariance_clipped"] / replay_tokens
            squared = replay_tokens * sums["replay_ratio_squared"]
            metrics["replay/ess"] = sums["replay_ratio"] ** 2 / squared if squared else 0.0
        metrics["actor/grad_norm"] = sums["grad_norm"]
        # verl reports the learning rate with the last call of a step only.
        metrics.setdefault("actor/lr", float("nan"))
        if "lr" in sums:
            metrics["actor/lr"] = sums["lr"]
        lengths = rows.prompt_length + rows.response_length
        metrics["perf/rank_balance"] = update.deal.measure_balance(lengths, self.actor.ranks)
        metrics["timing_s/train_rows"] = sums["seconds"]


def require_finite(what: str, values: Any) -> None:
    """Stop a training whose numbers have gone wrong, before they are saved.

    Raises:
        SpearError: one of ``values`` is infinite or not a number.
    """
    found = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if not np.isfinite(found).all():
        raise SpearError(
            f"the {what} is {found[~np.isfinite(found)][0]}, and this step is not kept: lower the learning rate, or "
            "see whether the model's weights are sound; the same command resumes from the last checkpoint"
        )


def _match(drawn: RowTable, fresh: RowTable) -> RowTable:
    """Add the columns of ``fresh`` to replayed rows: equal advantages of a row's tokens, no rollout correction."""
    columns: dict[str, Any] = {"replayed": np.ones(len(drawn), dtype=bool)}
    if "token_advantages" in fresh:
        # A recalibrated advantage is one number for a row: there are no values of a critic to tell its tokens apart.
        columns["token_advantages"] = drawn.spread(drawn.advantage)
    if "rollout_weights" in fresh:
        columns["rollout_weights"] = np.ones(int(drawn.response_length.sum()), dtype=np.float32)
    return drawn.add(**columns).select(fresh.columns)
