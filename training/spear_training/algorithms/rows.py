"""The table of rows, from the rollout to the update and the replay buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Span(Enum):
    """Unit of a column's entries; all except ``ROW`` are concatenated over the rows, without padding."""

    ROW = "row"
    RESPONSE = "response token"
    SEQUENCE = "token of prompt and response"
    TURN = "turn"
    PICTURE = "byte of packed pictures"


COLUMNS: Mapping[str, tuple[Span, Any]] = {
    # identity
    "key": (Span.ROW, object),
    "group": (Span.ROW, object),
    "trajectory": (Span.ROW, object),
    "turn": (Span.ROW, np.int64),
    "anchor": (Span.ROW, object),
    "origin": (Span.ROW, np.int64),
    "version": (Span.ROW, np.int64),
    # length and end
    "prompt_length": (Span.ROW, np.int64),
    "response_length": (Span.ROW, np.int64),
    "loss_tokens": (Span.ROW, np.int64),
    "finished": (Span.ROW, np.bool_),
    "truncated": (Span.ROW, np.bool_),
    "void": (Span.ROW, np.bool_),
    "incomplete": (Span.ROW, np.bool_),
    "repetitive": (Span.ROW, np.bool_),
    "unreadable": (Span.ROW, np.bool_),
    "malformed": (Span.ROW, np.int64),
    "won": (Span.ROW, np.bool_),
    "tool_calls": (Span.ROW, np.int64),
    # rewards
    "step_reward": (Span.ROW, np.float64),
    "reward": (Span.ROW, np.float64),
    "advantage": (Span.ROW, np.float64),
    # update
    "kept": (Span.ROW, np.bool_),
    "replayed": (Span.ROW, np.bool_),
    "weight": (Span.ROW, np.float64),
    "seed": (Span.ROW, np.int64),
    # turns of a row: one, or all of a conversation
    "turns": (Span.ROW, np.int64),
    "turn_number": (Span.TURN, np.int64),
    "turn_end": (Span.TURN, np.int64),
    "turn_reward": (Span.TURN, np.float64),
    # tokens
    "ids": (Span.SEQUENCE, np.int32),
    "mask": (Span.RESPONSE, np.bool_),
    "rollout_log_probs": (Span.RESPONSE, np.float32),
    "log_probs": (Span.RESPONSE, np.float32),
    "ref_log_probs": (Span.RESPONSE, np.float32),
    "rollout_weights": (Span.RESPONSE, np.float32),
    "values": (Span.RESPONSE, np.float64),
    "returns": (Span.RESPONSE, np.float64),
    "token_advantages": (Span.RESPONSE, np.float64),
    # pictures of a model with a vision tower
    "picture_bytes": (Span.ROW, np.int64),
    "pictures": (Span.PICTURE, np.uint8),
}
"""All columns, with span and type; a table has those known so far.

``trajectory`` is unique within a step. ``origin`` is the global step (from 1) that collected the row, ``version`` that
of the oldest weights that wrote some of it (-1 if unknown), ``turn`` the first turn of the row. ``loss_tokens`` counts
the tokens of the policy, ``mask`` marks them. ``finished``: the response ended by itself, not at its token limit.
``truncated``: the episode ended because the next prompt did not fit. ``void``: some turn lacks an action.
``incomplete``: some turn lacks a whole ``<action>``. ``unreadable``: some turn has characters of broken bytes.
``malformed`` counts the row's malformed turns. ``anchor``: key of the state before the row's first turn.
``step_reward``: reward of the row's turns, by ``advantage.step_reward``. ``reward``: R of the trajectory, with the
row's own penalty if there is one; ``advantage``: of the row, with ``token_advantages`` if they differ within it.
``turn_number``: the turn's place in its episode, from 0; an agent's conversations may alternate.
``kept``: passed all filters. ``weight``: see :func:`~spear_training.algorithms.objective.weigh_rows`. ``turn_end``:
tokens of the response up to the end of the policy's text in the turn; ``turn_reward``: ``step_reward`` of that turn.
``log_probs`` are those of the policy that played (pi_old), ``ref_log_probs`` of the reference policy,
``rollout_weights`` factors of rollout correction, ``values`` the critic's, ``returns`` its targets.
"""


