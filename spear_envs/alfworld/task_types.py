"""The six task types and their names."""

from __future__ import annotations

from enum import Enum

from spear_envs.core.errors import SpearError, suggest_name


class TaskType(str, Enum):
    """A kind of task; the values are ALFRED's names."""

    PICK = "pick_and_place_simple"
    """Put an object of one kind into a receptacle of another."""
    LOOK = "look_at_obj_in_light"
    """Hold an object at a lamp that is switched on."""
    CLEAN = "pick_clean_then_place_in_recep"
    """A clean object in a receptacle."""
    HEAT = "pick_heat_then_place_in_recep"
    """A hot object in a receptacle."""
    COOL = "pick_cool_then_place_in_recep"
    """A cool object in a receptacle."""
    PICK2 = "pick_two_obj_and_place"
    """Two objects of one kind in the same receptacle."""

    @property
    def subtask(self) -> str:
        """The short name in reports, such as ``pick2``."""
        return self.name.lower()


SUBTASKS: tuple[str, ...] = tuple(kind.subtask for kind in TaskType)
"""``pick look clean heat cool pick2``, in the order of the paper's table."""


def find_task_type(name: str) -> TaskType:
    """Find a task type by ALFRED's name or the short one.

    Raises:
        SpearError: the name is unknown; the message lists all.
    """
    for kind in TaskType:
        if name in (kind.value, kind.subtask):
            return kind
    names = [kind.value for kind in TaskType]
    raise SpearError(
        f"task_type={name!r} is not valid: choose one of {', '.join(map(repr, names))}, or one of the short names"
        f" {', '.join(SUBTASKS)}.{suggest_name(str(name), [*names, *SUBTASKS])}"
    )


def name_subtask(task_type: str) -> str:
    """Short name of ALFRED's ``task_type``; an unknown type keeps its own name."""
    try:
        return TaskType(task_type).subtask
    except ValueError:
        return task_type
