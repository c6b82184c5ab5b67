from __future__ import annotations

import itertools
from collections import Counter

import pytest

from spear_envs.alfworld.synthesis.rooms import LAYOUTS, ROOMS, RoomKind, RoomSize, list_layouts, rooms_of
from spear_envs.alfworld.synthesis.things import (
    ABILITIES,
    TREATMENTS,
)
from spear_envs.alfworld.task_types import TaskType

sized_rooms = pytest.mark.parametrize(
    ("room", "size"), list(itertools.product(ROOMS, RoomSize)), ids=lambda value: getattr(value, "name", value)
)


@sized_rooms
def test_layouts_keep_the_bounds(room: RoomKind, size: RoomSize) -> None:
    least, most = (9, 15) if size is RoomSize.SMALL else (16, 40)
    for layout in list_layouts(room, size):
        assert least <= len(layout.receptacles) <= most
        counts = Counter(one.kind for one in layout.receptacles)
        assert all(low <= counts[kind] <= high for kind, (low, high) in room.counts(size).items())
        assert len({one.identifier for one in layout.receptacles}) == len(layout.receptacles)


def test_layouts_of_unseen_splits_are_no_others() -> None:
    assert not set(LAYOUTS["valid_unseen"]) & set(LAYOUTS["train"])
    assert set(LAYOUTS["valid_seen"]) <= set(LAYOUTS["train"])
    assert len(LAYOUTS["train"]) * len(ROOMS) >= 60


def test_appliances_are_where_tasks_need_them() -> None:
    needed = {TaskType.CLEAN: "SinkBasin", TaskType.HEAT: "Microwave", TaskType.COOL: "Fridge"}
    for task_type, kind in needed.items():
        for room, size in itertools.product(rooms_of(task_type), RoomSize):
            assert room.counts(size)[kind][0] >= 1
            assert any(thing in ABILITIES[TREATMENTS[task_type][0]] for thing in room.objects)
    assert all(room.lamp for room in rooms_of(TaskType.LOOK))
