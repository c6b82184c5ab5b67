"""Goals: the product to buy, its price limit, and the instruction.

A list of goals has one canonical order, ``Random(233).shuffle`` of the order of the files, in every process and for
every split. ``splits.py`` divides it into ``train``, ``eval`` and ``test``, the original's names (there is no
``valid``); ``all`` is the full list. An environment takes its tasks from
``opening.open_catalog(...).make_tasks(split, goal_kind=..., split_scheme=...)``; each is a ``GoalTask`` with its
``goal``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from spear_envs.core.tasks import canonical_json
from spear_envs.webshop.draws import NO_CEILING
from spear_envs.webshop.products import Product, read_number, read_texts

ORDER_SEED = 233
"""Seed of the shuffle that gives the canonical order, as in the original."""


class GoalKind(str, Enum):
    """The origin of goals."""

    SYNTHETIC = "synthetic"
    """One for each combination of option values of each product with an instruction in ``items_ins_v2*.json``."""
    HUMAN = "human"
    """One for each instruction of ``items_human_ins.json`` that names an attribute."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of one episode."""

    asin: str
    """The product that it was made from; others may score as high."""
    instruction: str
    """The text that the policy reads."""
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...] | tuple[str, ...]
    """(group, value) pairs of a synthetic goal; plain values of a human one."""
    price_upper: float
    """Ceiling in dollars; 1,000,000 if the text names none."""
    weight: float
    """How rare its attributes are: mean of 1 / (number of goals with the attribute); 1 for human goals."""
    query: str
    category: str
    product_category: str
    title: str
    """Query, category, levels and title of the product ``asin``."""

    def to_row(self) -> dict[str, Any]:
        """Return the goal as a JSON object with the keys of a goals file, without ``index``."""
        strings = bool(self.options) and isinstance(self.options[0], str)
        return {
            "asin": self.asin,
            "instruction_text": self.instruction,
            "attributes": list(self.attributes),
            "goal_options": list(self.options) if strings else dict(self.options),  # type: ignore[arg-type]
            "price_upper": self.price_upper,
            "weight": self.weight,
            "query": self.query,
            "category": self.category,
            "product_category": self.product_category,
            "name": self.title,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Goal:
        """Make the goal of a row of a goals file.

        Raises:
            SpearError: a field is missing or has the wrong type; the message names it.
        """
        options = row.get("goal_options")
        if isinstance(options, Mapping):
            read_texts(list(options.values()), "goal_options")
            read_options: tuple[Any, ...] = tuple(options.items())
        else:
            read_options = read_texts(options, "goal_options")
        names = ("asin", "instruction_text", "query", "category", "product_category", "name")
        asin, instruction, query, category, product_category, title = read_texts(
            [row.get(name) for name in names],
            " and ".join(name for name in names if not isinstance(row.get(name), str)),
        )
        return cls(
            asin=asin,
            instruction=instruction,
            attributes=read_texts(row.get("attributes"), "attributes"),
            options=read_options,
            price_upper=read_number(row.get("price_upper"), "price_upper"),
            weight=read_number(row.get("weight", 1), "weight"),
            query=query,
            category=category,
            product_category=product_category,
            title=title,
        )

    @property
    def key(self) -> str:
        """Return the SHA-256 of product, text and options: goals with equal keys are the same task."""
        return hashlib.sha256(canonical_json([self.asin, self.instruction, self.options]).encode()).hexdigest()


def make_goal(
    product: Product,
    instruction: str,
    attributes: tuple[str, ...],
    options: tuple[tuple[str, str], ...] | tuple[str, ...],
    price_upper: float,
    weight: float,
) -> Goal:
    """Make the goal of an instruction for ``product``; pairs among ``options`` and the ceiling extend its text."""
    pairs = [f"{option[0]}: {option[1]}" for option in options if not isinstance(option, str)]
    wish = f" with {', and '.join(pairs)}" if pairs else ""
    ceiling = "" if price_upper == NO_CEILING else f", and price lower than {price_upper:.2f} dollars"
    return Goal(
        asin=product.asin,
        instruction=instruction + wish + ceiling,
        attributes=attributes,
        options=options,
        price_upper=price_upper,
        weight=weight,
        query=product.query,
        category=product.category,
        product_category=product.product_category,
        title=product.title,
    )


class GoalSource(Protocol):
    """Goals in their canonical order."""

    def __len__(self) -> int: ...

    def goal(self, position: int) -> Goal:
        """Return the goal at a position in [0, len)."""

    def owners(self) -> np.ndarray:
        """Return a number for the product of each goal: integers [len]."""

    def owner_name(self, number: int) -> str:
        """Return the ASIN of one of these numbers."""

    def find_twins(self, positions: Sequence[int]) -> set[int]:
        """Return all positions whose goal has the key of a goal at one of ``positions``, which are included."""

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of all goals and their order."""


class ListedGoals:
    """Goals in memory, in their canonical order."""

    def __init__(self, goals: Iterable[Goal]) -> None:
        self._goals = tuple(goals)
        self._asins = tuple(dict.fromkeys(goal.asin for goal in self._goals))

    def __len__(self) -> int:
        return len(self._goals)

    def goal(self, position: int) -> Goal:
        """Return the goal at a position."""
        return self._goals[position]

    def owners(self) -> np.ndarray:
        """Return a number for each goal's product: int64 [len]."""
        numbers = {asin: number for number, asin in enumerate(self._asins)}
        return np.array([numbers[goal.asin] for goal in self._goals], dtype=np.int64)

    def owner_name(self, number: int) -> str:
        """Return the ASIN of one of these numbers."""
        return self._asins[number]

    def find_twins(self, positions: Sequence[int]) -> set[int]:
        """See :class:`GoalSource`."""
        keys = {self._goals[position].key for position in positions}
        return {position for position, goal in enumerate(self._goals) if goal.key in keys}

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of all goals and their order."""
        digest = hashlib.sha256()
        for goal in self._goals:
            digest.update(hashlib.sha256(canonical_json(goal.to_row()).encode()).digest())
        return digest.hexdigest()
