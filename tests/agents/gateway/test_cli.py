"""``spear gateway`` as a process of its own, and ``spear eval --agent``."""

import asyncio
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

pytest.importorskip("fastapi", reason="needs the extra 'gateway'")
pytest.importorskip("openai", reason="needs the extra 'api'")

import httpx

from spear_agents.cli import evaluate
from spear_agents.engines.base import ChatByteTokenizer, Sampling
from spear_agents.evaluation.records import EPISODES, read_last
from spear_agents.gateway.server import Gateway, Host
from spear_agents.gateway.session import Limits
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout, StopReason, Trajectory, read_trajectories
from spear_envs.core.prompts import CompactTemplate
from tests.agents.chat_server import Script, complete, say
from tests.agents.corridor import CorridorEnv
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
    assert {one.stop for one in played} == {StopReason.WON, StopReason.FAULT}
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


@pytest.mark.slow
def test_a_gateway_that_starts_again_goes_on_with_other_jobs(tmp_path: Path) -> None:
    """Those cut short by its end are faults, which are played again."""
    arguments = ["spear/Sokoban-v1", "--engine", "expert", "--env", "modality=text", "--tasks", "4"]
    jobs = []
    for _ in range(2):
        with run_command("gateway", *arguments, "--out", str(tmp_path)) as running:
            opened = [httpx.post(f"{running.url}/episodes", json={}).json() for _ in range(3)]
            key = {"Authorization": f"Bearer {opened[1]['api_key']}"}
            assert httpx.delete(f"{running.url}/episodes/{opened[1]['id']}", headers=key).status_code == 200
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(20) == 0
        jobs.append([one["task"] for one in opened])
    first, second = jobs
    assert second[:2] == [first[0], first[2]] and second[2] not in first
    assert [one.fault for one in read_trajectories(tmp_path / EPISODES)] == [None, *["gateway_stopped"] * 2] * 2


@pytest.mark.slow
def test_a_record_that_cannot_be_kept_ends_the_gateway(script: Script, tmp_path: Path) -> None:
    arguments = ["spear/Sokoban-v1", "--engine", "openai", "--base-url", script.url, "--model", "m"]
    options = ["--env", "modality=text", "--out", str(tmp_path)]
    script.answers[:] = [say(complete(model="a-model")), say(complete(model="b-model"))]
    with run_command("gateway", *arguments, *options) as running, httpx.Client(timeout=20) as client:
        for status in (200, 400):
            opened = client.post(f"{running.url}/episodes", json={}).json()
            key = {"Authorization": f"Bearer {opened['api_key']}"}
            body = {"model": opened["model"], "messages": [{"role": "user", "content": "x"}]}
            assert client.post(f"{opened['base_url']}/chat/completions", json=body, headers=key).status_code == 200
            ended = client.delete(f"{running.url}/episodes/{opened['id']}", headers=key)
            assert ended.status_code == status
        assert running.process.wait(20) == 1 and "--mixed-models" in ended.text


def make_slow_corridor(method: str) -> Any:
    """A corridor whose ``method`` waits for ``go_on``."""

    class SlowCorridor(CorridorEnv):
        metadata: ClassVar[dict[str, Any]] = {**CorridorEnv.metadata, "blocking": True}
        closed: ClassVar[list[int]] = []
        begun: ClassVar[threading.Event] = threading.Event()
        go_on: ClassVar[threading.Event] = threading.Event()

        def close(self) -> None:
            self.closed.append(id(self))

    def wait(self: CorridorEnv, value: Any) -> Any:
        SlowCorridor.begun.set()
        assert SlowCorridor.go_on.wait(20)
        return getattr(CorridorEnv, method)(self, value)

    setattr(SlowCorridor, method, wait)
    return SlowCorridor


def make_host(env: type[CorridorEnv], records: list[Trajectory]) -> tuple[Gateway, Host]:
    prompts = PromptBuilder(ChatByteTokenizer(), CompactTemplate(), Layout.CONVERSATION)
    policy: Any = SimpleNamespace(
        prompts=prompts, settings=SimpleNamespace(sampling=Sampling), engine_for=lambda env: None
    )
    gateway = Gateway()
    tasks = ["corridor/test/000"]
    about: dict[str, Any] = {"token": None, "limits": Limits(), "most": 2, "on_end": records.append}
    return gateway, Host(gateway, policy, env, tasks, "corridor", **about)


def test_an_episode_that_begins_while_the_gateway_ends_leaves_nothing_open() -> None:
    SlowCorridor = make_slow_corridor("_start")

    async def play() -> None:
        gateway, host = make_host(SlowCorridor, records)
        await gateway.start()
        async with httpx.AsyncClient(timeout=20) as client:
            begun = asyncio.create_task(client.post(f"{gateway.url}/episodes", json={}))
            assert await asyncio.to_thread(SlowCorridor.begun.wait, 20)
            ending = asyncio.create_task(host.aclose())
            await asyncio.sleep(0.01)
            SlowCorridor.go_on.set()
            await ending
            assert (await begun).status_code == 410
            assert (await client.post(f"{gateway.url}/episodes", json={})).status_code == 410
        await gateway.aclose()

    records: list[Trajectory] = []
    asyncio.run(play())
    assert len(SlowCorridor.closed) == 1 and not records


def test_an_episode_whose_end_waits_for_a_step_is_recorded_when_the_gateway_ends() -> None:
    SlowCorridor = make_slow_corridor("_act")

    async def play() -> None:
        gateway, host = make_host(SlowCorridor, records)
        await gateway.start()
        async with httpx.AsyncClient(timeout=20) as client:
            opened = (await client.post(f"{gateway.url}/episodes", json={})).json()
            address, key = f"{gateway.url}/episodes/{opened['id']}", {"Authorization": f"Bearer {opened['api_key']}"}
            step = {"response": "<think>x</think><action>right</action>"}
            stepping = asyncio.create_task(client.post(f"{address}/step", json=step, headers=key))
            assert await asyncio.to_thread(SlowCorridor.begun.wait, 20)
            deleting = asyncio.create_task(client.delete(address, headers=key))
            while (await client.get(address, headers=key)).status_code == 200:
                await asyncio.sleep(0.01)
            ending = asyncio.create_task(host.aclose())
            await asyncio.sleep(0.01)
            SlowCorridor.go_on.set()
            await ending
            assert len(records) == 1
            assert (await deleting).status_code == 200 and (await stepping).status_code == 200
        await gateway.aclose()

    records: list[Trajectory] = []
    asyncio.run(play())
    assert [(one.task_id, one.stop, len(one.steps)) for one in records] == [("corridor/test/000", StopReason.QUIT, 1)]
    assert len(SlowCorridor.closed) == 1


@pytest.mark.slow
def test_a_call_under_way_is_not_idle_and_our_clock_is_no_failure(script: Script, tmp_path: Path) -> None:
    def answer_late(handler: Any) -> None:
        time.sleep(1.6)
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
            time.sleep(1.3)
    (played,) = read_last(tmp_path / EPISODES)
    assert played.stop is StopReason.FAULT and played.fault == "agent_timeout"


@pytest.mark.slow
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
