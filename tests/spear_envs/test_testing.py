import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv

from spear_envs import SpearError, register_env
from spear_envs.core import ActionResult, CompactTemplate, ListTaskSet, PermissiveText, Task
from spear_envs.testing import ContractError, check_spear_env, checks
from spear_envs.testing.checks import CHECKS, Subject
from spear_envs.testing.trace import find_difference
from tests.spear_envs.corridor import CorridorEnv, load_tasks


def test_a_sound_environment_passes() -> None:
    asked: list[str] = []
    report = check_spear_env("tests/Corridor-v0", on_check=asked.append)
    assert report.passed and report.failed_names == []
    assert asked == [result.name for result in report.results] == list(CHECKS)
    assert all(result.seconds >= 0 and result.detail for result in report.results)


def test_it_passes_with_other_keywords_and_behind_a_module() -> None:
    keywords: dict[str, Any] = {"response_format": "plain", "reward": "native", "split": "test"}
    report = check_spear_env("tests.spear_envs.corridor:tests/Corridor-v0", resets=50, **keywords)
    assert report.passed and report.kwargs == keywords


# Corridors that are wrong in one way each, and the check that must find it.


class Silent(CorridorEnv):
    def _malformed(self, problem: str) -> ActionResult:
        return ActionResult(False, message="No.")


class Stumbling(CorridorEnv):
    def _malformed(self, problem: str) -> ActionResult:
        return self._act("right" if self._place < self._door else "left")._replace(message=problem)


class Raising(CorridorEnv):
    def _malformed(self, problem: str) -> ActionResult:
        raise ValueError(problem)


class Forgetful(CorridorEnv):
    def _restore_world(self, state: int) -> None:
        pass


class Aliased(CorridorEnv):
    steps: list[int]

    def _start(self, task: Task) -> None:
        super()._start(task)
        self.steps = []

    def _act(self, action: str) -> ActionResult:
        self.steps.append(1)
        return super()._act(action)

    def _details(self) -> Mapping[str, Any]:
        return {}

    def _score(self) -> float:
        return 1.0 if self.episode.won else len(self.steps) / 100  # steps is not a part of _world()


class Lost(CorridorEnv):
    def expert_plan(self) -> list[str]:
        return [] if self._door == 3 else super().expert_plan()


class Clumsy(CorridorEnv):
    def expert_plan(self) -> list[str]:
        return ["right"]


class HalfHearted(CorridorEnv):
    def _score(self) -> float:
        return 0.5


class Overdone(CorridorEnv):
    def _score(self) -> float:
        return 2.0 if self.turn == 1 else float(self.episode.won)


class Moody(CorridorEnv):
    def _observe(self, message: str) -> str:
        return super()._observe(message) + " " * random.randrange(3)


class Global(CorridorEnv):
    def _start(self, task: Task) -> None:
        super()._start(task)
        random.random()


class Hashed(CorridorEnv):
    def _admissible(self) -> list[str]:
        return list({"left", "right", "up", "down", "still", "wait"})


class Unequal(CorridorEnv):
    def _observe(self, message: str) -> str:
        mood = "!" * (self.np_random.bit_generator.state["state"]["state"] % 7)  # type: ignore[call-overload,operator]
        return super()._observe(message) + mood


class Changing(CorridorEnv):
    def _act(self, action: str) -> ActionResult:
        return super()._act(action)._replace(details={"extra": 1})


class Leaky(CorridorEnv):
    hoard: list[bytearray] = []  # noqa: RUF012

    def _start(self, task: Task) -> None:
        super()._start(task)
        self.hoard.append(bytearray(1000))


class Overlapping(CorridorEnv):
    def __init__(self, *, split: str = "train", **more: Any) -> None:
        super().__init__(split=split, **more)
        leak = load_tasks(8, "train")[0]
        if split == "test":
            self.tasks = ListTaskSet([*self.tasks, Task("corridor/test/99999", "test", "x", "", leak.content)])


class Endless(CorridorEnv):
    def step(self, action: str) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        self.episode.done = terminated
        return observation, reward, terminated, False, info


class Unseen(CorridorEnv):
    def _observe(self, message: str) -> Any:
        return super()._observe(message).encode()


class Secretive(CorridorEnv):
    def _info(self) -> dict[str, Any]:
        info = super()._info()
        del info["anchor"]
        return info


class Blurred(CorridorEnv):
    def render(self) -> Any:
        return None


class Shifty(CorridorEnv):
    def _info(self) -> dict[str, Any]:
        return {**super()._info(), "prize": {"gold": 1.0} if self.episode.won else None}


