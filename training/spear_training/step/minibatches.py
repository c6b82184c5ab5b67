"""Rows dealt into mini-batches, and these to ranks.

A mini-batch is one optimiser step. The driver chooses its rows, so that a row's weight in the loss is one number and
the loss does not depend on micro-batches or the number of ranks. (The covariance clip does: its means and its budget
are those of a micro-batch, which is a rank's full share of the mini-batch if that fits the token limit.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spear_training.algorithms.objective import weigh_rows
from spear_training.algorithms.rows import Array


@dataclass(frozen=True)
class Deal:
    """Rows dealt into mini-batches.

    Attributes:
        minibatches: row numbers of each mini-batch, -1 for a padding row; all of length ``size``. Consecutive shares
            of it go to the ranks.
        size: rows of a mini-batch, a multiple of the number of shares.
    """

    minibatches: tuple[tuple[int, ...], ...]
    size: int

    @property
    def padding(self) -> int:
        """Number of padding rows."""
        return sum(row < 0 for part in self.minibatches for row in part)

    def order(self, ranks: int) -> list[int]:
        """Return the row numbers in verl's order: those of rank 0, mini-batch by mini-batch, then of rank 1, ..."""
        share = self.size // ranks
        return [row for r in range(ranks) for part in self.minibatches for row in part[r * share : (r + 1) * share]]

    def weigh(self, loss_tokens: Array, replayed: Array, *, mode: str, loss_scale_factor: float) -> Array:
        """Return the weight of each row [N] in its mini-batch; arguments as in :func:`weigh_rows`, of all rows."""
        weights = np.zeros(len(loss_tokens))
        for part in self.minibatches:
            rows = np.asarray([row for row in part if row >= 0], dtype=np.int64)
            weights[rows] = weigh_rows(
                loss_tokens[rows], replayed[rows], mode=mode, loss_scale_factor=loss_scale_factor
            )
        return weights

    def measure_balance(self, lengths: Array, ranks: int) -> float:
        """Return the tokens of the slowest of ``ranks`` over the mean of all, averaged over mini-batches; 1 is even."""
        padded = np.append(np.asarray(lengths, dtype=np.float64), 0.0)  # a padding row is number -1
        tokens = padded[np.asarray(self.minibatches).reshape(len(self.minibatches), ranks, -1)].sum(-1)
        return float((tokens.max(1) / np.maximum(tokens.mean(1), 1.0)).mean())


def count_minibatches(rows: float, rows_per_minibatch: int) -> int:
    """Number of mini-batches for ``rows``: the nearest integer, at least 1, or 0 without rows."""
    # Rounded, not cut: filters remove rows, and a last mini-batch of a few rows would take a full-size Adam step.
    return max(1, round(rows / rows_per_minibatch)) if rows else 0


def deal_rows(
    groups: Sequence[Sequence[int] | Array],
    lengths: Array,
    *,
    count: int,
    shares: int,
    rng: np.random.Generator,
    balance: bool = True,
) -> Deal:
    """Shuffle rows of ``lengths`` tokens into ``count`` mini-batches of nearly equal size, in ``shares`` equal parts.

    Args:
        groups: row numbers; each group is spread evenly over all mini-batches (on-policy and replayed rows of ``joint``
            coupling are two groups, so that each mini-batch holds both).
        shares: for ranks, and on each for micro-batches.
        balance: give the shares about equally many tokens; else rows are dealt at random.
    """
    if not sum(len(group) for group in groups):
        return Deal((), 0)
    parts: list[list[int]] = [[] for _ in range(count)]
    for group in groups:
        # Each group by itself: every mini-batch then has replayed rows in the proportion of the step.
        shuffled = rng.permutation(np.asarray(group, dtype=np.int64))
        for part, share in zip(parts, np.array_split(shuffled, count), strict=True):
            part.extend(share.tolist())
    # All mini-batches have the size of the largest one, rounded up to whole shares: verl cuts a batch into equal parts.
    size = -(-max(len(part) for part in parts) // shares) * shares
    padded = [
        [*rng.permutation(np.asarray(part, dtype=np.int64)).tolist(), *[-1] * (size - len(part))] for part in parts
    ]
    if balance and shares > 1:
        padded = [_balance(part, lengths, shares) for part in padded]
    return Deal(tuple(map(tuple, padded)), size)


def _balance(rows: list[int], lengths: Array, shares: int) -> list[int]:
    """Reorder rows so that equal consecutive shares have about equally many tokens.

    The longest rows go first, one to each share; in every further round the longest goes to the share with the fewest
    tokens.
    """
    tokens = np.asarray([lengths[row] if row >= 0 else 0 for row in rows], dtype=np.int64)
    longest = np.argsort(-tokens, kind="stable")
    loads, bins = np.zeros(shares, dtype=np.int64), [[] for _ in range(shares)]  # type: ignore[var-annotated]
    for start in range(0, len(rows), shares):
        # One row to each share in every round, so that shares also have equally many rows.
        places = longest[start : start + shares]
        lightest = np.argsort(loads, kind="stable")
        for share, place in zip(lightest.tolist(), places.tolist(), strict=True):
            bins[share].append(rows[place])
        loads[lightest] += tokens[places]
    return [row for share in bins for row in share]
