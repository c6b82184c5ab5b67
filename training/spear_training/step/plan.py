"""Rows of an update from episodes: rewards, filters, groups (``alg:sal``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spear_envs.core.rewards import PAID_TERMS
from spear_training.algorithms import (
    FormatMode,
    RowTable,
    SpearSettings,
    ToolCount,
    compose_reward,
    filter_rows,
    group_statistics,
    keep_high_variance_groups,
    tool_call_reward,
)
from spear_training.algorithms.advantages import GroupStatistics
from spear_training.algorithms.choices import StepReward
from spear_training.algorithms.estimators import MALFORMED_PENALTY, penalize_rows
from spear_training.algorithms.settings import RewardSettings
from spear_training.run.custom_reward import CUSTOM
from spear_training.step.records import EpisodeRecord, Rollout


@dataclass(frozen=True)
class EpisodeReward:
    """R of one episode and what it is composed of (``eq:rewardtotal``).

    A penalty of rows is in the format term as its mean over the rows of the episode.
    """

    terms: Mapping[str, float]
    """Value of each of ``PAID_TERMS``; ``tool_call`` is before mu."""
    total: float


def reward_episode(record: EpisodeRecord, settings: RewardSettings, mu: float) -> EpisodeReward:
    """Compose the reward of an episode from its raw terms, with the trainer's own mu and scales.

    It has no penalty of rows, which :func:`plan_rows` adds.
    """
    calls = record.tool_calls if settings.tool_count is ToolCount.VALID else record.turns + (record.began or 0)
    form = 0.0
    if settings.format is FormatMode.BONUS:
        form = record.terms.get("format", 0.0)  # an episode that could not start lacks terms
    elif settings.format is FormatMode.PENALTY_PER_TURN:
        form = MALFORMED_PENALTY * (record.turns - record.well_formed_turns)
    # Linear: an environment's graded outcome (from -1 to 1) stays graded at the trainer's scale.
    share = (record.terms.get("outcome", -1.0) + 1.0) / 2.0
    outcome = settings.failure + share * (settings.success - settings.failure)
    tool_call = tool_call_reward(calls, shape=settings.tool_shape.value, correct=record.won)
    if settings.tool_count is ToolCount.ENVIRONMENT:
        tool_call = record.terms.get("tool_call", 0.0)
    own = {"outcome": record.terms.get(CUSTOM, outcome), "tool_call": tool_call, "format": form}
    terms = {name: own[name] if name in own else record.terms.get(name, 0.0) for name in PAID_TERMS}
    return EpisodeReward(terms, compose_reward(terms, mu))


def find_differing_groups(records: Sequence[EpisodeRecord], settings: RewardSettings, mu: float) -> list[str]:
    """Return groups whose valid episodes do not all earn the same, in the order of the records."""
    totals: dict[str, set[float]] = {}
    for record in records:
        if record.rows:
            totals.setdefault(record.group, set()).add(reward_episode(record, settings, mu).total)
    return [group for group, found in totals.items() if len(found) > 1]


@dataclass(frozen=True)
class StepPlan:
    """Rewards, rows and filters of a step.

    Attributes:
        rewards: one an episode, in the order of the records.
        rows: all rows that count in their group, with ``reward`` and ``kept`` (passed by all filters).
        baselines: mean reward of each kept group (extends D_R).
        masked: number of rows removed by each filter; a row removed by two counts in both.
        total_rows: rows of valid episodes before any filter.
        equal_groups: share of the groups in which all episodes earned the same.
        same_outcome: share of the groups in which all episodes had the same outcome, whatever else they earned.
    """

    rewards: tuple[EpisodeReward, ...]
    rows: RowTable
    baselines: tuple[float, ...]
    masked: dict[str, int]
    total_rows: int
    equal_groups: float
    same_outcome: float


def plan_rows(
    rollout: Rollout,
    settings: SpearSettings,
    *,
    mu: float,
    max_response_length: int,
    longest_row: int | None = None,
    chosen: Sequence[str] | None = None,
) -> StepPlan:
    """Return the rewards, loss masks and kept groups of a step, without episodes with a fault or without rows.

    ``mu`` is the weight of the tool-call term. ``max_response_length`` and ``longest_row`` are the limits of the
    over-long filter in tokens, of a response and with its prompt. ``chosen`` are the groups that dynamic sampling keeps
    (None: all).
    """
    records, rows = rollout.records, rollout.rows
    rewards = [reward_episode(record, settings.reward, mu) for record in records]
    place = {record.trajectory: number for number, record in enumerate(records)}
    owner = np.asarray([place[name] for name in rows.trajectory.tolist()], dtype=np.int64)
    totals = torch.tensor([reward.total for reward in rewards], dtype=torch.float64)
    outcomes = torch.tensor([reward.terms["outcome"] for reward in rewards], dtype=torch.float64)
    if settings.advantage.step_reward is StepReward.OUTCOME:
        # A user's score has a scale of its own, without a lost episode's.
        lost = [0.0 if CUSTOM in record.terms else settings.reward.failure for record in records]
        # As precise as the outcomes: a lost episode earns exactly 0.
        rows = _pay_outcomes(rows, (outcomes - torch.tensor(lost, dtype=torch.float64)).numpy()[owner])
    penalties = penalize_rows(rows, settings)
    rows = rows.add(reward=totals.numpy()[owner] + penalties)
    mean_penalties = np.bincount(owner, weights=penalties, minlength=len(records)) / np.maximum(
        np.bincount(owner, minlength=len(records)), 1
    )
    # Filters take rows out of the loss, not out of their group: a masked failure is still a failure, and the mean of
    # its group would be too high without it.
    filters = filter_rows(rows, settings, max_response_length, longest_row)
    hit = np.any(list(filters.values()), axis=0)

    counted = np.asarray([record.rows > 0 for record in records], dtype=bool)
    if settings.filter.exclude_from_baseline:
        # An episode without rows in the loss is left out; with some rows left its reward still counts.
        counted &= np.isin(np.arange(len(records)), owner[~hit])
    groups, flags = [record.group for record in records], torch.from_numpy(counted)
    wanted = flags
    if chosen is not None:
        wanted = flags & torch.tensor(np.isin(groups, list(chosen)), dtype=torch.bool)
    # By totals without penalties of rows: groups are chosen by what the policy did, not by how it wrote it.
    kept = keep_high_variance_groups(totals, groups, ratio=settings.filter.groups, valid=wanted).tolist()
    kept_groups = {group for group, keep in zip(groups, kept, strict=True) if keep}
    # A penalty of rows does not choose groups, but it is in their means (D_R), as in the authors' code.
    paid = group_statistics(totals + torch.from_numpy(mean_penalties), groups, valid=flags)

    out = np.asarray([name not in kept_groups for name in rows.group.tolist()], dtype=bool)
    # A row may lack loss tokens after rollout correction or truncation; it would weigh nothing and divide by 0.
    rows = rows.add(kept=~hit & ~out & counted[owner] & (rows.loss_tokens > 0))
    return StepPlan(
        rewards=tuple(
            EpisodeReward({**reward.terms, "format": reward.terms["format"] + mean}, reward.total + mean)
            for reward, mean in zip(rewards, mean_penalties.tolist(), strict=True)
        ),
        rows=rows.take(counted[owner]),
        baselines=tuple(m for group, m in zip(paid.ids, paid.mean.tolist(), strict=True) if group in kept_groups),
        masked={name: int(mask.sum()) for name, mask in filters.items()} | {"low_variance": int(out.sum())},
        total_rows=len(hit),
        equal_groups=_share_equal(paid),
        same_outcome=_share_equal(group_statistics(outcomes, groups, valid=flags)),
    )


def _pay_outcomes(rows: RowTable, outcomes: np.ndarray) -> RowTable:
    """Return the rows with turns that earn nothing but their episodes' ``outcomes`` [N], each in the last turn."""
    step, turn = np.zeros(len(rows)), np.zeros(len(rows.turn_reward))
    owner, last = np.repeat(np.arange(len(rows)), rows.turns), dict[str, int]()
    for place in np.argsort(rows.turn_number, kind="stable").tolist():
        # In order of turns, so that the last one of each trajectory stays.
        last[rows.trajectory[owner[place]]] = place
    places = np.fromiter(last.values(), dtype=np.int64, count=len(last))
    step[owner[places]] = turn[places] = outcomes[owner[places]]
    return rows.add(step_reward=step, turn_reward=turn)


def _share_equal(statistics: GroupStatistics) -> float:
    return float((statistics.std == 0).double().mean()) if statistics.ids else 0.0
