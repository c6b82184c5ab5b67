from __future__ import annotations

import pytest

from spear_envs.alfworld.task_types import SUBTASKS, TaskType, find_task_type, name_subtask
from spear_envs.core.errors import SpearError


def test_names() -> None:
    assert SUBTASKS == ("pick", "look", "clean", "heat", "cool", "pick2")
    for kind in TaskType:
        assert find_task_type(kind.value) is find_task_type(kind.subtask) is kind
        assert name_subtask(kind.value) == kind.subtask
    assert name_subtask("pick_and_place_with_movable_recep") == "pick_and_place_with_movable_recep"


def test_unknown_names() -> None:
    with pytest.raises(SpearError, match=r"task_type=.pick3. is not valid: choose one of .*Did you mean .pick"):
        find_task_type("pick3")
