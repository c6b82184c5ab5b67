"""The products of a catalogue, with the prices and goals that are drawn for them."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import reduce
from itertools import accumulate
from operator import add
from random import Random
from typing import Any, NamedTuple

import numpy as np

from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.tasks import canonical_json
from spear_envs.webshop.goals import NO_CEILING, Goal, GoalKind, GoalSource, ListedGoals, make_goal
from spear_envs.webshop.products import MAX_ASIN, Entry, Product, make_entry, read_texts

STEPS = tuple(10.0 * i for i in range(1, 100))
"""Possible ceilings in dollars."""
ORDER_SEED = 233
"""Seed of the shuffle that gives the canonical order of goals, as in the original."""
ASIN = f"S{MAX_ASIN}"
"""NumPy's type of an ASIN."""


class DrawMode(str, Enum):
    """The source of a catalogue's random numbers."""

    KEYED = "keyed"
    """Each from the SHA-256 of seed, ASIN and instruction, independent of the catalogue's order and size."""
    SEQUENTIAL = "sequential"
    """All from ``random.Random(seed)``, prices first, in the order of the file, as in the original under a seed."""


class Draws:
    """Prices and ceilings, drawn by key (:attr:`DrawMode.KEYED`).

    Every price is drawn before the first ceiling.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draw_price(self, asin: str, low: float, high: float) -> float:
        """Draw the price in dollars that the reward uses from a product's range."""
        return low + (high - low) * self._unit(asin)

    def draw_ceiling(self, asin: str, number: int, price: float) -> float:
        """Draw ``price_upper`` for instruction ``number`` of a product: the larger of two of the next four tens."""
        steps = ceilings_above(price)
        # The larger element of each pair: step i is the larger one of i pairs.
        larger = [step for i, step in enumerate(steps) for _ in range(i)]
        return larger[int(self._unit(asin, number) * len(larger))] if larger else NO_CEILING

    def _unit(self, *key: str | int) -> float:
        """Return a number in [0, 1) with 53 random bits."""
        digest = hashlib.sha256(canonical_json([self._seed, *key]).encode()).digest()
        return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


