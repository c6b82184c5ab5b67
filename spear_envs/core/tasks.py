"""Tasks and task sets: stable ids, fingerprints, and splits that share no content."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np

from spear_envs.core.errors import SpearError, UnknownTaskError, suggest_name

FINGERPRINT_SAMPLE = 256
"""Tasks of a generated set in its fingerprint, besides the parameters of the generator."""

SUBSET_SALT = "spear-subset-1"
"""Seed of :func:`choose_subset`; another would choose other tasks."""

DISJOINT_SAMPLE = 2_000
"""Tasks of a generated set that :func:`check_disjoint` compares by default."""


def canonical_json(value: Any) -> str:
    """Write a value as canonical JSON: sorted keys, no blanks, ASCII, no NaN. Equal values give equal text.

    Raises:
        TypeError, ValueError: the value is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def choose_subset(tasks: TaskSet, size: int) -> Sequence[int]:
    """Choose the positions of ``size`` tasks, always the same, that represent the set.

    Each subtask has its share, to less than one task; within it the lowest salted hashes of the ids count, so the order
    of the set does not matter. Of a generated set, whose tasks are drawn independently, these are the first.

    Args:
        tasks: the set.
        size: number of tasks; negative, or more than there are, for all.

    Returns:
        Positions in ascending order.
    """
    if size < 0 or size >= len(tasks):
        return range(len(tasks))
    if not tasks.bounded:
        return range(size)
    groups: dict[str, list[tuple[str, int]]] = {}
    for position, task in enumerate(tasks):
        key = hashlib.sha256(f"{SUBSET_SALT}\0{task.id}".encode("utf-8", "replace")).hexdigest()
        groups.setdefault(task.subtask, []).append((key, position))
    names = sorted(groups)
    shares = [size * len(groups[name]) for name in names]  # in parts of len(tasks), so that nothing is rounded
    counts = [share // len(tasks) for share in shares]
    # The largest remainders take what is left.
    by_remainder = sorted(range(len(names)), key=lambda i: (-(shares[i] % len(tasks)), names[i]))
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    chosen = (sorted(groups[name])[:count] for name, count in zip(names, counts, strict=True))
    return sorted(position for group in chosen for _, position in group)


@dataclass(frozen=True)
class Task:
    """One task: everything that an environment needs to start the same episode again."""

    id: str
    """Stable id ``<name>/<split>/<number>``, such as ``sokoban-v1/6x6-1/train/00000017``."""
    split: str
    """Name of the split."""
    subtask: str
    """Kind of task, for reports of success."""
    instruction: str
    """The task in words."""
    content: Mapping[str, Any] = field(hash=False)
    """The definition, in JSON values."""

    def definition(self) -> dict[str, Any]:
        """Return the task as a JSON object, for fingerprints."""
        names = ("id", "split", "subtask", "instruction")
        return {**{name: getattr(self, name) for name in names}, "content": dict(self.content)}


class TaskSet(Sequence[Task]):
    """An ordered set of tasks of one split.

    Args:
        name: first part of the ids, such as ``sokoban-v1/6x6-1``.
        split: second part of the ids.
        digest: key of a task's content, to find tasks shared by two splits; by default the SHA-256 of the content's
            canonical JSON. Pass another if different content is the same task (a mirrored board).
    """

    bounded: bool
    """Whether all tasks may be enumerated; False for lazily generated sets, which may be huge."""

    def __init__(self, name: str, split: str, digest: Callable[[Task], str] | None = None) -> None:
        self.name = name
        self.split = split
        self._digest = digest

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _task_at(self, index: int) -> Task:
        """Return the task at an index in [0, len)."""

    @abstractmethod
    def index_of(self, task_id: str) -> int:
        """Return the position of a task.

        Raises:
            UnknownTaskError: this set lacks the id.
        """

    @abstractmethod
    def _definition(self) -> Any:
        """Return the JSON value that identifies this set."""

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._task_at(i) for i in range(*index.indices(len(self)))]
        size = len(self)
        position = index + size if index < 0 else index
        if not 0 <= position < size:
            raise IndexError(f"task {index} of {self.name}/{self.split}, which has {size} tasks")
        return self._task_at(position)

    def __contains__(self, task: object) -> bool:
        task_id = task.id if isinstance(task, Task) else task
        try:
            return isinstance(task_id, str) and self.index_of(task_id) >= 0
        except UnknownTaskError:
            return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}/{self.split}: {len(self)} tasks>"

    def get(self, task_id: str) -> Task:
        """Return the task with this id.

        Raises:
            UnknownTaskError: there is none; the message shows examples of ids.
        """
        return self._task_at(self.index_of(task_id))

    def draw(self, np_random: np.random.Generator) -> Task:
        """Draw a task uniformly with one call ``np_random.integers(len(self))``."""
        return self._task_at(int(np_random.integers(len(self))))

    def digest(self, index: int) -> str:
        """Return the key of the content of the task at ``index``; splits must not share keys."""
        task = self[index]
        return self._digest(task) if self._digest else _sha256(canonical_json(dict(task.content)))

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of the ordered task definitions: equal fingerprints mean the same tasks.

        For a generated set it covers the parameters of the generator, the length and the first 256 tasks.

        Raises:
            SpearError: a definition is not JSON.
        """
        try:
            return _sha256(canonical_json(self._definition()))
        except (TypeError, ValueError) as error:
            raise SpearError(f"The content of a task of {self.name!r} is not JSON ({error}).") from error

    def _unknown(self, task_id: object, hint: str) -> UnknownTaskError:
        return UnknownTaskError(
            f"Unknown task {task_id!r}: the ids of this {self.split!r} split run from {self[0].id!r} to {self[-1].id!r}"
            f" ({len(self):,} tasks).{hint}"
        )


class ListTaskSet(TaskSet):
    """Tasks in a list.

    Raises:
        SpearError: there are no tasks, an id occurs twice, or tasks have several splits.
    """

    bounded = True

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        name: str | None = None,
        split: str | None = None,
        digest: Callable[[Task], str] | None = None,
    ) -> None:
        self._tasks = tuple(tasks)
        if not self._tasks:
            raise SpearError(f"The task set {name or ''!r} has no tasks: give it at least one.")
        splits = {task.split for task in self._tasks}
        if len(splits) > 1 and split is None:
            raise SpearError(f"The tasks are of several splits ({', '.join(sorted(splits))}): make one set of each.")
        self._index = {task.id: i for i, task in enumerate(self._tasks)}
        if len(self._index) < len(self._tasks):
            twice = next(task.id for i, task in enumerate(self._tasks) if self._index[task.id] != i)
            raise SpearError(f"The task id {twice!r} occurs twice: ids must be unique.")
        first = self._tasks[0]
        super().__init__(name or first.id.split("/")[0], split or first.split, digest)

    def __len__(self) -> int:
        return len(self._tasks)

    def _task_at(self, index: int) -> Task:
        return self._tasks[index]

    def index_of(self, task_id: str) -> int:
        """Return the position of a task; raises ``UnknownTaskError``."""
        try:
            return self._index[task_id]
        except (KeyError, TypeError):
            hint = suggest_name(str(task_id), self._index) if len(self) <= 10_000 else ""
            raise self._unknown(task_id, hint) from None

    def _definition(self) -> Any:
        return [task.definition() for task in self._tasks]


class NumberedTaskSet(TaskSet):
    """Tasks that are made on demand, with ids from their positions.

    Args:
        name, split: the ids are ``<name>/<split>/<place, zero-padded to digits>``.
        digits: least width of the number in the id.
        cache_size: number of tasks to keep, least recently used dropped first.

    Raises:
        SpearError: a length or a cache is below 1.
    """

    def __init__(
        self,
        name: str,
        split: str,
        length: int,
        *,
        digits: int = 5,
        cache_size: int = 1_024,
        digest: Callable[[Task], str] | None = None,
    ) -> None:
        if length < 1 or cache_size < 1:
            raise SpearError(f"The task set {name}/{split} needs a length and a cache of at least 1.")
        super().__init__(name, split, digest)
        self._length = length
        self._digits = digits
        self._cache_size = cache_size
        self._recall = self._make_cache()

    def _make_cache(self) -> Callable[[int], Task]:
        # Thread-safe, since threads share a set.
        return lru_cache(maxsize=self._cache_size)(self._make_task)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_recall"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._recall = self._make_cache()

    @abstractmethod
    def _make_task(self, index: int) -> Task:
        """Make the task at an index in [0, len), always the same, with :meth:`id_of` the index as its id."""

    def __len__(self) -> int:
        return self._length

    def id_of(self, index: int) -> str:
        """Return the id of the task at ``index``, without making the task."""
        return f"{self.name}/{self.split}/{index:0{self._digits}d}"

    def _task_at(self, index: int) -> Task:
        return self._recall(index)

    def index_of(self, task_id: str) -> int:
        """Return the position of a task; raises ``UnknownTaskError``."""
        number = task_id.rpartition("/")[2] if isinstance(task_id, str) else ""
        # isascii: isdigit alone accepts digits of other scripts.
        if number.isascii() and number.isdigit() and len(number) <= max(self._digits, len(str(self._length))):
            index = int(number)
            if index < self._length and self.id_of(index) == task_id:
                return index
        raise self._unknown(task_id, "")


class GeneratedTaskSet(NumberedTaskSet):
    """Tasks of a generator: task ``i`` is ``make(i)``, always the same for the same ``i`` and parameters.

    Args:
        name, split, length, digits, cache_size, digest: as in :class:`NumberedTaskSet`.
        make: makes task ``i``; must only depend on ``i`` and ``parameters``.
        parameters: JSON values that ``make`` depends on; part of the fingerprint.
    """

    bounded = False

    def __init__(
        self,
        name: str,
        split: str,
        length: int,
        make: Callable[[int], Task],
        parameters: Mapping[str, Any],
        *,
        digits: int = 8,
        cache_size: int = 4_096,
        digest: Callable[[Task], str] | None = None,
    ) -> None:
        super().__init__(name, split, length, digits=digits, cache_size=cache_size, digest=digest)
        self.parameters = dict(parameters)
        self._make = make

    def _make_task(self, index: int) -> Task:
        task = self._make(index)
        if task.id != self.id_of(index):
            raise SpearError(f"make({index}) gave the task {task.id!r} instead of {self.id_of(index)!r}.")
        return task

    def _definition(self) -> Any:
        sample = [self._task_at(i).definition() for i in range(min(self._length, FINGERPRINT_SAMPLE))]
        about = {"name": self.name, "split": self.split, "length": self._length}
        return {**about, "parameters": self.parameters, "first": sample}


def check_disjoint(*sets: TaskSet, sample: int = DISJOINT_SAMPLE) -> int:
    """Check that no two sets share a task by content; return how many tasks were compared.

    Args:
        sample: first tasks to compare of sets that are not ``bounded``.

    Raises:
        SpearError: two tasks of different sets have the same digest; the message names both ids.
    """
    seen: dict[str, tuple[int, int]] = {}
    compared = 0
    for number, tasks in enumerate(sets):
        for index in range(len(tasks) if tasks.bounded else min(sample, len(tasks))):
            compared += 1
            other, place = seen.setdefault(tasks.digest(index), (number, index))
            if other != number:
                raise SpearError(
                    f"The splits overlap: {sets[other][place].id!r} and {tasks[index].id!r} have the same content;"
                    " give each content to one split only."
                )
    return compared


def check_split(split: str, splits: tuple[str, ...]) -> str:
    """Return ``split`` if it is one of ``splits``.

    Raises:
        SpearError: it is not; the message lists them.
    """
    if split not in splits:
        valid = ", ".join(repr(name) for name in splits)
        raise SpearError(f"split={split!r} is not valid: choose one of {valid}.{suggest_name(str(split), splits)}")
    return split
