"""From episode records to the rows of an update: rewards, filters, advantages. Pure functions, no verl."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spear_envs.core.errors import SpearError
from spear_training.algorithms import (
    Estimator,
    FormatMode,
    ToolCount,
    VoidFilter,
    compose_reward,
    gigpo_advantages,
    group_advantages,
    group_statistics,
    keep_high_variance_groups,
    overlong_mask,
    rloo_advantages,
    tool_call_reward,
    void_turn_mask,
)
from spear_training.algorithms.settings import RewardSettings, SpearSettings
from spear_training.custom_reward import CUSTOM
from spear_training.verl_plugin.records import EpisodeRecord, RowRecord

MALFORMED_PENALTY = -0.1


@dataclass(frozen=True)
class EpisodeReward:
    """R of one episode and the terms it is made of (``eq:rewardtotal``); ``tool_call`` is before mu."""

    outcome: float
    tool_call: float
    format: float
    total: float


def reward_episode(record: EpisodeRecord, settings: RewardSettings, mu: float) -> EpisodeReward:
    """Compose the reward of an episode from its raw terms, with the trainer's own mu and scales."""
    calls = record.tool_calls if settings.tool_count is ToolCount.VALID else record.turns
    if settings.format is FormatMode.BONUS:
        form = record.terms.get("format", 0.0)  # an episode that could not begin has no terms
    elif settings.format is FormatMode.PENALTY_PER_TURN:
        form = MALFORMED_PENALTY * (record.turns - record.well_formed_turns)
    else:
        form = 0.0
    outcome = settings.success if record.terms.get("outcome", 0.0) > 0 else settings.failure
    terms = {
        "outcome": record.terms.get(CUSTOM, outcome),
        "tool_call": tool_call_reward(calls, shape=settings.tool_shape.value, correct=record.won),
        "format": form,
    }
    return EpisodeReward(**terms, total=compose_reward(terms, mu))


@dataclass(frozen=True)
class PlannedRow:
    """A row that will be trained on."""

    row: RowRecord
    episode: EpisodeRecord
    reward: float
    advantage: float
    """0 with PPO until the critic has been asked."""


@dataclass(frozen=True)
class UpdatePlan:
    """What the records of a step amount to.

    Attributes:
        rewards: one an episode, in the order of the records.
        rows: rows to train on: of valid episodes, of kept groups, not masked.
        baselines: mean reward of each kept group (extends D_R).
        masked: number of rows each filter took out (``overlong``, ``void``, ``repetition``, ``low_variance``); a row
            that two filters hit counts in both.
        total_rows: rows of valid episodes before any filter.
        equal_groups: share of the groups in which all episodes earned the same.
    """

    rewards: tuple[EpisodeReward, ...]
    rows: tuple[PlannedRow, ...]
    baselines: tuple[float, ...]
    masked: dict[str, int]
    total_rows: int
    equal_groups: float


def plan_update(
    records: Sequence[EpisodeRecord], settings: SpearSettings, *, mu: float, max_response_length: int
) -> UpdatePlan:
    """Steps 2 to 5, 7 and the means of step 8 of a training step (``alg:sal``).

    Args:
        records: all episodes of the step.
        settings: ``spear`` node.
        mu: weight of the tool-call term at this step.
        max_response_length: limit of the over-long filter, tokens.
    """
    rewards = tuple(reward_episode(record, settings.reward, mu) for record in records)
    valid = [record.fault is None for record in records]
    pairs = [(i, row) for i, record in enumerate(records) if valid[i] for row in record.rows]
    filters = _mask_rows(records, pairs, settings, max_response_length)
    hit = np.any(list(filters.values()), axis=0) if pairs else np.zeros(0, dtype=bool)
    counted = list(valid)
    if settings.filter.exclude_from_baseline:
        # An episode stays out where nothing of it is trained on; with some rows left it still says how the task went.
        left = {i for (i, _), masked in zip(pairs, hit, strict=True) if not masked}
        counted = [ok and (i in left or not records[i].rows) for i, ok in enumerate(valid)]

    totals = torch.tensor([reward.total for reward in rewards], dtype=torch.float64)
    groups = [record.group for record in records]
    counted_mask = torch.tensor(counted, dtype=torch.bool)
    kept = keep_high_variance_groups(totals, groups, ratio=settings.filter.groups, valid=counted_mask).tolist()
    statistics = group_statistics(totals, groups, valid=counted_mask)
    kept_groups = {group for group, keep, ok in zip(groups, kept, counted, strict=True) if keep and ok}
    baselines = tuple(
        float(mean)
        for group, mean in zip(statistics.ids, statistics.mean.tolist(), strict=True)
        if group in kept_groups
    )

    low_variance = np.asarray([records[i].group not in kept_groups for i, _ in pairs], dtype=bool)
    advantages = _estimate(records, pairs, totals, counted, settings) if pairs else []
    rows = tuple(
        PlannedRow(row, records[i], rewards[i].total, float(advantages[n]))
        for n, (i, row) in enumerate(pairs)
        if counted[i] and not hit[n] and not low_variance[n] and row.loss_tokens
    )
    masked = {name: int(mask.sum()) for name, mask in filters.items()} | {"low_variance": int(low_variance.sum())}
    equal = float((statistics.std == 0).double().mean()) if statistics.ids else 0.0
    return UpdatePlan(rewards, rows, baselines, masked, len(pairs), equal)


