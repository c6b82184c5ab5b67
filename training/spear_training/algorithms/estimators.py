"""Advantage estimators over the table of rows: choices of ``advantage.estimator``.

An estimator is a function ``f(rows, settings) -> advantages``: [N] of the rows, or of their response tokens,
concatenated. It gets all rows of the step that count, including those that a filter removed from the loss, with
``reward``, ``group``, ``trajectory``, ``turn``, ``anchor``, ``step_reward`` and the columns of turns. With
:func:`needs_critic` it also gets ``mask`` and ``values``, and only the episodes with a row in the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spear_training.algorithms.advantages import discount_rows, gigpo_advantages, group_advantages, rloo_advantages
from spear_training.algorithms.choices import FormatMode, GroupWeight
from spear_training.algorithms.critic import episode_advantages
from spear_training.algorithms.registry import ESTIMATORS
from spear_training.algorithms.rows import Array, RowTable
from spear_training.algorithms.schema import SettingsError
from spear_training.algorithms.settings import SpearSettings

F = TypeVar("F", bound=Callable[..., Any])

MALFORMED_PENALTY = -0.1
"""Reward of a malformed turn, if the format has a penalty."""


def penalize_rows(rows: RowTable, settings: SpearSettings) -> Array:
    """Return the penalties of rows [N] for their malformed turns, which are in ``reward``; 0 with another
    ``reward.format``.
    """
    if settings.reward.format is not FormatMode.PENALTY_PER_ROW:
        return np.zeros(len(rows))
    return MALFORMED_PENALTY * rows.malformed


def needs_critic(estimator: F) -> F:
    """Mark an estimator that reads ``values``: the training then has a critic."""
    estimator.critic = True  # type: ignore[attr-defined]
    return estimator


@ESTIMATORS.register("grpo")
def estimate_grpo(rows: RowTable, settings: SpearSettings) -> Tensor:
    """Reward minus group mean (``eq:adv_vanilla``)."""
    choice = settings.advantage
    return group_advantages(
        torch.from_numpy(rows.reward),
        rows.group,
        trajectory_ids=rows.trajectory,
        normalize_std=choice.normalize_std,
        weight=choice.weight.value,
        singleton=choice.singleton.value,
    )


@ESTIMATORS.register("rloo")
def estimate_rloo(rows: RowTable, settings: SpearSettings) -> Tensor:
    """Reward minus the mean of the other trajectories of the group, or of all its other rows (``weight=row``)."""
    by_row = settings.advantage.weight is GroupWeight.ROW
    return rloo_advantages(
        torch.from_numpy(rows.reward),
        rows.group,
        trajectory_ids=None if by_row else rows.trajectory,
        singleton=settings.advantage.singleton.value,
    )


@ESTIMATORS.register("gigpo")
def estimate_gigpo(rows: RowTable, settings: SpearSettings) -> Tensor:
    """Group mean over episodes plus group mean over steps with equal anchors."""
    choice = settings.advantage
    return gigpo_advantages(
        torch.from_numpy(rows.reward),
        torch.from_numpy(rows.step_reward),
        rows.group,
        rows.trajectory,
        rows.anchor,
        turn_ids=rows.turn,
        gamma=choice.gamma,
        step_weight=choice.step_weight,
        normalize_std=choice.normalize_std,
        weight=choice.weight.value,
        singleton=choice.singleton.value,
        step_penalties=torch.from_numpy(penalize_rows(rows, settings)),
    ).total


@ESTIMATORS.register("gae")
@needs_critic
def estimate_gae(rows: RowTable, settings: SpearSettings) -> Tensor:
    """Return generalised advantage estimates over episodes with the critic's values: PPO (``sec:ppogrpo``).

    A row's own penalty is discounted within that row alone. Advantages are linear in rewards, so it is added as the
    advantage of a row on its own, without values.
    """
    _, first, episode = np.unique(rows.trajectory.astype(str), return_index=True, return_inverse=True)
    penalties, mask = penalize_rows(rows, settings), torch.from_numpy(rows.mask)
    discounts = {"gamma": settings.critic.gamma, "lam": settings.critic.lam}
    # ``reward`` includes the row's own penalty. Without it the episode's reward is left, the same in each of its
    # rows, so the first row has it.
    values, paid = torch.from_numpy(rows.values), (rows.reward - penalties)[first]
    found, _ = episode_advantages(values, mask, rows.response_length, episode, paid, **discounts)
    if penalties.any():
        nothing, alone = torch.zeros_like(values), np.arange(len(rows))
        # Values are 0 in this second pass: they are already in the first one, and advantages are linear in rewards.
        found = found + episode_advantages(nothing, mask, rows.response_length, alone, penalties, **discounts)[0]
    return found


@ESTIMATORS.register("stepwise")
def estimate_stepwise(rows: RowTable, settings: SpearSettings) -> Array:
    """Return the credit of each turn: the group's episode advantage plus ``step_weight`` times an advantage of the
    turn.

    The latter compares the environment's rewards from this turn on, discounted by ``gamma``, with the mean of the group
    at the same turn. In a conversation, whose turns share a row, tokens of one turn have equal advantages.
    """
    choice = settings.advantage
    episode = np.asarray(estimate_grpo(rows, settings))
    # One entry a turn from here on; in the layout per_turn that is one a row.
    owner, number = np.repeat(np.arange(len(rows)), rows.turns), rows.turn_number
    names = {name: code for code, name in enumerate(dict.fromkeys(rows.trajectory.tolist()))}
    chain = np.asarray([names[name] for name in rows.trajectory.tolist()], dtype=np.int64)[owner]
    returns = discount_rows(
        torch.from_numpy(rows.turn_reward), torch.from_numpy(chain), torch.from_numpy(number), choice.gamma
    )
    places = list(zip(rows.group[owner].tolist(), number.tolist(), strict=True))
    step = group_advantages(returns, places, normalize_std=choice.normalize_std, weight="row").numpy()
    return np.repeat(episode[owner] + choice.step_weight * step, _measure_turns(rows))


def _measure_turns(rows: RowTable) -> Array:
    """Return the response tokens of each turn, from the end of the previous one; the last includes all that follow."""
    last = np.cumsum(rows.turns) - 1
    ends = rows.turn_end.copy()
    ends[last] = rows.response_length
    lengths = np.diff(ends, prepend=0)
    first = last - rows.turns + 1
    lengths[first] = ends[first]
    return lengths


def estimate(rows: RowTable, settings: SpearSettings) -> Array:
    """Return advantages by the estimator of ``settings``, float64: [N] of the rows, or [S] of their response tokens.

    Raises:
        SettingsError: the result has another shape or non-finite numbers.
    """
    name = settings.advantage.estimator
    found = ESTIMATORS.call(name, rows, settings)
    try:
        values = np.asarray(found.detach().cpu() if isinstance(found, Tensor) else found, dtype=np.float64)
    except (TypeError, ValueError):
        raise SettingsError(f"advantage.estimator={name} gave {found!r:.80}, which are not numbers") from None
    tokens = int(rows.response_length.sum())
    if values.shape not in ((len(rows),), (tokens,)):
        raise SettingsError(
            f"advantage.estimator={name} gave {list(values.shape)} advantages for {len(rows)} rows with {tokens} "
            "response tokens: give one for each row, or one for each token"
        )
    if not np.isfinite(values).all():
        raise SettingsError(f"advantage.estimator={name} gave advantages that are not finite")
    return values


def average_tokens(values: Array, mask: Array, rows: RowTable) -> Array:
    """Return the mean of token values [S] over each row's tokens on ``mask`` [S]: [N], 0 for a row without any."""
    owner = rows.spread(np.arange(len(rows)))
    sums = np.bincount(owner, weights=np.where(mask, values, 0.0), minlength=len(rows))
    return sums / np.maximum(np.bincount(owner, weights=mask, minlength=len(rows)), 1.0)
