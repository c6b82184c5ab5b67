"""The backend that is TextWorld itself."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from spear_envs.alfworld import textworld
from spear_envs.alfworld.env import ALFWorldEnv
from spear_envs.core.errors import SpearError
from tests.spear_envs.alfworld.peer import MEND, has_textworld

needs_textworld = pytest.mark.skipif(not has_textworld(), reason=MEND)
TASK = "alfworld/embedded-small/train/00003"


def make(backend: str, **kwargs: Any) -> ALFWorldEnv:
    return ALFWorldEnv(**{"response_format": "plain", "backend": backend, **kwargs})


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    textworld._import_textworld.cache_clear()
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(SpearError, match=r"pip install 'spear-envs\[alfworld\]'"):
        make("textworld")


@needs_textworld
def test_both_backends_tell_the_same() -> None:
    envs = [make(backend, rooms="small") for backend in ("native", "textworld")]
    first = [env.reset(options={"task": TASK}) for env in envs]
    assert first[0] == first[1]
    plan = envs[1].expert_plan()
    for command in (*plan[:3], "nonsense", " look ", *plan[3:]):
        steps = [env.step(command) for env in envs]
        assert steps[0] == steps[1], command
    assert steps[1][2]
    assert envs[1].metadata["blocking"] is True
    assert "blocking" not in envs[0].metadata


SURROUNDINGS = """
import os, sys
from pathlib import Path
from spear_envs.alfworld.textworld import TextWorldPlay
before, arguments = dict(os.environ), list(sys.argv)
TextWorldPlay()
assert dict(os.environ) == before, set(os.environ) ^ set(before)
assert sys.argv == arguments
print(sorted(str(path) for path in Path.home().rglob("*")))
"""


@pytest.mark.slow
@needs_textworld
def test_importing_leaves_no_trace(tmp_path: Path, root: Path) -> None:
    """Fact A3: importing alfworld makes a folder and sets a variable."""
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("ALFWORLD_DATA", None)
    run = subprocess.run(
        [sys.executable, "-c", SURROUNDINGS], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


@needs_textworld
def test_a_state_of_textworld_is_played_again() -> None:
    env = make("textworld", rooms="small")
    env.reset(options={"task": TASK})
    plan = env.expert_plan()
    for command in plan[:2]:
        env.step(command)
    state = env.get_state()
    assert state["world"]["commands"] == plan[:2]
    after = [env.step(command) for command in plan[2:4]]
    env.set_state(state)  # back: from the start
    assert [env.step(command) for command in plan[2:4]] == after
    ahead = env.get_state()
    env.set_state(state)
    env.set_state(ahead)  # on: only what is missing
    assert env.expert_plan() == plan[4:]
    native = make("native", rooms="small")
    native.reset(options={"task": TASK})
    with pytest.raises(SpearError, match="backend='textworld'"):
        native.set_state(state)


@needs_textworld
def test_threads_take_turns() -> None:
    """Fact A5: TextWorld breaks when two threads load games at once."""
    errors: list[BaseException] = []
    lines: list[str] = []

    def play() -> None:
        try:
            env = make("textworld", rooms="small")
            lines.append(env.reset(options={"task": TASK})[0])
            lines.append(env.step("inventory")[0])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=play) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(lines) == 6 and len(set(lines)) == 2