class SequentialDraws(Draws):
    """Prices and ceilings from one generator (:attr:`DrawMode.SEQUENTIAL`)."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def draw_price(self, asin: str, low: float, high: float) -> float:
        """Draw the next price, uniformly."""
        return self._random.uniform(low, high)

    def draw_ceiling(self, asin: str, number: int, price: float) -> float:
        """Draw the next ceiling."""
        steps = ceilings_above(price)
        return NO_CEILING if len(steps) < 2 else max(self._random.sample(steps, 2))


def ceilings_above(price: float) -> tuple[float, ...]:
    """Return the first four of 10, 20, …, 990 dollars above a price."""
    first = max(0, int(min(price, 1_000.0) // 10))
    return STEPS[first : first + 4]


def read_entries(
    records: Iterable[Any], find_attributes: Callable[[str], Mapping[str, Any] | None], name: object, first: int = 0
) -> Iterator[Entry]:
    """Yield the entries, without nouns, of the products that the shop lists, in the order of the records.

    Records without a valid ASIN are skipped unread, as in the original. An ASIN may repeat.

    Args:
        records: of ``items_shuffle*.json``.
        find_attributes: returns the part of ``items_ins_v2*.json`` about an ASIN, or None.
        name: of the file, for errors.
        first: number of the first record.

    Raises:
        SpearError: a record is malformed; the message has its number.
    """
    for number, record in enumerate(records, first):
        try:
            if not isinstance(record, Mapping):
                raise SpearError("a product must be an object")
            asin = record.get("asin")
            if isinstance(asin, str) and (asin == "nan" or len(asin) > MAX_ASIN):
                continue
            yield make_entry(record, find_attributes(asin) if isinstance(asin, str) else None)
        except SpearError as error:
            raise SpearError(f"{name}, record {number}: {error}. Repair the file, or fetch it again.") from None


class EntryTable:
    """The entries of N products, numbered by ascending ASIN.

    Args:
        asins: S10 [N], ascending.
        read_entry: returns the entry of a number.
        fingerprint: SHA-256 (hex) of all entries, in order.
    """

    def __init__(self, asins: np.ndarray, read_entry: Callable[[int], Entry], fingerprint: str) -> None:
        self.asins = asins
        self.entry = read_entry
        self.fingerprint = fingerprint

    def number_of(self, asin: str) -> int | None:
        """Return the number of a product, or None."""
        if not (asin.isascii() and asin.isprintable() and 0 < len(asin) <= MAX_ASIN):
            return None
        # In the array's type, or numpy would copy the array to compare.
        key = np.array(asin.encode("ascii"), ASIN)
        number = int(np.searchsorted(self.asins, key))
        return number if number < len(self.asins) and self.asins[number] == key else None


NO_GOALS = -1
"""Value of ``choices`` for a product without an instruction, which makes no goals; 0 is one with an empty option."""
MOST_CHOICES = 1 << 32
"""Most goals of a product: a store numbers goals with 32 bits."""


def count_choices(product: Product) -> int:
    """Count the ways to choose one value of each group of options.

    Raises:
        SpearError: there are more ways than goals can be numbered.
    """
    count = math.prod(map(len, product.options.values()))
    if count > MOST_CHOICES:
        raise SpearError(f"product {product.asin}: its options make {count:,} goals: leave it out.")
    return count


class Offers(NamedTuple):
    """What prices and goals are drawn from: P listed products in the order of the file, of which ASINs may repeat."""

    asins: np.ndarray
    """S10 [P]."""
    prices: np.ndarray
    """float64 [P, 2]: amounts in dollars; the second is NaN without a range."""
    choices: np.ndarray
    """int64 [P]: combinations of option values, -1 without an instruction."""
    wanted: list[tuple[str, ...]]
    """Attributes that each instruction asks for; empty without one."""


def list_offers(entries: Sequence[Entry]) -> Offers:
    """List the offers of entries.

    Raises:
        SpearError: a product has more combinations than goals can be numbered.
    """
    products = [entry.product for entry in entries]
    return Offers(
        np.array([product.asin.encode("ascii") for product in products], ASIN),
        np.array([(*product.prices, np.nan)[:2] for product in products], np.float64).reshape(-1, 2),
        np.array(
            [NO_GOALS if entry.instruction is None else count_choices(entry.product) for entry in entries], np.int64
        ),
        [entry.wanted for entry in entries],
    )


class Stock:
    """The N different products among some offers, of which the first of an ASIN counts."""

    def __init__(self, offers: Offers) -> None:
        self.asins, self.firsts = np.unique(offers.asins, return_index=True)
        """S10 [N], ascending, and the place of each among the offers."""
        self._prices = offers.prices[self.firsts]
        self._choices = offers.choices[self.firsts]
        self._wanted = [offers.wanted[first] for first in self.firsts]
        self._in_file_order = np.argsort(self.firsts)

    def draw_prices(self, draws: Draws) -> np.ndarray:
        """Draw the price of each product: float64 [N], in dollars."""
        prices = self._prices[:, 0].copy()
        order = self._in_file_order
        for number in order[~np.isnan(self._prices[order, 1])]:
            prices[number] = draws.draw_price(self._asin(number), *self._prices[number].tolist())
        return prices

    def make_goals(
        self, kind: GoalKind, mode: DrawMode, seed: int, entries: EntryTable, instructions: Mapping[str, Any]
    ) -> GoalSource:
        """Make all goals of a kind.

        Args:
            instructions: content of ``items_human_ins.json``, for human goals; other products are skipped.

        Raises:
            SpearError: an instruction has the wrong form, or there are more goals than can be numbered.
        """
        draws = make_draws(mode, seed)
        prices = self.draw_prices(draws)  # a sequential generator gives the first ceiling right after the last price
        if kind is GoalKind.SYNTHETIC:
            return TableGoals(self._make_table(prices, draws), entries)
        found = (entries.number_of(asin) for asin in instructions)
        goals: list[Goal] = []
        for number in sorted((number for number in found if number is not None), key=self.firsts.__getitem__):
            product = entries.entry(number).product
            for row, text, attributes, options in read_instructions(product.asin, instructions[product.asin]):
                ceiling = draws.draw_ceiling(product.asin, row, float(prices[number]))
                goals.append(make_goal(product, text, attributes, options, ceiling, weight=1.0))
        Random(ORDER_SEED).shuffle(goals)
        return ListedGoals(goals)

    def _make_table(self, prices: np.ndarray, draws: Draws) -> dict[str, np.ndarray]:
        """Make the arrays of :class:`TableGoals`."""
        numbers = self._in_file_order[self._choices[self._in_file_order] != NO_GOALS]
        choices = self._choices[numbers].tolist()
        ceilings = [draws.draw_ceiling(self._asin(number), 0, float(prices[number])) for number in numbers]
        counts: Counter[str] = Counter()
        for number, count in zip(numbers, choices, strict=True):
            for name in self._wanted[number]:
                counts[name] += count
        # Added from left to right: from Python 3.12 on, `sum` of floats compensates, which changes last digits.
        weights = [
            reduce(add, (1.0 / counts[name] for name in wanted)) / len(wanted) if count else 0.0
            for wanted, count in zip((self._wanted[number] for number in numbers), choices, strict=True)
        ]
        starts = list(accumulate(choices, initial=0))
        if starts[-1] >= 1 << 32:
            raise SpearError(
                f"the options of the products make {starts[-1]:,} goals: leave out products with very many options"
            )
        order = array("I", range(starts[-1]))
        Random(ORDER_SEED).shuffle(order)
        values = {"numbers": numbers, "ceilings": ceilings, "weights": weights, "starts": starts, "order": order}
        return {name: np.array(values[name], kind) for name, kind in GOAL_ARRAYS.items()}

    def _asin(self, number: int) -> str:
        return self.asins[number].decode("ascii")


def make_draws(mode: str | DrawMode, seed: int) -> Draws:
    """Make the draws of a mode.

    Raises:
        SpearError: the mode is unknown.
    """
    return (Draws if choose_member(DrawMode, mode, "draws") is DrawMode.KEYED else SequentialDraws)(seed)


GOAL_ARRAYS = {"numbers": "<u4", "ceilings": "<f8", "weights": "<f8", "starts": "<u4", "order": "<u4"}
"""Arrays of :class:`TableGoals` and their types."""
DAMAGED = "the table of goals is damaged: build the store again ('spear data build webshop')."


class TableGoals:
    """G synthetic goals of R products with an instruction, made on demand.

    Before the shuffle, those of product ``r`` have the numbers ``starts[r]`` to ``starts[r + 1] - 1``, one for each
    combination of option values.

    Args:
        arrays: ``numbers`` [R] of the products, ``ceilings`` [R] in dollars, ``weights`` [R], ``starts`` [R + 1], and
            ``order`` [G], the goal at each position of the canonical order.
        entries: the products.
        fingerprint: of the arrays, if known.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], entries: EntryTable, fingerprint: str | None = None) -> None:
        self.arrays = arrays
        self._entries = entries
        self._fingerprint = fingerprint
        self._numbers, self._starts, self._order = arrays["numbers"], arrays["starts"], arrays["order"]

    def __len__(self) -> int:
        return len(self._order)

    def goal(self, position: int) -> Goal:
        """Make the goal at a position."""
        row, choice = self._locate(position)
        entry = self._entries.entry(int(self._numbers[row]))
        if entry.instruction is None:
            raise SpearError(DAMAGED)
        options = entry.product.options
        chosen = []
        for group in sorted(options, reverse=True):  # the last group changes fastest
            choice, digit = divmod(choice, len(options[group]))
            chosen.append((group, options[group][digit]))
        ceiling, weight = (float(self.arrays[name][row]) for name in ("ceilings", "weights"))
        return make_goal(entry.product, entry.instruction, entry.wanted, tuple(reversed(chosen)), ceiling, weight)

    def owners(self) -> np.ndarray:
        """Return the number of each goal's product: uint32 [len]."""
        return np.repeat(self._numbers, np.diff(self._starts.astype(np.int64)))[self._order]

    def owner_name(self, number: int) -> str:
        """Return the product's ASIN."""
        return self._entries.asins[number].decode("ascii")

    def find_twins(self, positions: Sequence[int]) -> set[int]:
        """See :class:`~spear_envs.webshop.goals.GoalSource`.

        Goals of one product are equal if an option repeats a value; goals of different products never are.
        """
        twins: set[int] = set()
        for position in positions:
            row, choice = self._locate(position)
            options = self._entries.entry(int(self._numbers[row])).product.options
            choices = [0]
            for group in sorted(options, reverse=True):
                values = options[group]
                choice, digit = divmod(choice, len(values))
                stride = math.prod(len(options[later]) for later in options if later > group)
                same = [i for i, value in enumerate(values) if value == values[digit]]
                choices = [base + i * stride for i in same for base in choices]
            if len(choices) > 1:
                start = int(self._starts[row])
                twins.update(start + base for base in choices)
        found = set(positions)
        if twins:
            numbers = np.fromiter(twins, np.uint32, len(twins))
            found.update(np.flatnonzero(np.isin(self._order, numbers)).tolist())
        return found

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of all goals and their order, without the products' records."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for name, kind in GOAL_ARRAYS.items():
                digest.update(np.ascontiguousarray(self.arrays[name], kind).data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the row of the goal at a position, and the number of its choice."""
        # In the array's type, or numpy would copy the array to compare.
        place = self._order[position]
        row = int(np.searchsorted(self._starts, place, side="right")) - 1
        if row >= len(self._numbers):
            raise SpearError(DAMAGED)
        return row, int(place) - int(self._starts[row])


HumanInstruction = tuple[int, str, tuple[str, ...], tuple[str, ...]]
"""The instruction's number among those of its product, text, attributes and option values."""


def read_instructions(asin: str, rows: object) -> list[HumanInstruction]:
    """Read the instructions of a product that name an attribute; dots at both ends of the text are dropped.

    Raises:
        SpearError: the entry has the wrong form.
    """
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise SpearError(f"the instructions for {asin} must be a list of objects")

    def read_list(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
        return read_texts(row.get(name), f"{name} of an instruction for {asin}")

    read = []
    for number, row in enumerate(rows):
        attributes = read_list(row, "instruction_attributes")
        if not attributes:
            continue
        text = row.get("instruction")
        if not isinstance(text, str):
            raise SpearError(f"instruction {number} for {asin} must have a text under 'instruction'")
        read.append((number, text.strip("."), attributes, read_list(row, "instruction_options")))
    return read
