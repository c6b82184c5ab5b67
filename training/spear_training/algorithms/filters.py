"""Filters of Dr.BoT (``sec:botdetails``): low-variance groups, over-long, void, repetitive and unreadable responses.

``filter.custom`` names further ones: ``f(rows, settings) -> flags`` [N], True to remove the row from the loss.
Its reward still counts in its group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spear_training.algorithms.advantages import Ids, encode_ids, gather_groups
from spear_training.algorithms.choices import VoidFilter
from spear_training.algorithms.registry import FILTERS
from spear_training.algorithms.rows import Array, RowTable
from spear_training.algorithms.schema import SettingsError
from spear_training.algorithms.settings import SpearSettings


def filter_rows(rows: RowTable, settings: SpearSettings, limit: int, longest: int | None = None) -> dict[str, Array]:
    """Return the rows that each filter removes from the loss: bool [N] by name, all False if it is switched off.

    Args:
        rows: of the step.
        settings: ``filter`` has the switches.
        limit: of a response, tokens.
        longest: of prompt and response together. A later row of a conversation may begin with a longer prompt, and has
            the rest. None: no limit.

    Raises:
        SettingsError: the result of a user's filter has another shape.
    """
    choice = settings.filter
    lengths, finished = torch.from_numpy(rows.response_length), torch.from_numpy(rows.finished)
    # An episode that outgrew the context failed for lack of room, like a response at its limit.
    room = torch.full_like(lengths, limit)
    if longest is not None:
        room = room.minimum(longest - torch.from_numpy(rows.prompt_length))
    overlong = overlong_mask(lengths, room, finished=finished).numpy() | rows.truncated
    void, scope = rows.void, choice.void
    if scope is VoidFilter.INCOMPLETE:
        void, scope = rows.incomplete, VoidFilter.TURN
    found = {
        "overlong": overlong & choice.overlong,
        "void": void_turn_mask(torch.from_numpy(void), rows.trajectory, scope=scope.value).numpy(),
        "repetition": rows.repetitive & choice.repetition,
        "unreadable": rows.unreadable & choice.unreadable,
    }
    for name in choice.custom:
        flags = np.asarray(FILTERS.call(name, rows, settings))
        if flags.shape != (len(rows),) or (len(rows) and flags.dtype.kind not in "biu"):
            raise SettingsError(
                f"filter.custom={name} gave {flags.dtype} {list(flags.shape)} for {len(rows)} rows: "
                "give true or false for each row"
            )
        found[name] = flags.astype(bool)
    return found


def keep_high_variance_groups(
    rewards: Tensor,
    group_ids: Ids,
    *,
    ratio: float = 0.75,
    trajectory_ids: Ids | None = None,
    ddof: int = 0,
    valid: Tensor | Sequence[Any] | None = None,
) -> Tensor:
    """Keep the max(1, floor(ratio n)) groups of largest reward deviation, the first in case of a tie.

    Args:
        rewards: [N] float, the reward of the row's trajectory.
        group_ids: N hashables; members need not be next to each other.
        ratio: share of groups to keep, in (0, 1].
        trajectory_ids: N hashables where a trajectory has several rows; each then counts once.
        ddof: 0 for the population deviation.
        valid: [N] flags; other rows are ignored and never kept.

    Returns:
        bool [N], True where the row stays.

    Raises:
        ValueError: wrong lengths, dtype or ratio.
    """
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio must be in (0, 1], not {ratio}")
    grouping, valid = gather_groups(rewards, group_ids, trajectory_ids, valid)
    present = grouping.count > 0
    size = count_kept(ratio, int(present.sum()))
    std = grouping.std(ddof)
    # Rounded, so that equal deviations stay equal for any order of the members.
    largest = float(std.max()) if std.numel() else 0.0
    rank = torch.where(present, torch.round(std / (largest or 1.0) * 1e9), -1.0)
    order = torch.argsort(rank, descending=True, stable=True)[:size]
    chosen = torch.zeros_like(present)
    chosen[order] = True
    return chosen[grouping.group_of_row] & valid


def count_kept(ratio: float, groups: int) -> int:
    """Return how many of ``groups`` a share of ``ratio`` keeps, at least one."""
    # The small term rounds products such as 0.29 * 100 = 28.999999999999996 to the integer that is meant.
    return max(1, math.floor(ratio * groups + 1e-9))


def overlong_mask(lengths: Tensor, limit: int | Tensor, *, finished: Tensor | None = None) -> Tensor:
    """Return the responses at the limit: bool [N], True to remove the row from the loss.

    Args:
        lengths: [N] response lengths in tokens.
        limit: the maximum response length, of all rows or of each [N].
        finished: [N], on if the response ended by itself; such a row stays at exactly the limit. None: unknown, so
            every row at the limit is removed.
    """
    if finished is None:
        return lengths >= limit
    return (lengths > limit) | ((lengths == limit) & ~(finished > 0))


def void_turn_mask(void: Tensor, trajectory_ids: Ids, *, scope: str = "trajectory") -> Tensor:
    """Return the rows to remove from the loss for void turns: bool [N].

    Args:
        void: [N], on if the turn has neither an action (or tool call) nor a final answer.
        trajectory_ids: N hashables.
        scope: ``"trajectory"`` removes all rows of the trajectory, ``"turn"`` only the void row, ``"off"`` none.

    Raises:
        ValueError: wrong lengths or an unknown scope.
    """
    flags = void > 0
    codes, distinct = encode_ids(trajectory_ids, flags.numel(), "trajectory_ids", flags.device)
    kind = VoidFilter(scope)
    if kind is VoidFilter.OFF:
        return torch.zeros_like(flags)
    if kind is VoidFilter.TURN:
        return flags.clone()
    # One void turn spoils its trajectory: the reward is of the whole episode, and would reinforce that turn as well.
    spoiled = torch.zeros(len(distinct), dtype=torch.bool, device=flags.device)
    spoiled[codes[flags]] = True
    return spoiled[codes]