class RowTable:
    """N rows in columns (:data:`COLUMNS`); a column is an attribute: ``rows.reward`` [N], ``rows.ids`` [sum of P + R].

    Immutable: :meth:`add`, :meth:`take`, :meth:`select` and :meth:`join` make other tables, which may share arrays.

    Raises:
        ValueError: an unknown column, or one of a wrong length.
    """

    def __init__(self, **columns: Any) -> None:
        self._columns: dict[str, Array] = {name: _read_column(name, values) for name, values in columns.items()}
        lengths = {len(values) for name, values in self._columns.items() if COLUMNS[name][0] is Span.ROW}
        if len(lengths) != 1:
            raise ValueError(f"columns of rows have {sorted(lengths)} entries; a table needs one number of rows")
        self._length = lengths.pop()
        for name, values in self._columns.items():
            wanted = int(self.sizes(COLUMNS[name][0]).sum())
            if len(values) != wanted:
                raise ValueError(f"column {name} has {len(values)} entries, its rows have {wanted}")

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getattr__(self, name: str) -> Array:
        try:
            return self.__dict__["_columns"][name]
        except KeyError:
            raise AttributeError(f"these rows have no column {name!r}") from None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays in bytes, without the objects in columns of names."""
        return sum(values.nbytes for values in self._columns.values())

    def sizes(self, span: Span) -> Array:
        """Return the number of entries of each row [N] in a column of ``span``."""
        if span is Span.ROW:
            return np.ones(self._length, dtype=np.int64)
        if span is Span.RESPONSE:
            return self.response_length
        if span is Span.SEQUENCE:
            return self.prompt_length + self.response_length
        return self.turns if span is Span.TURN else self.picture_bytes

    def spread(self, values: Array) -> Array:
        """Repeat values of rows [N] for their response tokens."""
        return np.repeat(values, self.response_length)

    def split(self, name: str) -> list[Array]:
        """Split a column into one view per row."""
        return np.split(self._columns[name], np.cumsum(self.sizes(COLUMNS[name][0]))[:-1]) if self._length else []

    def add(self, **columns: Any) -> RowTable:
        """Return the same rows with these columns added or replaced."""
        return RowTable(**{**self._columns, **columns})

    def select(self, names: Iterable[str]) -> RowTable:
        """Return the same rows with only these columns, as far as they exist."""
        return RowTable(**{name: self._columns[name] for name in names if name in self._columns})

    def drop(self, *names: str) -> RowTable:
        """Return the same rows without these columns."""
        return self.select(name for name in self._columns if name not in names)

    def take(self, index: Sequence[int] | Array) -> RowTable:
        """Select rows by flags [N], or by numbers in that order."""
        chosen = np.asarray(index)
        if chosen.dtype == np.bool_:
            # Tables are immutable, so the same one serves.
            if chosen.all():
                return self
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64, copy=False)
        bounds: dict[Span, list[tuple[int, int]]] = {}
        taken: dict[str, Array] = {}
        for name, values in self._columns.items():
            span = COLUMNS[name][0]
            if span is Span.ROW:
                taken[name] = values[chosen]
                continue
            sizes = self.sizes(span)
            # Rows of one length, as in a buffer of fixed prompts, are taken by one index instead of a slice each.
            if len(sizes) and (sizes == sizes[0]).all():
                taken[name] = values.reshape(len(sizes), int(sizes[0]))[chosen].ravel()
                continue
            if span not in bounds:
                ends = np.cumsum(sizes)
                bounds[span] = list(zip((ends - sizes)[chosen].tolist(), ends[chosen].tolist(), strict=True))
            parts = [values[start:end] for start, end in bounds[span]]
            taken[name] = np.concatenate(parts) if parts else values[:0]
        return RowTable(**taken)

    @staticmethod
    def join(tables: Sequence[RowTable]) -> RowTable:
        """Concatenate tables, with the columns that all of them have. Raises ValueError without tables."""
        if not tables:
            raise ValueError("no table to join")
        if len(tables) == 1:
            return tables[0]
        shared = [name for name in tables[0].columns if all(name in table for table in tables)]
        return RowTable(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in shared})


def _read_column(name: str, values: Any) -> Array:
    if name not in COLUMNS:
        raise ValueError(f"{name!r} is not a column of rows; there are {', '.join(COLUMNS)}")
    kind = COLUMNS[name][1]
    if kind is object and not (isinstance(values, np.ndarray) and values.dtype == object):
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array
    return np.asarray(values, dtype=kind)
