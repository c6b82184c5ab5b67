"""Synthetic goals as arrays: a catalogue of a million products has millions of them."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from random import Random
from typing import NamedTuple

import numpy as np

from spear_envs.core.errors import SpearError
from spear_envs.webshop.catalog import Shelf
from spear_envs.webshop.goals import ORDER_SEED, Goal, make_goal

DAMAGED = "the table of goals is damaged: build the store again ('spear data build webshop')."


class Request(NamedTuple):
    """A product with an instruction: the common part of its synthetic goals."""

    number: int
    """Number of the product."""
    choices: int
    """Number of combinations of option values; each is a goal."""
    ceiling: float
    """``price_upper`` of these goals."""
    wanted: Sequence[str]
    """Attributes that they ask for."""


@dataclass(frozen=True)
class GoalTable:
    """G goals of R requests. Before the shuffle, those of request ``r`` are ``starts[r]`` to ``starts[r + 1] - 1``."""

    numbers: np.ndarray
    """uint32 [R]: product."""
    ceilings: np.ndarray
    """float64 [R]: dollars."""
    weights: np.ndarray
    """float64 [R]."""
    starts: np.ndarray
    """uint32 [R + 1]."""
    order: np.ndarray
    """uint32 [G]: the goal at each position of the canonical order."""

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of all arrays."""
        digest = hashlib.sha256()
        for values in (self.numbers, self.ceilings, self.weights, self.starts, self.order):
            digest.update(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).data)
        return digest.hexdigest()


def shuffle_order(count: int) -> np.ndarray:
    """Shuffle 0, 1, …, count - 1 by ``Random(233).shuffle``: uint32 [count]."""
    order = array("I", range(count))
    Random(ORDER_SEED).shuffle(order)
    return np.frombuffer(order, dtype=np.uint32) if count else np.zeros(0, np.uint32)


def make_goal_table(requests: Iterable[Request]) -> GoalTable:
    """Make the goals of ``requests``, which come in the order of the file.

    Raises:
        SpearError: there are more goals than can be numbered.
    """
    requests = list(requests)
    counts: Counter[str] = Counter()
    for request in requests:
        for name in request.wanted:
            counts[name] += request.choices
    starts = np.array([0, *accumulate(request.choices for request in requests)], np.uint64)
    total = int(starts[-1])
    if total >= 1 << 32:
        raise SpearError(f"the options of the products make {total:,} goals: leave out products with very many options")
    # Added from left to right: from Python 3.12 on, `sum` of floats compensates, which changes last digits.
    weights = [
        reduce(add, (1.0 / counts[name] for name in request.wanted)) / len(request.wanted) if request.choices else 0.0
        for request in requests
    ]
    return GoalTable(
        numbers=np.array([request.number for request in requests], np.uint32),
        ceilings=np.array([request.ceiling for request in requests], np.float64),
        weights=np.array(weights, np.float64),
        starts=starts.astype(np.uint32),
        order=shuffle_order(total),
    )


class TableGoals:
    """The goals of a table as a :class:`~spear_envs.webshop.goals.GoalSource`.

    Args:
        fingerprint: of the table, if known.
    """

    def __init__(self, table: GoalTable, shelf: Shelf, fingerprint: str | None = None) -> None:
        self._table = table
        self._shelf = shelf
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._table.order)

    def goal(self, position: int) -> Goal:
        """Make the goal at a position."""
        request, choice = self._locate(position)
        entry = self._shelf.entry(int(self._table.numbers[request]))
        if entry.instruction is None:
            raise SpearError(DAMAGED)
        groups = sorted(entry.product.options)
        chosen = []
        for group in reversed(groups):  # the last group changes fastest
            values = entry.product.options[group]
            choice, digit = divmod(choice, len(values))
            chosen.append((group, values[digit]))
        return make_goal(
            entry.product,
            entry.instruction,
            entry.wanted,
            tuple(reversed(chosen)),
            float(self._table.ceilings[request]),
            float(self._table.weights[request]),
        )

    def owners(self) -> np.ndarray:
        """Return the number of each goal's product: uint32 [len]."""
        table = self._table
        per_goal = np.repeat(table.numbers, np.diff(table.starts.astype(np.int64)))
        return per_goal[table.order]

    def owner_name(self, number: int) -> str:
        """Return the product's ASIN."""
        return self._shelf.asin(number)

    def find_twins(self, positions: Sequence[int]) -> set[int]:
        """See :class:`~spear_envs.webshop.goals.GoalSource`.

        Goals of one request are equal if an option repeats a value; goals of different requests never are.
        """
        twins: set[int] = set()
        for position in positions:
            request, choice = self._locate(position)
            options = self._shelf.entry(int(self._table.numbers[request])).product.options
            choices = [0]
            for group in sorted(options, reverse=True):
                values = options[group]
                choice, digit = divmod(choice, len(values))
                stride = math.prod(len(options[later]) for later in options if later > group)
                same = [i for i, value in enumerate(values) if value == values[digit]]
                choices = [base + i * stride for i in same for base in choices]
            if len(choices) > 1:
                start = int(self._table.starts[request])
                twins.update(start + base for base in choices)
        found = set(positions)
        if twins:
            numbers = np.fromiter(twins, np.uint32, len(twins))
            found.update(np.flatnonzero(np.isin(self._table.order, numbers)).tolist())
        return found

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of all goals and their order, without the products' records."""
        if self._fingerprint is None:
            self._fingerprint = self._table.fingerprint
        return self._fingerprint

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the request of the goal at a position, and the number of its choice."""
        table = self._table
        # In the array's type, or numpy would copy the array to compare.
        place = table.order[position]
        request = int(np.searchsorted(table.starts, place, side="right")) - 1
        if request >= len(table.numbers):
            raise SpearError(DAMAGED)
        return request, int(place) - int(table.starts[request])
