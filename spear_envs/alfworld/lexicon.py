"""Names of things in embedded games, for the tokenizers of tiny models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from spear_envs.alfworld.synthesis.placing import COPIES
from spear_envs.alfworld.synthesis.rooms import RoomSize, rooms_of
from spear_envs.alfworld.task_types import TaskType


def list_names(size: RoomSize) -> Iterator[str]:
    """Yield all names of receptacles and objects of embedded rooms, alone (as in tasks) and numbered."""
    most: defaultdict[str, int] = defaultdict(int)
    for room in {room.name: room for task_type in TaskType for room in rooms_of(task_type)}.values():
        for kind, (_, number) in room.counts(size).items():
            most[kind] = max(most[kind], number)
        for kind in (*room.objects, *filter(None, (room.lamp,))):
            most[kind] = max(most[kind], *COPIES[size])
    for kind, number in sorted(most.items()):
        yield kind.lower()
        yield from (f"{kind.lower()} {i}" for i in range(1, number + 1))