class Painted(CorridorEnv):
    """Observations with a picture, for which the stock template has a place."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.observation_space = spaces.Dict(text=PermissiveText(), image=spaces.Box(0, 255, (2, 3, 3), np.uint8))

    def _observe(self, message: str) -> Any:
        return {"text": super()._observe(message), "image": np.zeros((2, 3, 3), np.uint8)}


class Unpainted(Painted):
    templates: ClassVar = {"default": CompactTemplate()}


class Narrow(Painted):
    def _observe(self, message: str) -> Any:
        return {"text": super()._observe(message)["text"], "image": np.zeros((2, 3), np.uint8)}


class Lucky(CorridorEnv):
    def _start(self, task: Task) -> None:
        super()._start(task)
        self._place = (self._door + 1 + int(self.np_random.integers(self._length - 1))) % self._length


FAULTS = {
    Unpainted: "info",
    Narrow: "info",
    Lucky: "group",
    Silent: "malformed",
    Stumbling: "malformed",
    Raising: "malformed",
    Forgetful: "state",
    Aliased: "state",
    Lost: "oracle",
    Clumsy: "oracle",
    HalfHearted: "oracle",
    Overdone: "info",
    Moody: "determinism",
    Global: "determinism",
    Hashed: "determinism",
    Unequal: "group",
    Changing: "info",
    Leaky: "memory",
    Overlapping: "splits",
    Endless: "end",
    Unseen: "gymnasium",
    Secretive: "info",
    Blurred: "gymnasium",
    Shifty: "vector",
}


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_each_fault_is_found_by_its_check(kind: type[CorridorEnv]) -> None:
    register_env("tests/Faulty-v0", kind)
    with pytest.raises((SpearError, ValueError, AssertionError)):
        CHECKS[FAULTS[kind]](Subject("tests/Faulty-v0"))


def test_a_picture_with_a_place_and_luck_in_the_world_pass() -> None:
    register_env("tests/Painted-v0", Painted)
    register_env("tests/Lucky-v0", Lucky)
    assert "keys" in CHECKS["info"](Subject("tests/Painted-v0"))
    with pytest.raises(SpearError, match="derive what _start draws from the task"):
        CHECKS["group"](Subject("tests/Lucky-v0"))


def test_traces_differ_where_one_has_more() -> None:
    assert find_difference({"a": [1, 2]}, {"a": [1, 2]}) == ""
    assert find_difference({"a": [1]}, {"a": [1, 2]}) == "/a: [1] and [1, 2]"


class Rooted(CorridorEnv):
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def test_what_cannot_be_carried_elsewhere_is_found() -> None:
    register_env("tests/Faulty-v0", "tests.spear_envs.test_testing:Rooted")
    with pytest.raises(ContractError, match=r"pickle does not copy it.*stays here"):
        CHECKS["portable"](Subject("tests/Faulty-v0"))
    register_env("tests/Faulty-v0", CorridorEnv)
    with pytest.raises(ContractError, match=r"JSON.*register names"):
        CHECKS["portable"](Subject("tests/Faulty-v0"))


def test_a_faulty_environment_is_reported_or_raised() -> None:
    register_env("tests/Faulty-v0", Raising)
    report = check_spear_env("tests/Faulty-v0", resets=50, raise_on_failure=False)
    assert not report.passed and "malformed" in report.failed_names
    with pytest.raises(ContractError, match="malformed: the response '' raises ValueError: it is empty"):
        report.raise_on_failure()
    with pytest.raises(ContractError):
        check_spear_env("tests/Faulty-v0", resets=50)


def test_what_is_no_spear_environment_is_told_so() -> None:
    with pytest.raises(SpearError, match="which is not a SpearEnv: derive it"):
        check_spear_env("CartPole-v1")


def test_what_cannot_be_made_is_one_error() -> None:
    with pytest.raises(SpearError, match="'train', 'valid', 'test'"):
        check_spear_env("tests/Corridor-v0", split="dev")
    with pytest.raises(SpearError, match="no_such_keyword"):
        check_spear_env("tests/Corridor-v0", no_such_keyword=1)
    for id in ("tests/NoSuch-v0", "nowhere/X-v0", "not an id"):
        with pytest.raises(SpearError, match="name yours with its module"):
            check_spear_env(id)


def test_an_interrupt_ends_a_vector_environment_whose_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[AsyncVectorEnv] = []

    class Interrupted(AsyncVectorEnv):
        def step_wait(self, timeout: float | None = None) -> Any:
            if timeout is None:  # Ctrl-C between the answers of two processes
                began.append(self)
                self.parent_pipes[0].recv()
                raise KeyboardInterrupt
            return super().step_wait(timeout)

    monkeypatch.setattr(checks, "AsyncVectorEnv", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        CHECKS["vector"](Subject("tests/Corridor-v0"))
    assert began and not any(process.is_alive() for process in began[0].processes)
