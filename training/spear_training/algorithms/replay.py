"""The replay buffer D of self-imitation."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spear_training.algorithms.baseline import BaselineBuffer, recalibrate_advantages
from spear_training.algorithms.choices import ReplayUnit
from spear_training.algorithms.errors import StateMismatchError
from spear_training.algorithms.packing import PackedEntry, ReplayEntry, pack_entry, read_mask, unpack_entry


@dataclass(frozen=True)
class ReplayAddition:
    """What became of the rows of one :meth:`ReplayBuffer.add`."""

    kept: int = 0
    dropped_nonpositive: int = 0
    """Rows whose advantage is not above 0."""
    dropped_other: int = 0
    """Rows without a loss token, or without a tool call where one is required."""


@dataclass(frozen=True)
class ReplayDraw:
    """Rows drawn for self-imitation.

    ``entries`` has K rows and ``advantages`` [K] float64 their recalibrated advantages, all above 0. ``considered``
    (size before the draw), ``eligible`` (of these, above the baseline) and ``drawn`` count in the unit of the buffer.
    """

    entries: list[ReplayEntry]
    advantages: Tensor
    considered: int
    eligible: int
    drawn: int

    @property
    def discarded(self) -> int:
        """What the reset threw away undrawn."""
        return self.considered - self.drawn

    def mean_age(self, step: int) -> float:
        """Mean age of the drawn rows at global step ``step``, in steps; 0 where nothing was drawn."""
        return sum(step - entry.step for entry in self.entries) / max(1, len(self.entries))


class ReplayBuffer:
    """Buffer D of rewarded rows, emptied by each draw (``sec:self-imitation-learning``, ``alg:sal``).

    Args:
        capacity: N_D, counted in ``unit``.
        unit: ``"sample"`` for rows, ``"trajectory"`` for trajectories, whose kept rows are drawn together.
        trigger_ratio: the buffer is ready at this multiple of its capacity.
        max_age: steps after which :meth:`evict` removes a row; None: never.
        require_tool_call: keep only rows of trajectories that called a tool.
        power_of_two: draw the largest power of two of units that is not above min(eligible, capacity).
        seed: of the buffer's own generator.

    Rows are kept without padding: 4 bytes for an id, 4 for the log-prob of a loss token, a bit for the mask.

    Raises:
        ValueError: capacity, trigger or age out of range, or an unknown unit.
    """

    def __init__(
        self,
        capacity: int = 2048,
        *,
        unit: str = "sample",
        trigger_ratio: float = 1.0,
        max_age: int | None = 5,
        require_tool_call: bool = False,
        power_of_two: bool = False,
        seed: int = 0,
    ) -> None:
        if capacity < 1 or trigger_ratio <= 0 or (max_age is not None and max_age < 0):
            raise ValueError(
                "capacity must be 1 or more, trigger_ratio above 0 and max_age 0 or more, "
                f"not {capacity}, {trigger_ratio} and {max_age}"
            )
        self.capacity = int(capacity)
        self.unit = ReplayUnit(unit)
        self.trigger_ratio = float(trigger_ratio)
        self.max_age = max_age
        self.require_tool_call = require_tool_call
        self.power_of_two = power_of_two
        self.last_addition = ReplayAddition()
        self._rows: list[PackedEntry] = []
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """Units held: rows, or trajectories."""
        return len(self._rows) if self.unit is ReplayUnit.SAMPLE else len(set(map(_trajectory_key, self._rows)))

    @property
    def nbytes(self) -> int:
        """Memory of the rows in bytes."""
        return sum(row.nbytes for row in self._rows)

    def add(self, entries: Iterable[ReplayEntry]) -> int:
        """Copy rows in whose advantage is above 0 and that have a loss token (the gate A_j > 0 of ``eq:silvanilla``).

        How many were dropped and why is in ``last_addition``.

        Returns:
            rows kept.

        Raises:
            ValueError: a row to keep is malformed; the buffer is left as it was.
        """
        new: list[PackedEntry] = []
        nonpositive = other = 0
        for entry in entries:
            if entry.advantage <= 0:
                nonpositive += 1
            elif not read_mask(entry).any() or (self.require_tool_call and entry.tool_calls < 1):
                other += 1
            else:
                new.append(pack_entry(entry))
        self._rows.extend(new)
        self.last_addition = ReplayAddition(len(new), nonpositive, other)
        return len(new)

    def evict(self, step: int) -> int:
        """Remove rows with ``step - entry.step > max_age``; returns how many."""
        if self.max_age is None:
            return 0
        before = len(self._rows)
        self._rows = [row for row in self._rows if step - row.step <= self.max_age]
        return before - len(self._rows)

    def is_ready(self) -> bool:
        """Whether there is enough to replay: not empty, and at least ``trigger_ratio * capacity`` units."""
        return bool(self._rows) and len(self) >= self.trigger_ratio * self.capacity

    def draw(self, baseline: BaselineBuffer | None) -> ReplayDraw:
        """Draw min(eligible, capacity) units uniformly, without replacement, and empty the buffer (``alg:sal``).

        Eligible are rows whose recalibrated advantage is above 0 (``eq:silvanilla``), and trajectories with such a row.

        Args:
            baseline: D_R. None, or a buffer of capacity 0, switches recalibration off: the stored advantages are used.

        Raises:
            ValueError: the baseline buffer is empty; nothing is drawn then.
        """
        if baseline is None or baseline.capacity == 0:
            advantages = torch.tensor([row.advantage for row in self._rows], dtype=torch.float64)
        else:
            rewards = torch.tensor([row.reward for row in self._rows], dtype=torch.float64)
            advantages = recalibrate_advantages(rewards, baseline)
        considered = len(self)
        units: dict[Hashable, list[int]] = {}
        for index in (advantages > 0).nonzero().flatten().tolist():
            key = index if self.unit is ReplayUnit.SAMPLE else _trajectory_key(self._rows[index])
            units.setdefault(key, []).append(index)
        size = min(len(units), self.capacity)
        if self.power_of_two and size:
            size = 1 << (size.bit_length() - 1)
        candidates = list(units.values())
        picked = torch.randperm(len(candidates), generator=self._generator)[:size].tolist()
        indices = [index for pick in picked for index in candidates[pick]]
        entries = [unpack_entry(self._rows[index]) for index in indices]
        self._rows = []
        return ReplayDraw(entries, advantages[indices], considered, len(candidates), size)

    def state_dict(self) -> dict[str, Any]:
        """A snapshot for ``torch.save``: a few tensors and lists, with the generator's state."""
        rows = self._rows
        numbers = [(len(r.block), r.n_prompt, r.n_response, r.n_loss, r.step, r.tool_calls) for r in rows]
        blocks = bytearray().join(row.block for row in rows)
        return {
            "capacity": self.capacity,
            "unit": self.unit.value,
            "blocks": torch.frombuffer(blocks, dtype=torch.uint8) if blocks else torch.empty(0, dtype=torch.uint8),
            "numbers": torch.tensor(numbers, dtype=torch.int64).reshape(len(rows), 6),
            "values": torch.tensor([(r.reward, r.advantage) for r in rows], dtype=torch.float64).reshape(len(rows), 2),
            "trajectory_ids": [row.trajectory_id for row in rows],
            "terms": copy.deepcopy([row.terms for row in rows]),
            "extra": copy.deepcopy([row.extra for row in rows]),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; further draws are those of the buffer that was saved.

        Raises:
            StateMismatchError: it comes from a buffer of another capacity or unit.
        """
        for key, own in (("capacity", self.capacity), ("unit", self.unit.value)):
            if state[key] != own:
                raise StateMismatchError(
                    f"the checkpoint has spear.replay.{key}={state[key]}, this run {own}: "
                    "resume with the same value or start a new run"
                )
        blocks = bytearray(state["blocks"].numpy())
        terms, extra = copy.deepcopy(state["terms"]), copy.deepcopy(state["extra"])
        rows, at = [], 0
        for index, (length, n_prompt, n_response, n_loss, step, tool_calls) in enumerate(state["numbers"].tolist()):
            reward, advantage = state["values"][index].tolist()
            rows.append(
                PackedEntry(
                    block=blocks[at : at + length],
                    n_prompt=n_prompt,
                    n_response=n_response,
                    n_loss=n_loss,
                    reward=reward,
                    advantage=advantage,
                    step=step,
                    trajectory_id=state["trajectory_ids"][index],
                    tool_calls=tool_calls,
                    terms=terms[index],
                    extra=extra[index],
                )
            )
            at += length
        self._rows = rows
        self._generator.set_state(state["generator"])


def _trajectory_key(row: PackedEntry) -> tuple[int, Hashable]:
    """Trajectory ids need to be unique inside a step only."""
    return row.step, row.trajectory_id
