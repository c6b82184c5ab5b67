"""Goals as tasks: their division into ``train``, ``eval`` and ``test``, ids and fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, overload

import numpy as np

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import NumberedTaskSet, Task, canonical_json
from spear_envs.webshop.goals import Goal, GoalSource

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
    """test 0-499, eval 500-1499, train the rest; a goal of one of them is left out of the later ones."""
    VERL_AGENT = "verl-agent"
    """test 0-499, train the rest, no eval, nothing left out: for comparison with published numbers. A goal may be in
    both."""
    PRODUCT = "product"
    """By product: splits share none. test and eval have a tenth of the goals each, but 100 to 500 (a third each of
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
"""Larger sets are not enumerated."""


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
