"""A small environment for tests of the agents: walk along a corridor to its end."""

from collections.abc import Sequence
from typing import Any, ClassVar

from spear_envs.core.env import ActionResult, SpearEnv
from spear_envs.core.errors import EnvFault
from spear_envs.core.prompts import CompactTemplate
from spear_envs.core.tasks import ListTaskSet, Task


class CorridorEnv(SpearEnv[str]):
    """Cells 0 to length; `go` and `back` walk, `fail` ends without success, `break` is a fault, `bug` a defect."""

    templates: ClassVar[dict[str, Any]] = {"compact": CompactTemplate()}

    def __init__(self, lengths: Sequence[int] = (2, 3, 4), max_turns: int = 6, **keywords: Any) -> None:
        tasks = [
            Task(f"corridor/test/{i:03d}", "test", f"len{n}", "walk to the end", {"length": n})
            for i, n in enumerate(lengths)
        ]
        super().__init__(ListTaskSet(tasks, name="corridor"), max_turns=max_turns, **keywords)
        self.resets = 0

    def _start(self, task: Task) -> None:
        self.resets += 1
        self.place, self.length = 0, task.content["length"]
        if self.length == 0:
            raise EnvFault("no_corridor", "it was closed")

    def _act(self, action: str) -> ActionResult:
        if action == "break":
            raise EnvFault("collapse", "the roof came down")
        if action == "bug":
            raise ZeroDivisionError("a defect")
        if action == "fail":
            return ActionResult(True, done=True)
        step = {"go": 1, "back": -1}.get(action, 0)
        moved = bool(step) and self.place + step >= 0
        self.place += step if moved else 0
        won = self.place == self.length
        return ActionResult(moved, native_reward=1.0 if won else -0.1, won=won, tool_calls=int(moved))

    def _observe(self, message: str) -> str:
        return "_" * self.place + "P" + "_" * (self.length - self.place) + (f"\n{message}" if message else "")

    def _world(self) -> Any:
        return self.place

    def _restore_world(self, state: Any) -> None:
        self.place = state

    def _admissible(self) -> list[str] | None:
        return ["go", "back"]

    def expert_plan(self) -> list[str]:
        return ["go"] * (self.length - self.place)