def _mask_rows(
    records: Sequence[EpisodeRecord], pairs: Sequence[tuple[int, RowRecord]], settings: SpearSettings, limit: int
) -> dict[str, np.ndarray]:
    """Rows each Dr.BoT filter takes out of the loss: bool [N] a filter."""
    none = np.zeros(len(pairs), dtype=bool)
    filters = {"overlong": none, "void": none, "repetition": none}
    if not pairs:
        return filters
    if settings.filter.overlong:
        lengths = torch.tensor([row.response_length for _, row in pairs])
        finished = torch.tensor([row.finished for _, row in pairs])
        filters["overlong"] = overlong_mask(lengths, limit, finished=finished).numpy()
    if settings.filter.void is not VoidFilter.OFF:
        void = torch.tensor([row.void for _, row in pairs])
        ids = [records[i].trajectory_id for i, _ in pairs]
        filters["void"] = void_turn_mask(void, ids, scope=settings.filter.void.value).numpy()
    if settings.filter.repetition:
        filters["repetition"] = np.asarray([row.repetitive for _, row in pairs], dtype=bool)
    return filters


def _estimate(
    records: Sequence[EpisodeRecord],
    pairs: Sequence[tuple[int, RowRecord]],
    totals: torch.Tensor,
    counted: Sequence[bool],
    settings: SpearSettings,
) -> list[float]:
    """Advantage of each row [N]; group statistics run over all counted rows, masked ones included."""
    choice = settings.advantage
    rewards = totals[[i for i, _ in pairs]]
    groups = [records[i].group for i, _ in pairs]
    trajectories = [records[i].trajectory_id for i, _ in pairs]
    valid = torch.tensor([counted[i] for i, _ in pairs], dtype=torch.bool)
    if choice.estimator is Estimator.GAE:
        return [0.0] * len(pairs)  # the critic has not been asked yet
    if choice.estimator is Estimator.RLOO:
        return rloo_advantages(
            rewards, groups, trajectory_ids=trajectories, singleton=choice.singleton.value, valid=valid
        ).tolist()
    shared = dict(
        normalize_std=choice.normalize_std, weight=choice.weight.value, singleton=choice.singleton.value, valid=valid
    )
    if choice.estimator is Estimator.GRPO:
        return group_advantages(rewards, groups, trajectory_ids=trajectories, **shared).tolist()
    if choice.estimator is not Estimator.GIGPO:
        raise SpearError(_explain_estimator(choice.estimator))
    return gigpo_advantages(
        rewards,
        torch.tensor([row.step_reward for _, row in pairs], dtype=torch.float64),
        groups,
        trajectories,
        [row.anchor for _, row in pairs],
        turn_ids=[row.turn for _, row in pairs],
        gamma=choice.gamma,
        step_weight=choice.step_weight,
        **shared,
    ).total.tolist()


def _explain_estimator(given: object) -> str:
    name, known = str(getattr(given, "value", given)), [choice.value for choice in Estimator]
    near = difflib.get_close_matches(name, known, 1, cutoff=0)[0]
    return f"no rows can be planned with spear.advantage.estimator={name}; did you mean {near}?"
