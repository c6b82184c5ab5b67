"""A catalogue: products, prices, search and goals, from a few files in memory or from a mapped store."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from random import Random
from typing import NamedTuple, Protocol

import numpy as np

from spear_envs.bm25.index import SearchIndex
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.tasks import canonical_json, check_split
from spear_envs.webshop.goals import ORDER_SEED, Goal, GoalKind, GoalSource, make_goal
from spear_envs.webshop.products import Entry, Product
from spear_envs.webshop.tasks import ALL, SPLITS, GoalTaskSet, SplitScheme, choose_split, split_goals

MAX_HITS = 50
"""Most products that a search finds."""

Splits = Mapping[str, Sequence[int]]
SplitKey = tuple[GoalKind | None, SplitScheme]


class Shelf(Protocol):
    """The products, numbered from 0 in ascending order of their ASINs."""

    def __len__(self) -> int: ...

    def entry(self, number: int) -> Entry:
        """Return the entry of a product."""

    def asin(self, number: int) -> str:
        """Return the ASIN of a product."""

    def number_of(self, asin: str) -> int | None:
        """Return the number of a product, or None."""

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of all entries, in order."""


class Catalog:
    """Products, prices, search and goals; immutable.

    Args:
        index: search over their ``index_text``.
        prices: float64 [len(shelf)], dollars.
        find_goals: returns the goals of a kind, or raises a SpearError that says why there are none.
        tagger: name of the tagger that found the nouns.
        splits: known splits.
        listed: goals from a file, which replace all others.
    """

    def __init__(
        self,
        shelf: Shelf,
        index: SearchIndex,
        prices: np.ndarray,
        find_goals: Callable[[GoalKind], GoalSource],
        *,
        tagger: str,
        scheme: SplitScheme = SplitScheme.ORIGINAL,
        splits: Mapping[SplitKey, Splits] | None = None,
        listed: GoalSource | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.tagger = tagger
        """Name of the tagger: ``"rule"``, ``"spacy:MODEL"`` or ``"custom:module.function"``."""
        self.scheme = scheme
        """How goals are split by default."""
        self._shelf = shelf
        self._index = index
        self._prices = prices
        self._find_goals = find_goals
        self._listed = listed
        self._sources: dict[GoalKind, GoalSource] = {}
        self._splits: dict[SplitKey, Splits] = dict(splits or {})
        self._task_sets: dict[tuple[GoalKind | None, SplitScheme, str], GoalTaskSet] = {}
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._shelf)

    def product(self, number: int) -> Product:
        """Return the product of a number (by ascending ASIN)."""
        return self._shelf.entry(number).product

    def nouns(self, number: int) -> tuple[str, ...]:
        """Return the nouns of the product's title in lower case, repeats kept."""
        return self._shelf.entry(number).nouns

    def price(self, number: int) -> float:
        """Return the price in dollars that the reward uses."""
        return float(self._prices[number])

    def number_of(self, asin: str) -> int | None:
        """Return the number of the product with this ASIN, or None."""
        return self._shelf.number_of(asin)

    def search(self, query: str) -> list[int]:
        """Return the numbers of at most 50 products that fit a query, best first."""
        return self._index.search(query, MAX_HITS)

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of products, prices, nouns and tagger: equal ones score every purchase alike."""
        if self._fingerprint is None:
            self._fingerprint = digest_catalog(self._shelf.fingerprint, self._prices, self.tagger)
        return self._fingerprint

    def goals(self, kind: str | GoalKind = GoalKind.SYNTHETIC) -> GoalSource:
        """Return all goals of a kind in canonical order, or those of the goals file if there is one.

        Raises:
            SpearError: the kind is unknown, or the catalogue lacks goals of it.
        """
        kind = choose_member(GoalKind, kind, "goal_kind")
        if self._listed is not None:
            return self._listed
        if kind not in self._sources:
            self._sources[kind] = self._find_goals(kind)
        return self._sources[kind]

    def make_tasks(
        self,
        split: str | None = None,
        *,
        goal_kind: str | GoalKind = GoalKind.SYNTHETIC,
        split_scheme: str | SplitScheme | None = None,
    ) -> GoalTaskSet:
        """Return the tasks of a split: ``train``, ``eval``, ``test``, or ``all``, the list in canonical order.

        Args:
            split: by default ``all`` with a goals file, whose ids are then ``webshop/all/<row>``, and else ``train``.
            goal_kind: ignored with a goals file.
            split_scheme: by default that of the catalogue.

        Raises:
            SpearError: a value is not valid, or the split has no goals.
        """
        kind = choose_member(GoalKind, goal_kind, "goal_kind")
        scheme = self.scheme if split_scheme is None else choose_member(SplitScheme, split_scheme, "split_scheme")
        split = check_split((ALL if self._listed else "train") if split is None else split, (*SPLITS, ALL))
        source = self.goals(kind)
        key = (None if self._listed else kind, scheme)
        made = (*key, split)
        if made not in self._task_sets:
            if split != ALL and key not in self._splits:
                self._splits[key] = split_goals(source, scheme)
            positions = choose_split(self._splits.get(key, {}), split, scheme, len(source))
            self._task_sets[made] = GoalTaskSet(source, split, positions, self.fingerprint)
        return self._task_sets[made]

    def replace_goals(self, goals: GoalSource, prices: Mapping[str, float] | None = None) -> Catalog:
        """Return the catalogue with other goals, and with other prices for some products.

        Raises:
            SpearError: a goal is about a product that the catalogue lacks.
        """
        for position in range(len(goals)):
            asin = goals.goal(position).asin
            if self.number_of(asin) is None:
                raise SpearError(f"row {position} of the goals asks for {asin}, which the catalogue lacks.")
        changed = self._prices
        if prices:
            changed = np.array(self._prices, np.float64)
            for asin, price in prices.items():
                number = self.number_of(asin)
                if number is not None:
                    changed[number] = price
        return Catalog(
            self._shelf, self._index, changed, self._find_goals, tagger=self.tagger, scheme=self.scheme, listed=goals
        )


def digest_catalog(products: str, prices: np.ndarray, tagger: str) -> str:
    """Return the fingerprint of a catalogue: SHA-256 (hex) of its entries' fingerprint, its prices and its tagger."""
    digest = hashlib.sha256(np.ascontiguousarray(prices, "<f8").data).hexdigest()
    parts = {"products": products, "prices": digest, "tagger": tagger}
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


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
