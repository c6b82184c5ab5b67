from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spear_envs.core import ActionResult, SpearError, TagParser
from spear_envs.core.vector import SpearVectorEnv
from spear_envs.core.vector.worker import ProcessGroup
from tests.spear_envs.corridor import CorridorEnv

LEFT = TagParser().respond("left")
ROOT = Path(__file__).resolve().parents[4]


class UnpicklableError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


class FailingEnv(CorridorEnv):
    """An environment with bugs."""

    def _act(self, action: str) -> ActionResult:
        if action == "right":
            raise ZeroDivisionError("a bug")
        raise UnpicklableError("a bug of its own", "kind")


def refuse_to_make() -> Any:
    raise SpearError("No door today: come back tomorrow.")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_dead(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def get_pids(vector: SpearVectorEnv) -> list[int]:
    return [group.pid for group in vector._groups if isinstance(group, ProcessGroup) and group.pid]


def test_a_killed_worker_is_named_and_none_is_left_over() -> None:
    vector = SpearVectorEnv(CorridorEnv, 5, workers=2)
    vector.reset(seed=0)
    pids = get_pids(vector)
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(SpearError, match=r"environments 3, 4 died \(exit code -9\)"):
        vector.step([LEFT] * 5)
    assert vector.closed and wait_until_dead(pids)
    with pytest.raises(SpearError, match="closed"):
        vector.step([LEFT] * 5)


def test_closing_ends_the_workers() -> None:
    vector = SpearVectorEnv(CorridorEnv, 2, workers=2)
    pids = get_pids(vector)
    vector.close()
    vector.close()
    assert wait_until_dead(pids)


def test_errors_of_an_environment_cross_the_pipe() -> None:
    vector = SpearVectorEnv(FailingEnv, 2, workers=2)
    vector.reset(seed=0)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        vector.step([TagParser().respond("right")] * 2)
    with pytest.raises(SpearError, match="UnpicklableError: a bug of its own"):
        vector.step([LEFT] * 2)
    _, infos = vector.reset(seed=0)  # no answer was left in a pipe
    assert list(infos["turn"]) == [0, 0]
    vector.close()


def test_an_environment_that_cannot_be_made_is_one_clear_error() -> None:
    for workers in (0, 1):
        with pytest.raises(SpearError, match="come back tomorrow"):
            SpearVectorEnv(refuse_to_make, 2, workers=workers)


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from spear_envs.core.vector import SpearVectorEnv\n"
        "from tests.spear_envs.corridor import CorridorEnv\n"
        "if __name__ == '__main__':\n"
        "    vector = SpearVectorEnv(CorridorEnv, 2, workers=2)\n"
        "    print(*[group.pid for group in vector._groups], flush=True)\n"
        "    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
        parent.kill()
    assert wait_until_dead(pids)
