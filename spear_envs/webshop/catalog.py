"""A catalogue: products, prices, search and goals, from a few files in memory or from a mapped store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from spear_envs.bm25.index import SearchIndex
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.tasks import canonical_json, check_split
from spear_envs.webshop.entries import Entry
from spear_envs.webshop.goals import GoalKind, GoalSource
from spear_envs.webshop.products import Product
from spear_envs.webshop.splits import ALL, SPLITS, SplitScheme, choose_split, split_goals
from spear_envs.webshop.tasks import GoalTaskSet

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
