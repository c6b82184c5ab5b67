"""Episodes over a sandbox service, the real one over real sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spear_sandbox.protocol import Limits
from tests.sandbox.service import RunningService, run_local
from tests.spear_envs.code.conftest import call, make, make_asking


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package, reason="needs the extra 'sandbox'")
    with run_local(Limits(), max_running=4) as running:
        yield running


def test_code_is_run_over_there(tmp_path: Path, service: RunningService) -> None:
    env = make_asking(tmp_path, sandbox=service.url, feedback="helpful")
    assert env.step(call("print(6 * 7)"))[0] == "42"
    observation, *_, info = env.step(call("print('before')\n1 / 0"))
    assert 'File "/tmp/main.py", line 2' in observation and observation.startswith("before\n")
    assert (info["return_code"], info["tool_calls"], info["fault"]) == (1, 2, None)


def test_a_run_without_end_is_told_from_a_fault(tmp_path: Path, service: RunningService) -> None:
    env = make_asking(tmp_path, sandbox=service.url, time_limit=1, feedback="helpful")
    observation, *_, info = env.step(call("print(1, flush=True)\nwhile True: pass"))
    assert observation == "1\nTime limit of 1 s exceeded." and info["fault"] is None


def test_the_expert_wins(service: RunningService) -> None:
    env = make(split="test", sandbox=service.url)
    for task in env.tasks[:5]:
        env.reset(options={"task": task.id})
        while not env.done:
            *_, info = env.step(env.parser.respond(env.expert_plan()[0]))
        assert info["won"] and info["tool_calls"] == 1
