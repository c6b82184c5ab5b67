"""A whole environment on one page: walk along a corridor to the door. Tests use it, and it shows how one is written."""

import hashlib
from functools import lru_cache
from typing import Any, ClassVar

from spear_envs.core import (
    ActionResult,
    CompactTemplate,
    DefaultTemplate,
    ListTaskSet,
    SpearEnv,
    Task,
    check_split,
    register_env,
)

CORRIDOR = "tests.spear_envs.corridor:tests/Corridor-v0"
STEPS = {"left": -1, "right": 1}


@lru_cache(maxsize=8)
def load_tasks(length: int, split: str) -> ListTaskSet:
    """All corridors of one split: a hash of the content says which split a corridor belongs to."""
    tasks: list[Task] = []
    for start in range(length):
        for door in range(length):
            byte = hashlib.sha256(f"{length} {start} {door}".encode()).digest()[0]
            if start != door and split == ("test" if byte < 50 else "valid" if byte < 100 else "train"):
                tasks.append(
                    Task(
                        id=f"corridor/{split}/{len(tasks):05d}",
                        split=split,
                        subtask="near" if abs(start - door) < 3 else "far",
                        instruction="Walk to the door.",
                        content={"length": length, "start": start, "door": door},
                    )
                )
    return ListTaskSet(tasks)


class CorridorEnv(SpearEnv[str]):
    """Cells in a row, one player ``P``, one door ``D``; the actions are ``left`` and ``right``."""

    templates: ClassVar = {
        "default": DefaultTemplate("You stand at P in a corridor. Walk left or right until you are at the door D."),
        "compact": CompactTemplate(),
    }

    def __init__(self, *, split: str = "train", length: int = 8, max_turns: int = 12, **common: Any) -> None:
        super().__init__(load_tasks(length, check_split(split, self.splits)), max_turns=max_turns, **common)

    def _start(self, task: Task) -> None:
        self._place: int = task.content["start"]
        self._door: int = task.content["door"]
        self._length: int = task.content["length"]

    def _act(self, action: str) -> ActionResult:
        if action not in STEPS:
            return ActionResult(False, -0.1, message=f"There is no action {action!r}; use left or right.")
        place = self._place + STEPS[action]
        if not 0 <= place < self._length:
            return ActionResult(False, -0.1, message="You bump into the wall.")
        self._place = place
        won = place == self._door
        return ActionResult(True, 0.9 if won else -0.1, won=won, tool_calls=1)

    def _observe(self, message: str) -> str:
        cells = ["_"] * self._length
        cells[self._door] = "D"
        cells[self._place] = "P"
        return "".join(cells) + (f"\n\n{message}" if message else "")

    def _world(self) -> int:
        return self._place

    def _restore_world(self, state: int) -> None:
        self._place = state

    def _anchor(self) -> str:
        return f"{self._length}/{self._place}/{self._door}"

    def _admissible(self) -> list[str]:
        return [word for word, step in STEPS.items() if 0 <= self._place + step < self._length]

    def expert_plan(self) -> list[str]:
        way = self._door - self._place
        return ["right" if way > 0 else "left"] * abs(way)


register_env("tests/Corridor-v0", "tests.spear_envs.corridor:CorridorEnv")
