"""``spear gateway`` as a process of its own, and ``spear eval --agent``."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("fastapi", reason="needs the extra 'gateway'")
pytest.importorskip("httpx", reason="needs the extra 'api'")

import httpx

from spear_agents.cli import evaluate
from spear_agents.records import EPISODES, read_last
from spear_agents.trajectory import StopReason
from tests.agents.chat_server import Script, complete, say
from tests.commands import run_command


def test_a_program_of_another_process_plays(tmp_path: Path) -> None:
    arguments = ["spear/Sokoban-v1", "--engine", "expert", "--env", "modality=text", "--tasks", "2"]
    with run_command("gateway", *arguments, "--out", str(tmp_path), "--concurrency", "2") as running:
        url, process = running.url, running.process
        assert running.line.startswith("ready: spear/Sokoban-v1, 2 episodes at a time, at http://127.0.0.1:")
        with httpx.Client(verify=False, timeout=20) as client:
            opened = [client.post(f"{url}/episodes", json={"seed": 7}).json()]
            again = {"task": opened[0]["task"], "seed": 7}
            assert client.post(f"{url}/episodes", json=again).status_code == 409
            opened.append(client.post(f"{url}/episodes", json={}).json())
            assert client.post(f"{url}/episodes", json={}).status_code == 429
            assert client.post(f"{url}/episodes", json={"task": 3}).status_code == 400
            first = opened[0]
            key = {"Authorization": f"Bearer {first['api_key']}"}
            messages = [{"role": "user", "content": first["prompt"]}]
            done = False
            while not done:
                body = {"model": first["model"], "messages": messages}
                reply = client.post(f"{first['base_url']}/chat/completions", json=body, headers=key).json()
                text = reply["choices"][0]["message"]["content"]
                step = client.post(f"{url}/episodes/{first['id']}/step", json={"response": text}, headers=key).json()
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": step["observation"]}]
                done = step["done"]
            assert client.delete(f"{url}/episodes/{first['id']}").status_code == 401
            ended = client.delete(f"{url}/episodes/{first['id']}", headers=key).json()
            assert ended["won"] and ended["stop"] == "won" and ended["calls"] == len(messages) // 2
            assert client.delete(f"{url}/episodes/{first['id']}", headers=key).status_code == 410
            assert client.post(f"{url}/episodes", json={}).status_code == 200, "a place is free again"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    played = read_last(tmp_path / EPISODES)
    assert {one.stop for one in played} == {StopReason.WON, StopReason.QUIT}
    assert len({one.task_id for one in played}) == 2


def test_an_evaluation_by_a_program(script: Script, tmp_path: Path) -> None:
    program = tmp_path / "walker.py"
    program.write_text("async def play(task):\n    await task.call('act', {'action': 'up'})\n")
    model = ["spear/Sokoban-v1", "--engine", "openai", "--base-url", script.url, "--model", "m", "--tasks", "3"]
    played = ["--agent", f"{program}:play", "--env", "response_format=plain", "--env", "modality=text"]
    result = CliRunner().invoke(evaluate, [*model, *played, "--out", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 0, result.output
    episodes = read_last(tmp_path / "run" / EPISODES)
    assert [(one.stop, one.fault, one.turns) for one in episodes] == [(StopReason.QUIT, None, ())] * 3

    result = CliRunner().invoke(evaluate, [*model, "--agent", f"{program}:absent"])
    assert result.exit_code != 0 and "no function 'absent'" in str(result.exception)
    result = CliRunner().invoke(evaluate, ["spear/Sokoban-v1", "--engine", "expert", "--agent", f"{program}:play"])
    assert result.exit_code != 0 and "an agent asks a model in its own way" in str(result.exception)


def test_sixty_that_begin_at_once_get_different_episodes(tmp_path: Path) -> None:
    arguments = ["spear/Sokoban-v1", "--engine", "expert", "--env", "modality=text", "--tasks", "64"]

    async def begin(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(verify=False, timeout=60) as client:
            return await asyncio.gather(*(client.post(f"{url}/episodes", json={}) for _ in range(60)))

    with run_command("gateway", *arguments, "--out", str(tmp_path), "--concurrency", "20") as running:
        answers = asyncio.run(begin(running.url))
        opened = [answer.json() for answer in answers if answer.status_code == 200]
        assert len(opened) == 20 and len({one["task"] for one in opened}) == 20
        assert {answer.status_code for answer in answers} == {200, 429}


def test_a_call_under_way_is_not_idle_and_our_clock_is_no_failure(script: Script, tmp_path: Path) -> None:
    def answer_late(handler: Any) -> None:
        time.sleep(3)
        say(complete())(handler)

    script.answers[:] = [answer_late]
    arguments = ["spear/Sokoban-v1", "--engine", "openai", "--base-url", script.url, "--model", "m", "--tasks", "2"]
    options = ["--env", "modality=text", "--out", str(tmp_path), "--idle", "1"]
    with run_command("gateway", *arguments, *options) as running, httpx.Client(verify=False, timeout=20) as client:
        opened = client.post(f"{running.url}/episodes", json={}).json()
        key = {"Authorization": f"Bearer {opened['api_key']}"}
        body = {"model": opened["model"], "messages": [{"role": "user", "content": "x"}]}
        assert client.post(f"{opened['base_url']}/chat/completions", json=body, headers=key).status_code == 200
        end = time.monotonic() + 10
        while client.get(f"{running.url}/episodes/{opened['id']}", headers=key).status_code == 200:
            assert time.monotonic() < end
            time.sleep(2.5)
    (played,) = read_last(tmp_path / EPISODES)
    assert played.stop is StopReason.FAULT and played.fault == "agent_timeout"
