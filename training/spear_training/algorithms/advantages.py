"""Group-relative advantages: GRPO with and without deviation, RLOO, GiGPO; and the groups that they compare."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from spear_training.algorithms.choices import GroupWeight, Singleton

Ids = Sequence[Hashable] | npt.NDArray[Any]
"""One hashable for each row."""


@dataclass(frozen=True)
class GroupStatistics:
    """Reward statistics of G groups, in order of first appearance.

    ``ids`` has G group ids, ``mean`` [G] the R-bar of ``eq:adv_vanilla``, ``std`` [G] the deviation and ``count`` [G]
    the number of trajectories (or rows, without trajectory ids).
    """

    ids: tuple[Hashable, ...]
    mean: Tensor
    std: Tensor
    count: Tensor


def encode_ids(ids: Ids, rows: int, name: str, device: torch.device) -> tuple[Tensor, list[Hashable]]:
    """Number ids by first appearance.

    Returns:
        codes [N] int64 and the list of distinct ids, so that ``distinct[codes[i]] == ids[i]``.

    Raises:
        ValueError: there are not ``rows`` ids, or one is not hashable.
    """
    # A dictionary takes any hashable in the order of the rows; torch.unique would need numbers, and would sort them.
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} entries for {rows} rows; give one id for each row")
    numbers: dict[Hashable, int] = {}
    try:
        codes = [numbers.setdefault(value, len(numbers)) for value in values]
    except TypeError as error:
        raise ValueError(f"{name} must hold hashable ids ({error})") from None
    return torch.tensor(codes, dtype=torch.int64, device=device), list(numbers)


def combine_codes(first: Tensor, second: Tensor) -> tuple[Tensor, int]:
    """Number the pairs of two code vectors [N]; return codes [N] and the number of distinct pairs."""
    if first.numel() == 0:
        return first.clone(), 0
    # A pair is a number of two digits, the second below its base.
    distinct, codes = torch.unique(first * (int(second.max()) + 1) + second, return_inverse=True)
    return codes, distinct.numel()


def check_rewards(rewards: Tensor, name: str = "rewards") -> Tensor:
    """Detach ``rewards`` [N] as float64. Raises ValueError unless it is a floating-point vector."""
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor [N], not {rewards.dtype} {tuple(rewards.shape)}")
    return rewards.detach().to(torch.float64)


def check_valid(valid: Tensor | Sequence[Any] | None, rows: int, device: torch.device) -> Tensor:
    """Return ``valid`` [N] as bool; all rows if None. Raises ValueError for a wrong length."""
    if valid is None:
        return torch.ones(rows, dtype=torch.bool, device=device)
    mask = torch.as_tensor(valid, device=device) > 0
    if mask.shape != (rows,):
        raise ValueError(f"valid has shape {tuple(mask.shape)} for {rows} rows; give one flag for each row")
    return mask


@dataclass(frozen=True)
class Grouping:
    """Valid rows gathered into units (trajectories or rows) and units into groups; rewards relative to ``reference``.

    Subtracting a member of the group first makes a group of equal rewards exactly zero: otherwise rounding errors would
    be positive advantages and enter the replay buffer.
    """

    ids: list[Hashable]
    group_of_row: Tensor
    """[N] int64."""
    unit_of_row: Tensor
    """[N] int64."""
    reference: Tensor
    """[G] one reward of each group."""
    offset: Tensor
    """[N] reward minus the reference of its group; 0 for invalid rows."""
    unit_offset: Tensor
    """[U] mean offset of each unit."""
    count: Tensor
    """[G] units in each group, as float64."""
    mean_offset: Tensor
    """[G] mean over the unit offsets of each group; 0 for an empty one."""
    squares: Tensor
    """[G] sum over a group's units (trajectories or rows) of the squared deviation from the group's mean."""

    def std(self, ddof: int) -> Tensor:
        """Return the deviation of each group [G]; 0 for at most ``ddof`` units."""
        # A group of one has no sample deviation; 0 here is turned into its advantage by the caller.
        degrees = self.count - ddof
        return (self.squares / degrees.clamp(min=1.0)).sqrt() * (degrees > 0)


def gather_groups(
    rewards: Tensor, group_ids: Ids, trajectory_ids: Ids | None, valid: Tensor | Sequence[Any] | None
) -> tuple[Grouping, Tensor]:
    """Group rows by id; units are the trajectories within a group, or the rows if ``trajectory_ids`` is None.

    Args:
        rewards: [N] float.
        group_ids, trajectory_ids: one hashable for each row. Equal trajectory ids in two groups are two trajectories.
        valid: [N] flags; other rows are ignored.

    Returns:
        The grouping and ``valid`` as bool [N].

    Raises:
        ValueError: wrong lengths or dtype.
    """
    values = check_rewards(rewards)
    rows, device = values.numel(), values.device
    groups, ids = encode_ids(group_ids, rows, "group_ids", device)
    present_rows = check_valid(valid, rows, device)
    if trajectory_ids is None:
        units, n_units = torch.arange(rows, device=device), rows
    else:
        trajectories, _ = encode_ids(trajectory_ids, rows, "trajectory_ids", device)
        units, n_units = combine_codes(groups, trajectories)

    n_groups, on = len(ids), present_rows.to(torch.float64)
    # Any valid member can be the reference; the largest does not depend on the order of the rows.
    reference = values.new_full((n_groups,), -torch.inf).scatter_reduce_(
        0, groups[present_rows], values[present_rows], "amax"
    )
    reference = torch.where(torch.isneginf(reference), 0.0, reference)
    offset = torch.where(present_rows, values - reference[groups], 0.0)
    unit_rows = values.new_zeros(n_units).index_add_(0, units, on)
    unit_offset = values.new_zeros(n_units).index_add_(0, units, offset) / unit_rows.clamp(min=1.0)
    group_of_unit = groups.new_zeros(n_units).scatter_(0, units, groups)
    # A trajectory whose rows are all invalid must not count as a member with reward 0.
    present = (unit_rows > 0).to(torch.float64)
    count = values.new_zeros(n_groups).index_add_(0, group_of_unit, present)
    mean_offset = values.new_zeros(n_groups).index_add_(0, group_of_unit, unit_offset) / count.clamp(min=1.0)
    deviation = (unit_offset - mean_offset[group_of_unit]) * present
    squares = values.new_zeros(n_groups).index_add_(0, group_of_unit, deviation.square())
    return Grouping(ids, groups, units, reference, offset, unit_offset, count, mean_offset, squares), present_rows


def group_statistics(
    rewards: Tensor,
    group_ids: Ids,
    *,
    trajectory_ids: Ids | None = None,
    ddof: int = 0,
    valid: Tensor | Sequence[Any] | None = None,
) -> GroupStatistics:
    """Return mean, deviation and size of each group: the R-bar of ``eq:adv_vanilla`` and ``alg:sal``.

    Args:
        rewards: [N] float.
        group_ids: N hashables; members need not be next to each other.
        trajectory_ids: N hashables; rows of a trajectory are averaged first, so that each counts once. None: each row
            is a trajectory.
        ddof: 0 for the population deviation, 1 for the sample deviation (0 where a group has one member).
        valid: [N] flags; a group without a valid row is left out.

    Raises:
        ValueError: wrong lengths or dtype.
    """
    grouping, _ = gather_groups(rewards, group_ids, trajectory_ids, valid)
    present = grouping.count > 0
    kept = [name for name, there in zip(grouping.ids, present.tolist(), strict=True) if there]
    return GroupStatistics(
        ids=tuple(kept),
        mean=(grouping.reference + grouping.mean_offset)[present].to(rewards.dtype),
        std=grouping.std(ddof)[present].to(rewards.dtype),
        count=grouping.count[present].to(torch.int64),
    )


@dataclass(frozen=True)
class GigpoAdvantages:
    """Advantages of GiGPO, each [N]: ``total`` = ``episode`` + w * ``step``."""

    episode: Tensor
    step: Tensor
    total: Tensor


def group_advantages(
    rewards: Tensor,
    group_ids: Ids,
    *,
    trajectory_ids: Ids | None = None,
    normalize_std: bool = False,
    weight: str = "trajectory",
    singleton: str = "zero",
    valid: Tensor | Sequence[Any] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """GRPO advantage: reward minus group mean (``eq:adv_vanilla``), undivided as in ``sec:botdetails``.

    Args:
        rewards: [N] float, the reward of the row's trajectory.
        group_ids: N hashables, in any order.
        trajectory_ids: N hashables, if trajectories have several rows.
        normalize_std: divide by the sample deviation (ddof 1) plus ``eps``.
        weight: ``"trajectory"`` counts each trajectory once in mean and deviation, ``"row"`` each row.
        singleton: advantage in a group with one valid member: ``"zero"``, or ``"raw"`` for the reward itself.
        valid: [N] flags; other rows are left out of all statistics and get 0.

    Returns:
        [N], dtype and device of ``rewards``.

    Raises:
        ValueError: wrong lengths, dtype or choices.
    """
    per_row = GroupWeight(weight) is GroupWeight.ROW
    grouping, valid = gather_groups(rewards, group_ids, None if per_row else trajectory_ids, valid)
    if per_row and trajectory_ids is not None:
        encode_ids(trajectory_ids, rewards.numel(), "trajectory_ids", rewards.device)  # the length must still match
    group = grouping.group_of_row
    deviation = grouping.offset - grouping.mean_offset[group]
    # The sample deviation plus eps, as verl's GRPO has it, so that both give the same numbers.
    scale = grouping.std(ddof=1) + eps if normalize_std else torch.ones_like(grouping.count)
    advantages = deviation / scale[group]
    return _finish(advantages, grouping, rewards, singleton, valid, (1.0 + eps) if normalize_std else 1.0)


def rloo_advantages(
    rewards: Tensor,
    group_ids: Ids,
    *,
    trajectory_ids: Ids | None = None,
    singleton: str = "zero",
    valid: Tensor | Sequence[Any] | None = None,
) -> Tensor:
    """Return the leave-one-out advantage: reward minus the mean of the other trajectories of the group (RLOO).

    Arguments, result and errors as in :func:`group_advantages`.
    """
    grouping, valid = gather_groups(rewards, group_ids, trajectory_ids, valid)
    group = grouping.group_of_row
    count = grouping.count[group]
    # The sum of the others is that of all minus one's own; offsets are relative to one member of the group, which
    # leaves the difference unchanged.
    others = count * grouping.mean_offset[group] - grouping.unit_offset[grouping.unit_of_row]
    advantages = grouping.offset - others / (count - 1.0).clamp(min=1.0)
    return _finish(advantages, grouping, rewards, singleton, valid, 1.0)


def _finish(
    advantages: Tensor, grouping: Grouping, rewards: Tensor, singleton: str, valid: Tensor, alone_scale: float
) -> Tensor:
    """Set singletons and invalid rows, and restore the caller's dtype."""
    if Singleton(singleton) is Singleton.RAW:
        # verl takes mean 0 and deviation 1 for a group of one, and adds eps to the latter.
        alone = rewards.detach().to(torch.float64) / alone_scale
    else:
        alone = torch.zeros_like(advantages)
    advantages = torch.where(grouping.count[grouping.group_of_row] > 1, advantages, alone)
    return torch.where(valid, advantages, 0.0).to(rewards.dtype)


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Return of each step of a trajectory, sum of gamma^k r_{t+k}. ``rewards`` [T] float in order of time -> [T]."""
    values = check_rewards(rewards)
    same = torch.zeros(values.numel(), dtype=torch.int64, device=values.device)
    return discount_rows(values, same, same, gamma).to(rewards.dtype)


def gigpo_advantages(
    rewards: Tensor,
    step_rewards: Tensor,
    group_ids: Ids,
    trajectory_ids: Ids,
    anchors: Ids,
    *,
    turn_ids: Sequence[int] | Tensor | None = None,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize_std: bool = False,
    weight: str = "trajectory",
    singleton: str = "zero",
    valid: Tensor | Sequence[Any] | None = None,
    eps: float = 1e-6,
    step_penalties: Tensor | None = None,
) -> GigpoAdvantages:
    """GiGPO: the episode advantage of the group plus ``step_weight`` times a step advantage (``tab:ALFWorldwebshop``).

    The step advantage compares the discounted returns of step rewards, from this turn on, among all rows of the group
    with an equal anchor; a unique anchor gets 0.

    Args:
        rewards: [N] float, reward of the row's trajectory.
        step_rewards: [N] float, reward of the row's turn, without a tool-call or format bonus.
        group_ids, trajectory_ids, anchors: N hashables each.
        turn_ids: [N] order in time within a trajectory; None: the order of the rows.
        gamma: discount of step returns.
        normalize_std, weight, singleton, valid, eps: as in :func:`group_advantages`; the deviation divides both parts.
        step_penalties: [N] float, added to the return of the row's own turn, but not to those of earlier ones.

    Raises:
        ValueError: wrong lengths, dtype or choices.
    """
    episode = group_advantages(
        rewards,
        group_ids,
        trajectory_ids=trajectory_ids,
        normalize_std=normalize_std,
        weight=weight,
        singleton=singleton,
        valid=valid,
        eps=eps,
    )
    steps = check_rewards(step_rewards, "step_rewards")
    rows, device = rewards.numel(), rewards.device
    if steps.numel() != rows:
        raise ValueError(f"step_rewards has {steps.numel()} entries for {rows} rows; give one for each row")
    on = check_valid(valid, rows, device)
    groups, _ = encode_ids(group_ids, rows, "group_ids", device)
    trajectories, _ = combine_codes(groups, encode_ids(trajectory_ids, rows, "trajectory_ids", device)[0])
    places, _ = combine_codes(groups, encode_ids(anchors, rows, "anchors", device)[0])
    order = torch.arange(rows, device=device) if turn_ids is None else torch.as_tensor(turn_ids, device=device)
    if order.shape != (rows,):
        raise ValueError(f"turn_ids has shape {tuple(order.shape)} for {rows} rows; give one number for each row")

    returns = torch.zeros_like(steps)
    returns[on] = discount_rows(steps[on], trajectories[on], order[on], gamma)
    if step_penalties is not None:
        returns = returns + check_rewards(step_penalties, "step_penalties")
    # Rows that share a state are the members of a group, whichever trajectory they are of: GiGPO's second level.
    step = group_advantages(returns, places, normalize_std=normalize_std, weight="row", valid=on, eps=eps)
    step = step.to(rewards.dtype)
    return GigpoAdvantages(episode=episode, step=step, total=episode + step_weight * step)


def discount_rows(rewards: Tensor, trajectories: Tensor, order: Tensor, gamma: float) -> Tensor:
    """Return the discounted return of each row of many trajectories [N]; ``order`` [N] is its place in time within a
    trajectory.

    Rows are sorted by their distance from the end of their trajectory; each level only needs the previous one. The work
    is proportional to the rows plus the longest trajectory, without padding.
    """
    rows = rewards.numel()
    if rows == 0:
        return rewards.clone()
    by_time = torch.argsort(order, stable=True)
    chain = by_time[torch.argsort(trajectories[by_time], stable=True)]  # trajectory by trajectory, in order of time
    lengths = torch.bincount(trajectories)
    lengths = lengths[lengths > 0]
    end = torch.repeat_interleave(lengths.cumsum(0), lengths)
    to_go = end - 1 - torch.arange(rows, device=rewards.device)
    by_level = torch.argsort(to_go, stable=True)
    level_sizes = torch.bincount(to_go).tolist()
    returns = rewards[chain]
    at = level_sizes[0]
    for size in level_sizes[1:]:
        # Rows as far from their end as this level: the next row of the chain is one level nearer, and finished.
        here = by_level[at : at + size]
        returns[here] += gamma * returns[here + 1]
        at += size
    return torch.empty_like(returns).scatter_(0, chain, returns)
