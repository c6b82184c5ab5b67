"""Rows and their groups: bookkeeping of the estimators and filters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

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
    distinct, codes = torch.unique(first * (int(second.max()) + 1) + second, return_inverse=True)
    return codes, distinct.numel()


def check_rewards(rewards: Tensor, name: str = "rewards") -> Tensor:
    """Detach ``rewards`` [N] as float64. Raises ValueError unless it is a floating-point vector."""
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor [N], not {rewards.dtype} {tuple(rewards.shape)}")
    return rewards.detach().to(torch.float64)


def check_valid(valid: Tensor | Sequence[Any] | None, rows: int, device: torch.device) -> Tensor:
    """``valid`` [N] as bool; all rows if None. Raises ValueError for a wrong length."""
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
    """[G] sum of squared deviations of unit offsets from their mean."""

    def std(self, ddof: int) -> Tensor:
        """Deviation of each group [G]; 0 for at most ``ddof`` units."""
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
    """Mean, deviation and size of each group: the R-bar of ``eq:adv_vanilla`` and ``alg:sal``.

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
