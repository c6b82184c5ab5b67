"""Clients that were written for SandboxFusion, unchanged, against our service."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'sandbox'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'sandbox'")

from spear_sandbox.protocol import Limits
from tests.commands import wait_until
from tests.sandbox.service import RunningService, run_local, run_scripted


@pytest.fixture(scope="module")
def running() -> Iterator[RunningService]:
    with run_local(limits=Limits(wall_s=30.0, memory_mb=256), max_running=4) as running:
        yield running


@pytest.fixture
def fusion() -> Any:
    """verl's client, of the version that the project pins."""
    pytest.importorskip("verl", reason="verl comes with the extra 'train'")
    from verl.utils.reward_score.sandbox_fusion import utils

    return utils


class TestClientOfVerl:
    """``verl.utils.reward_score.sandbox_fusion``, with which verl grades programs."""

    @pytest.mark.parametrize(
        ("code", "expected", "result", "status"),
        [
            ("print(sum(map(int, input().split())))", "7", True, "success"),
            ("print(8)", "7", False, "wrong_answer"),
            ("1 / 0", "7", -2, "runtime_error"),
            ("while True: pass", "7", -3, "timeout"),
            ("def f(:", "7", -2, "runtime_error"),
            ("import os; os.kill(os.getpid(), 9)", "7", -2, "runtime_error"),
        ],
    )
    def test_how_it_reads_each_ending(
        self, fusion: Any, running: RunningService, code: str, expected: str, result: Any, status: str
    ) -> None:
        cases = {"inputs": ["3 4"], "outputs": [expected]}
        results, metadata = fusion.check_correctness(f"{running.url}/run_code", cases, code, timeout=2)
        assert results == [result] and metadata[0]["status"] == status
        assert metadata[0]["api_request_error"] is None

    @pytest.mark.parametrize("status", [503, 504])
    def test_a_run_that_is_turned_away_is_tried_again_after_504_alone(
        self, fusion: Any, monkeypatch: pytest.MonkeyPatch, status: int
    ) -> None:
        monkeypatch.setattr(fusion, "INITIAL_RETRY_DELAY", 0.01)
        with run_scripted(max_running=1, queue_length=0, busy_status=status) as (service, executor):
            executor.open = False
            first = threading.Thread(
                target=fusion.call_sandbox_api, args=(f"{service.url}/run_code", "a", None, 9, 9, 9)
            )
            first.start()
            wait_until(lambda: bool(executor.started))
            reply, error = fusion.call_sandbox_api(f"{service.url}/run_code", "b", None, 9, 9, 9)
            executor.open = True
            first.join()
            assert reply is None and str(status) in error
            assert service.service.counts.answers[status] == (3 if status == 504 else 1)


TOOL = """
import asyncio, json, sys
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
parameters = {"type": "object", "properties": {"code": {"type": "string", "description": "d"}}, "required": ["code"]}
schema = {"type": "function", "function": {"name": "code_interpreter", "description": "d", "parameters": parameters}}
config = {"sandbox_fusion_url": sys.argv[1], "num_workers": 4, "rate_limit": 4, "default_timeout": 10}
tool = SandboxFusionTool(config, OpenAIFunctionToolSchema.model_validate(schema))

async def play():
    name, _ = await tool.create()
    codes = json.loads(sys.argv[2])
    replies = await asyncio.gather(*(tool.execute(name, {"code": code}) for code in codes))
    await tool.release(name)
    return [reply[0].text for reply in replies]

print(json.dumps(asyncio.run(play())))
"""


@pytest.mark.slow
def test_tool_of_verl(running: RunningService, old_verl: Path) -> None:
    """verl's ``SandboxFusionTool``, which policies call; in a process of its own, with Ray as it wants it."""
    pytest.importorskip("ray", reason="Ray comes with the extra 'train'")
    codes = ["print(6 * 7)", "import numpy; print(numpy.arange(3))", "1 / 0"]
    done = subprocess.run(
        [sys.executable, "-c", TOOL, f"{running.url}/run_code", json.dumps(codes)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(old_verl)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    texts = json.loads(done.stdout.splitlines()[-1])
    assert texts[:2] == ["42\n", "[0 1 2]\n"] and texts[2].endswith("ZeroDivisionError: division by zero\n")
