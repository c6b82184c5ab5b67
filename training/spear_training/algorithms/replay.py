"""The two buffers: D_R of group means, from which advantages are recalibrated, and D of rows to imitate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spear_training.algorithms.choices import ReplayUnit, Trigger
from spear_training.algorithms.rows import Array, RowTable
from spear_training.algorithms.schema import StateMismatchError


class BaselineBuffer:
    """First-in-first-out buffer D_R of group means (``sec:self-imitation-learning``, ``alg:sal``).

    Holds at most ``capacity`` numbers, one for each group, and drops the oldest first.
    """

    def __init__(self, capacity: int = 10240) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be 0 or more, not {capacity}")
        self.capacity = int(capacity)
        self._values: deque[float] = deque(maxlen=self.capacity)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> list[float]:
        """A copy of the numbers, oldest first."""
        return list(self._values)

    def extend(self, values: Iterable[float] | Tensor) -> None:
        """Append group means in order. Raises ValueError, without appending any, if one is not finite."""
        new = [float(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
        if not all(map(math.isfinite, new)):
            raise ValueError("a group mean is not finite; mask out the rows with broken rewards first")
        self._values.extend(new)

    def percentile(self, q: float = 50.0) -> float:
        """Return the percentile with linear interpolation; P50 is the baseline of ``eq:recalibrateadv``.

        Raises:
            ValueError: the buffer is empty, or ``q`` is not in 0 to 100.
        """
        if not self._values:
            raise ValueError("the baseline buffer is empty: extend it with this step's group means first")
        return float(np.percentile(np.fromiter(self._values, np.float64, len(self._values)), q))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`, as JSON-able data."""
        return {"capacity": self.capacity, "values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises StateMismatchError if it is of another capacity."""
        if int(state["capacity"]) != self.capacity:
            raise StateMismatchError(
                f"the checkpoint has baseline.capacity={state['capacity']}, this run {self.capacity}: "
                "resume with the same value or start a new run"
            )
        self._values = deque((float(value) for value in state["values"]), maxlen=self.capacity)


def recalibrate_advantages(rewards: Tensor, baseline: BaselineBuffer | float, *, q: float = 50.0) -> Tensor:
    """Return the recalibrated advantage: reward minus P50 of the baseline buffer (``eq:recalibrateadv``), not
    normalised.

    Args:
        rewards: [N] float.
        baseline: the buffer, or its percentile.
        q: percentile.

    Returns:
        [N], dtype and device of ``rewards``; the gate of ``eq:silvanilla`` is ``> 0``, strictly.

    Raises:
        ValueError: the buffer is empty.
    """
    level = baseline.percentile(q) if isinstance(baseline, BaselineBuffer) else float(baseline)
    return rewards.detach() - level


FACTS = ("trajectory", "origin", "prompt_length", "response_length", "loss_tokens", "reward", "advantage", "tool_calls")
STORED = (*FACTS, "won", "ids", "mask", "log_probs", "picture_bytes", "pictures")
"""Columns kept in the buffer, as far as they exist."""
ROW_BYTES = 200
"""Bytes of a stored row besides its tokens: its numbers and the name of its trajectory."""


@dataclass(frozen=True, eq=False)
class ReplayEntry:
    """One row of D = {(tau_j, R_j, A_j)} (``sec:self-imitation-learning``): a turn, or a trajectory.

    ``prompt_ids`` has P token ids; ``response_ids``, ``response_mask`` (on: loss token) and ``old_log_probs`` have R
    entries each. ``reward`` is R_j, ``advantage`` the advantage at collection, ``step`` the global step of collection.
    """

    prompt_ids: Sequence[int] | npt.NDArray[Any]
    response_ids: Sequence[int] | npt.NDArray[Any]
    response_mask: Sequence[int] | npt.NDArray[Any]
    old_log_probs: Sequence[float] | npt.NDArray[Any]
    reward: float
    advantage: float
    step: int
    trajectory_id: Hashable
    tool_calls: int = 0


def tabulate_entries(entries: Sequence[ReplayEntry]) -> RowTable:
    """Put single rows into a table. Raises ValueError if lengths differ or ids are not 32-bit integers."""
    prompts = [_read_ids(entry.prompt_ids, "prompt_ids") for entry in entries]
    responses = [_read_ids(entry.response_ids, "response_ids") for entry in entries]
    masks = [np.asarray(entry.response_mask) > 0 for entry in entries]
    logs = [np.asarray(entry.old_log_probs, dtype=np.float32) for entry in entries]
    for entry, ids, mask, log in zip(entries, responses, masks, logs, strict=True):
        if not ids.shape == mask.shape == log.shape:
            raise ValueError(
                f"row {entry.trajectory_id!r}: response_ids, response_mask and old_log_probs must have one length, "
                f"not {ids.shape}, {mask.shape} and {log.shape}"
            )
    sequences = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    empty = np.zeros(0)
    return RowTable(
        trajectory=[entry.trajectory_id for entry in entries],
        origin=[entry.step for entry in entries],
        prompt_length=[len(ids) for ids in prompts],
        response_length=[len(ids) for ids in responses],
        loss_tokens=[int(mask.sum()) for mask in masks],
        reward=[entry.reward for entry in entries],
        advantage=[entry.advantage for entry in entries],
        tool_calls=[entry.tool_calls for entry in entries],
        ids=np.concatenate([empty, *sequences]),
        mask=np.concatenate([empty, *masks]),
        log_probs=np.concatenate([empty, *logs]),
    )


def _read_ids(values: Any, name: str) -> Array:
    raw = np.asarray(values)
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a sequence of token ids, not {raw.dtype} {raw.shape}")
    if raw.dtype != np.int32 and raw.size and (raw.min() < -(2**31) or raw.max() >= 2**31):
        raise ValueError(f"{name} has ids beyond 32 bits")
    return raw


@dataclass(frozen=True)
class ReplayGate:
    """Rows accepted by the buffer (``open``, [N] flags), and the numbers refused for lack of a positive advantage, and
    of a loss token or a required tool call.
    """

    open: Array
    nonpositive: int
    other: int


@dataclass(frozen=True)
class ReplayDraw:
    """Rows drawn for self-imitation.

    ``rows`` are K stored rows, and ``advantages`` [K] float64 their recalibrated advantages, all above 0.
    ``considered`` (size before the draw), ``eligible`` (of these, above the baseline) and ``drawn`` count in the unit
    of the buffer.
    """

    rows: RowTable
    advantages: Tensor
    considered: int
    eligible: int
    drawn: int

    @property
    def discarded(self) -> int:
        """Number of units dropped without being drawn."""
        return self.considered - self.drawn

    @property
    def entries(self) -> list[ReplayEntry]:
        """The rows one by one."""
        rows = self.rows
        tokens = zip(rows.split("ids"), rows.prompt_length, rows.split("mask"), rows.split("log_probs"), strict=True)
        facts = zip(*(getattr(rows, name).tolist() for name in _FACTS_OF_ENTRY), strict=True)
        return [
            ReplayEntry(ids[:prompt], ids[prompt:], mask, logs, *fact)
            for (ids, prompt, mask, logs), fact in zip(tokens, facts, strict=True)
        ]

    def mean_age(self, step: int) -> float:
        """Return the mean age of the drawn rows at global step ``step``, in steps; 0 if none were drawn."""
        return float(np.mean(step - self.rows.origin)) if len(self.rows) else 0.0


_FACTS_OF_ENTRY = ("reward", "advantage", "origin", "trajectory", "tool_calls")


@dataclass(frozen=True, eq=False)
class _Slice:
    """Rows of one :meth:`ReplayBuffer.add`, with a bit per mask entry and log-probs of loss tokens only."""

    rows: RowTable
    bits: Array
    log_probs: Array

    @classmethod
    def pack(cls, rows: RowTable) -> _Slice:
        # Copied, since columns may be views of the whole step's arrays, which would stay in memory as long as the
        # buffer. The mask takes a bit, and log-probs off it are never read: ratios are those of loss tokens.
        copied = RowTable(**{name: getattr(rows, name).copy() for name in STORED if name in rows})
        return cls(copied.drop("mask", "log_probs"), np.packbits(rows.mask), rows.log_probs[rows.mask])

    def unpack(self) -> RowTable:
        tokens = int(self.rows.response_length.sum())
        mask = np.unpackbits(self.bits, count=tokens).view(np.bool_)
        log_probs = np.zeros(tokens, dtype=np.float32)
        log_probs[mask] = self.log_probs
        return self.rows.add(mask=mask, log_probs=log_probs)

    @property
    def nbytes(self) -> int:
        tokens = sum(getattr(self.rows, name).nbytes for name in ("ids", "pictures") if name in self.rows)
        return tokens + self.bits.nbytes + self.log_probs.nbytes + ROW_BYTES * len(self.rows)


class ReplayBuffer:
    """Buffer D of rewarded rows, emptied by each draw (``sec:self-imitation-learning``, ``alg:sal``).

    Args:
        capacity: N_D, counted in ``unit``.
        unit: ``"sample"`` for rows, ``"trajectory"`` for trajectories, whose kept rows are drawn together.
        trigger_ratio: the buffer is ready at this multiple of its capacity.
        trigger: ``"stored"`` counts all units towards it, ``"eligible"`` those of a reward above P50, and then the
            buffer must hold more than the multiple.
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
        trigger: str = "stored",
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
        self.trigger = Trigger(trigger)
        self.max_age = max_age
        self.require_tool_call = require_tool_call
        self.power_of_two = power_of_two
        self._slices: list[_Slice] = []
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """Return the number of units held: rows, or trajectories."""
        if self.unit is ReplayUnit.SAMPLE:
            return sum(len(part.rows) for part in self._slices)
        return len({key for part in self._slices for key in _name_trajectories(part.rows)})

    @property
    def nbytes(self) -> int:
        """Memory of the rows in bytes."""
        return sum(part.nbytes for part in self._slices)

    def check(self, rows: RowTable) -> ReplayGate:
        """Return the rows that :meth:`add` accepts: with A_j > 0 (``eq:silvanilla``), a loss token, and a tool call if
        required.
        """
        # This gate is on the advantage at collection, within the row's own group. The draw has a second one, on the
        # reward against P50 of many groups (eq:recalibrateadv).
        positive = rows.advantage > 0
        usable = rows.loss_tokens > 0
        if self.require_tool_call:
            usable &= rows.tool_calls >= 1
        return ReplayGate(positive & usable, int((~positive).sum()), int((positive & ~usable).sum()))

    def add(self, rows: RowTable | Iterable[ReplayEntry]) -> int:
        """Copy the rows that pass :meth:`check`; return their number.

        Args:
            rows: a table with :data:`STORED` columns (pictures if any), or single rows.

        Raises:
            ValueError: a row to keep is malformed, or a reward, an advantage or a log-prob of a loss token is not
                finite; the buffer is unchanged.
        """
        if not isinstance(rows, RowTable):
            rows = tabulate_entries(list(rows))
        new = rows.take(self.check(rows).open)
        if not len(new):
            return 0
        finite = np.isfinite(new.reward) & np.isfinite(new.advantage)
        if not (finite.all() and np.isfinite(new.log_probs[new.mask]).all()):
            raise ValueError("a reward, an advantage or a log-prob of a row is not finite; leave the row out")
        self._slices.append(_Slice.pack(new))
        return len(new)

    def evict(self, step: int) -> int:
        """Remove rows older than ``max_age`` at ``step``; return their number."""
        if self.max_age is None:
            return 0
        before = sum(len(part.rows) for part in self._slices)
        left = []
        for part in self._slices:
            young = step - part.rows.origin <= self.max_age
            if young.all():
                left.append(part)
            # Rows of one add are of one step, unless entries were added by hand: a slice is rarely cut.
            elif young.any():
                left.append(_Slice.pack(part.unpack().take(young)))
        self._slices = left
        return before - sum(len(part.rows) for part in left)

    def is_ready(self, baseline: BaselineBuffer | None = None) -> bool:
        """Return whether the buffer holds anything, and enough by the setting ``sil.trigger``.

        ``baseline`` is D_R, as for :meth:`draw`; needed for ``"eligible"``.
        """
        if not self._slices:
            return False
        wanted = self.trigger_ratio * self.capacity
        if self.trigger is Trigger.ELIGIBLE:
            return len(self._list_eligible(self._recalibrate(baseline))) > wanted
        return len(self) >= wanted

    def _recalibrate(self, baseline: BaselineBuffer | None) -> Tensor:
        """Return the advantages of all rows: rewards above P50, or without D_R those at collection."""
        facts = [part.rows for part in self._slices] or [tabulate_entries([])]
        if baseline is None or baseline.capacity == 0:
            return torch.from_numpy(np.concatenate([rows.advantage for rows in facts]))
        return recalibrate_advantages(torch.from_numpy(np.concatenate([rows.reward for rows in facts])), baseline)

    def _list_eligible(self, advantages: Tensor) -> list[list[int]]:
        """Return the rows with an advantage above 0, by unit, as numbers in the buffer."""
        # A trajectory counts if one of its rows does; its other rows above the baseline are drawn with it.
        names: Sequence[Hashable] = range(len(advantages))
        if self.unit is ReplayUnit.TRAJECTORY:
            names = [key for part in self._slices for key in _name_trajectories(part.rows)]
        units: dict[Hashable, list[int]] = {}
        for index in (advantages > 0).nonzero().flatten().tolist():
            units.setdefault(names[index], []).append(index)
        return list(units.values())

    def draw(self, baseline: BaselineBuffer | None) -> ReplayDraw:
        """Draw min(eligible, capacity) units uniformly, without replacement, and empty the buffer (``alg:sal``).

        Eligible are rows whose recalibrated advantage is above 0 (``eq:silvanilla``), and trajectories with such a row.

        Args:
            baseline: D_R. None, or a buffer of capacity 0, switches recalibration off: the stored advantages are used.

        Raises:
            ValueError: the baseline buffer is empty.
        """
        # Recalibrated at the draw, not when rows enter: a reward that beat its group hundreds of episodes ago may be
        # below what the policy earns now (sec:self-imitation-learning).
        advantages = self._recalibrate(baseline)
        considered, candidates = len(self), self._list_eligible(advantages)
        size = min(len(candidates), self.capacity)
        if self.power_of_two and size:
            size = 1 << (size.bit_length() - 1)
        # Units are drawn, not rows, so that a trajectory is imitated whole or not at all.
        picked = torch.randperm(len(candidates), generator=self._generator)[:size].tolist()
        indices = np.asarray([index for pick in picked for index in candidates[pick]], dtype=np.int64)
        rows = self._take(indices)
        # What was not drawn goes as well (alg:sal): the buffer fills anew with rows of the present policy.
        self._slices = []
        return ReplayDraw(rows, advantages[torch.from_numpy(indices)], considered, len(candidates), size)

    def _take(self, indices: Array) -> RowTable:
        """Return rows by their number in the buffer; slices are unpacked one at a time."""
        ends = np.cumsum([len(part.rows) for part in self._slices])
        parts, order = [], []
        for part, end in zip(self._slices, ends.tolist(), strict=True):
            start = end - len(part.rows)
            inside = np.flatnonzero((indices >= start) & (indices < end))
            # One slice unpacked at a time bounds the memory of a draw by the rows of one step.
            parts.append(part.unpack().take(indices[inside] - start))
            order.append(inside)
        if not parts:
            return tabulate_entries([])
        # Back in the order of the draw, along which rows are dealt into mini-batches.
        return RowTable.join(parts).take(np.argsort(np.concatenate(order), kind="stable"))

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot: tensors and lists, with the generator's state."""
        return {
            "capacity": self.capacity,
            "unit": self.unit.value,
            "slices": [
                {
                    **{name: _write_column(getattr(part.rows, name)) for name in part.rows.columns},
                    "mask_bits": _write_column(part.bits),
                    "loss_log_probs": _write_column(part.log_probs),
                }
                for part in self._slices
            ],
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, with its random stream. Raises StateMismatchError for another capacity or unit."""
        for key, own in (("capacity", self.capacity), ("unit", self.unit.value)):
            if state[key] != own:
                raise StateMismatchError(
                    f"the checkpoint has replay.{key}={state[key]}, this run {own}: "
                    "resume with the same value or start a new run"
                )
        slices = []
        for saved in state["slices"]:
            columns = {name: _read_column(values) for name, values in saved.items()}
            bits, log_probs = columns.pop("mask_bits"), columns.pop("loss_log_probs")
            slices.append(_Slice(RowTable(**columns), bits, log_probs))
        self._slices = slices
        # With its stream, the resumed run draws the rows that the interrupted one would have drawn.
        self._generator.set_state(state["generator"])


def _write_column(values: Array) -> Any:
    return values.tolist() if values.dtype == object else torch.from_numpy(values.copy())


def _read_column(values: Any) -> Any:
    return list(values) if isinstance(values, list) else values.numpy().copy()


def _name_trajectories(rows: RowTable) -> list[Hashable]:
    """Return the names of trajectories, which are unique within a step only."""
    return list(zip(rows.origin.tolist(), rows.trajectory.tolist(), strict=True))
