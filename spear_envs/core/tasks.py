"""Tasks and task sets: stable ids, fingerprints, and splits that share no content."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, overload

import numpy as np

from spear_envs.core.errors import SpearError, UnknownTaskError, suggest_name

FINGERPRINT_SAMPLE = 256
"""How many tasks of a generated set go into its fingerprint, beside the parameters of the generator."""

DISJOINT_SAMPLE = 2_000
"""How many tasks of a generated set :func:`check_disjoint` looks at, unless told otherwise."""


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no blanks, ASCII, no NaN. Equal values give equal text anywhere.

    Raises:
        TypeError, ValueError: the value is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True)
class Task:
    """One task: what an environment needs to start the same episode anywhere, any time."""

    id: str
    """Stable id ``<name>/<split>/<number>``, such as ``sokoban-v1/6x6-1/train/00000017``."""
    split: str
    """The split it belongs to."""
    subtask: str
    """Kind of task that success is reported by."""
    instruction: str
    """What is to be done, in words."""
    content: Mapping[str, Any] = field(hash=False)
    """The definition itself, made of JSON values."""

    def definition(self) -> dict[str, Any]:
        """All of the task as a JSON object; what fingerprints are taken of."""
        return {
            "id": self.id,
            "split": self.split,
            "subtask": self.subtask,
            "instruction": self.instruction,
            "content": dict(self.content),
        }


class TaskSet(Sequence[Task]):
    """An ordered set of tasks of one split.

    Args:
        name: what the ids begin with, such as ``sokoban-v1/6x6-1``.
        split: the split, the second part of the ids.
        digest: key of a task's content, for telling whether two splits share a task; by default the SHA-256 of the
            content's canonical JSON. Pass another where different content is the same task (a mirrored board).
    """

    bounded: bool
    """Whether all tasks may be looked at one by one; False for lazily generated sets, which may be huge."""

    def __init__(self, name: str, split: str, digest: Callable[[Task], str] | None = None) -> None:
        self.name = name
        self.split = split
        self._digest = digest
        self._fingerprint: str | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _task_at(self, index: int) -> Task:
        """The task at an index in [0, len)."""

    @abstractmethod
    def index_of(self, task_id: str) -> int:
        """Position of a task.

        Raises:
            UnknownTaskError: the id is in no place of this set.
        """

    @abstractmethod
    def _definition(self) -> Any:
        """JSON value that tells this set from every other one."""

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
        """The task with this id.

        Raises:
            UnknownTaskError: there is none; the message shows what ids look like.
        """
        return self._task_at(self.index_of(task_id))

    def draw(self, np_random: np.random.Generator) -> Task:
        """A task drawn uniformly with one call ``np_random.integers(len(self))``."""
        return self._task_at(int(np_random.integers(len(self))))

    def digest(self, index: int) -> str:
        """Key of the content of the task at ``index``: equal for tasks that no two splits may both have."""
        task = self[index]
        return self._digest(task) if self._digest else _sha256(canonical_json(dict(task.content)))

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the ordered task definitions; two numbers with equal fingerprints are on the same tasks.

        Of a generated set it covers the parameters of the generator, the length and the first 256 tasks.
        """
        if self._fingerprint is None:
            self._fingerprint = _sha256(canonical_json(self._definition()))
        return self._fingerprint

    def _unknown(self, task_id: object, hint: str) -> UnknownTaskError:
        return UnknownTaskError(
            f"Unknown task {task_id!r}: the ids of this {self.split!r} split run from {self[0].id!r} to {self[-1].id!r}"
            f" ({len(self):,} tasks).{hint}"
        )


class ListTaskSet(TaskSet):
    """Tasks that are all at hand.

    Raises:
        SpearError: no task at all, an id twice, or tasks of several splits.
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
        """Position of a task; raises ``UnknownTaskError``."""
        try:
            return self._index[task_id]
        except (KeyError, TypeError):
            hint = suggest_name(str(task_id), self._index) if len(self) <= 10_000 else ""
            raise self._unknown(task_id, hint) from None

    def _definition(self) -> Any:
        return [task.definition() for task in self._tasks]


class NumberedTaskSet(TaskSet):
    """Tasks that are made when they are asked for, and whose ids follow from their places.

    Args:
        name, split: the ids are ``<name>/<split>/<place, zero-padded to digits>``.
        length: number of tasks.
        digits: least width of the number in the id.
        cache_size: how many tasks are kept at hand, the ones used longest ago dropped first.
        digest: as in :class:`TaskSet`.

    Raises:
        SpearError: a length or a cache below 1.
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
        # Threads share a set: a cache of our own is one whose order two of them change at once.
        return lru_cache(maxsize=self._cache_size)(self._make_task)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_recall"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._recall = self._make_cache()

    @abstractmethod
    def _make_task(self, index: int) -> Task:
        """The task at an index in [0, len), the same at every call; its id is :meth:`id_of` the index."""

    def __len__(self) -> int:
        return self._length

    def id_of(self, index: int) -> str:
        """Id of the task at ``index``, without making the task."""
        return f"{self.name}/{self.split}/{index:0{self._digits}d}"

    def _task_at(self, index: int) -> Task:
        return self._recall(index)

    def index_of(self, task_id: str) -> int:
        """Position of a task; raises ``UnknownTaskError``."""
        number = task_id.rpartition("/")[2] if isinstance(task_id, str) else ""
        # isascii: isdigit alone lets digits of other scripts pass.
        if number.isascii() and number.isdigit() and len(number) <= max(self._digits, len(str(self._length))):
            index = int(number)
            if index < self._length and self.id_of(index) == task_id:
                return index
        raise self._unknown(task_id, "")


class GeneratedTaskSet(NumberedTaskSet):
    """Tasks of a generator: task ``i`` is ``make(i)``, always the same for the same ``i`` and parameters.

    Args:
        name, split, length, digits, cache_size, digest: as in :class:`NumberedTaskSet`.
        make: gives task ``i``; must depend on ``i`` and ``parameters`` alone.
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
            raise SpearError(f"make({index}) gave a task {task.id!r} where {self.id_of(index)!r} was due.")
        return task

    def _definition(self) -> Any:
        sample = [self._task_at(i).definition() for i in range(min(self._length, FINGERPRINT_SAMPLE))]
        return {
            "name": self.name,
            "split": self.split,
            "length": self._length,
            "parameters": self.parameters,
            "first": sample,
        }


def check_disjoint(*sets: TaskSet, sample: int = DISJOINT_SAMPLE) -> int:
    """Prove that no two of the sets share a task by content; returns how many tasks were compared.

    Args:
        sets: at least two task sets, such as the splits of an environment.
        sample: how many tasks of a set that is not ``bounded`` are looked at, from its beginning.

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
    """``split`` itself if it is one of ``splits``.

    Raises:
        SpearError: it is not; the message lists them.
    """
    if split not in splits:
        valid = ", ".join(repr(name) for name in splits)
        raise SpearError(f"split={split!r} is not valid: choose one of {valid}.{suggest_name(str(split), splits)}")
    return split
