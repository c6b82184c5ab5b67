"""Goals: what to buy, lists of goals and their files, and the division of a list into the tasks of each split."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import NumberedTaskSet, Task, canonical_json
from spear_envs.webshop.products import Product, read_json, read_number, read_texts

NO_CEILING = 1_000_000.0
"""``price_upper`` of a goal whose text names no ceiling."""


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
    """Rarity of its attributes: the mean of 1 / (number of goals with the attribute); 1 for human goals."""
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
    requirement = f" with {', and '.join(pairs)}" if pairs else ""
    ceiling = "" if price_upper == NO_CEILING else f", and price lower than {price_upper:.2f} dollars"
    return Goal(
        asin=product.asin,
        instruction=instruction + requirement + ceiling,
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
        """Return the ASIN of the product that :meth:`owners` gave this number."""

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
        """Return the ASIN of the product that :meth:`owners` gave this number."""
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


def read_goals(path: Path) -> list[Goal]:
    """Read the goals of a file; the index of a goal is its row, from 0.

    Raises:
        SpearError: the file is missing, broken or empty, or a row is not a goal; the message names the row.
    """
    goals: list[Goal] = []
    try:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for line in file:
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, Mapping):
                    raise SpearError("a goal must be an object")
                if row.get("index", len(goals)) != len(goals):
                    raise SpearError(f"its index is {row['index']!r}: rows must be in order and complete")
                goals.append(Goal.from_row(row))
    except FileNotFoundError:
        raise SpearError(f"{path} does not exist: check the name of the goals file.") from None
    except OSError as error:
        raise SpearError(f"{path} cannot be read ({error.strerror}): name a goals file.") from None
    except (SpearError, ValueError, RecursionError, EOFError, lzma.LZMAError) as error:
        problem = str(error) if isinstance(error, SpearError) else f"broken JSON ({error})"
        raise SpearError(f"{path}, row {len(goals)}: {problem}. Repair the file or make it again.") from None
    if not goals:
        raise SpearError(f"{path} is empty: name a file with goals.")
    return goals


def write_goals(goals: Iterable[Goal], path: Path) -> None:
    """Write goals for :func:`read_goals`; packed if the name ends in ``.xz``."""
    with lzma.open(path, "wt", encoding="utf-8") if path.suffix == ".xz" else path.open("w", encoding="utf-8") as file:
        for index, goal in enumerate(goals):
            file.write(json.dumps({"index": index, **goal.to_row()}) + "\n")


def read_prices(goals_file: Path) -> dict[str, float]:
    """Read prices by ASIN from ``prices.json[.xz]`` next to a goals file; none without that file.

    Raises:
        SpearError: the file is not an object of numbers.
    """
    path = next(
        (path for suffix in ("", ".xz") if (path := goals_file.parent / f"prices.json{suffix}").is_file()), None
    )
    if path is None:
        return {}
    prices = read_json(path)
    if not isinstance(prices, Mapping):
        raise SpearError(f"{path} must be an object of prices in dollars by ASIN.")
    return {asin: read_number(price, f"{path}: the price of {asin}") for asin, price in prices.items()}


SPLITS = ("train", "eval", "test")
"""The splits of a list of goals."""
ALL = "all"
"""Name of the full list."""
TEST_GOALS, EVAL_GOALS = 500, 1_000
"""The first 500 goals are the test split of the original, the next 1,000 its eval split."""
LEAST_SHARE, MOST_SHARE = 100, 500
"""Bounds of the number of goals in test and in eval under :attr:`SplitScheme.PRODUCT`."""


class SplitScheme(str, Enum):
    """The rule that divides a list of goals."""

    ORIGINAL = "original"
    """test 0-499, eval 500-1499, train the rest; a goal of an earlier split is left out of later ones."""
    VERL_AGENT = "verl-agent"
    """test 0-499, train the rest, no eval, nothing left out: for comparison with published numbers. A goal may be in
    both."""
    PRODUCT = "product"
    """Splits share no product. test and eval have a tenth of the goals each, but 100 to 500 (a third each of
    fewer than 300 goals)."""


class Positions(Sequence[int]):
    """Ascending positions: a range without a few. Only the missing ones take memory.

    Args:
        start, stop: the range.
        without: positions left out.
    """

    def __init__(self, start: int, stop: int, without: Iterable[int] = ()) -> None:
        self.start, self.stop = start, max(start, stop)
        kept_out = sorted({position for position in without if start <= position < stop})
        self.without = np.array(kept_out, dtype=np.int64)
        # Number of kept positions before each one left out.
        self._before = self.without - start - np.arange(len(kept_out))

    def __len__(self) -> int:
        return self.stop - self.start - len(self.without)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        size = len(self)
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(size))]
        if not -size <= index < size:
            raise IndexError(f"position {index} of {size}")
        index %= size
        return int(self.start + index + np.searchsorted(self._before, index, side="right"))


def positions_to_json(positions: Sequence[int]) -> dict[str, Any]:
    """Return a JSON object for :func:`positions_from_json`."""
    if isinstance(positions, Positions):
        return {"start": positions.start, "stop": positions.stop, "without": positions.without.tolist()}
    return {"positions": list(positions)}


def positions_from_json(value: Mapping[str, Any]) -> Sequence[int]:
    """Read the positions of a JSON object.

    Raises:
        KeyError, TypeError: the object has another form.
    """
    if "positions" in value:
        return tuple(value["positions"])
    return Positions(value["start"], value["stop"], value["without"])


def split_goals(source: GoalSource, scheme: SplitScheme) -> dict[str, Sequence[int]]:
    """Return the positions of ``train``, ``eval`` and ``test`` in the canonical order.

    A split is empty if the scheme lacks it or the list is too short.
    """
    total = len(source)
    if scheme is SplitScheme.PRODUCT:
        return _split_by_product(source)
    test = Positions(0, min(TEST_GOALS, total))
    if scheme is SplitScheme.VERL_AGENT:
        return {"train": Positions(len(test), total), "eval": Positions(0, 0), "test": test}
    held_out = min(TEST_GOALS + EVAL_GOALS, total)
    return {
        "train": Positions(held_out, total, source.find_twins(range(held_out))),
        "eval": Positions(len(test), held_out, source.find_twins(test)),
        "test": test,
    }


def _split_by_product(source: GoalSource) -> dict[str, Sequence[int]]:
    total = len(source)
    share = min(max(total // 10, LEAST_SHARE), MOST_SHARE, total // 3)
    owners = source.owners()
    numbers, counts = np.unique(owners, return_counts=True)

    # An order that depends neither on the other products nor on the number of goals.
    def rank(i: int) -> bytes:
        return hashlib.sha256(source.owner_name(int(numbers[i])).encode()).digest()

    room = {"test": share, "eval": share}
    taken: dict[str, list[int]] = {"test": [], "eval": []}
    for i in sorted(range(len(numbers)), key=rank):
        split = next((split for split, left in room.items() if counts[i] <= left), None)
        if split is not None:
            room[split] -= int(counts[i])
            taken[split].append(int(numbers[i]))
    held_out = {split: tuple(np.flatnonzero(np.isin(owners, taken[split])).tolist()) for split in taken}
    return {"train": Positions(0, total, held_out["test"] + held_out["eval"]), **held_out}


def choose_split(splits: Mapping[str, Sequence[int]], split: str, scheme: SplitScheme, total: int) -> Sequence[int]:
    """Return the positions of a split or of ``all``.

    Raises:
        SpearError: the split has no goals; the message names others.
    """
    if split == ALL:
        return Positions(0, total)
    positions = splits[split]
    if len(positions):
        return positions
    full = ", ".join(repr(name) for name in SPLITS if len(splits[name]))
    raise SpearError(
        f"split={split!r} has no goals under split_scheme={scheme.value!r} with {total:,} goals in all:"
        f" choose {full or 'another catalogue'}, or {ALL!r}."
    )


NAME = "webshop"
BOUNDED = 100_000
"""Most goals of a set that is enumerated."""


@dataclass(frozen=True)
class GoalTask(Task):
    """A task with the goal that its content describes."""

    goal: Goal


def _read_key(task: Task) -> str:
    assert isinstance(task, GoalTask)
    return task.goal.key


class GoalTaskSet(NumberedTaskSet):
    """Goals of one split as tasks, made on demand.

    Ids are ``webshop/<split>/<index within the split>``, five digits or more.

    Args:
        source: all goals, in canonical order.
        positions: the positions of its goals in ``source``.
        world: fingerprint of the rest that a score depends on: products, prices, tagger.
    """

    def __init__(self, source: GoalSource, split: str, positions: Sequence[int], world: str) -> None:
        super().__init__(NAME, split, len(positions), digest=_read_key)
        self.bounded = len(positions) <= BOUNDED
        self._source = source
        self._positions = positions
        self._world = world

    def _make_task(self, index: int) -> GoalTask:
        goal = self._source.goal(self._positions[index])
        return GoalTask(
            id=self.id_of(index),
            split=self.split,
            subtask=goal.category or "other",
            instruction=goal.instruction,
            content=goal.to_row(),
            goal=goal,
        )

    def _definition(self) -> Any:
        positions = canonical_json(positions_to_json(self._positions)).encode()
        return {
            "name": NAME,
            "split": self.split,
            "goals": self._source.fingerprint,
            "positions": hashlib.sha256(positions).hexdigest(),
            "world": self._world,
        }
