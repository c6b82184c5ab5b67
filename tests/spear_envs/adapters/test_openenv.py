"""OpenEnv's protocol as our service speaks it; its own client is in ``test_peers.py``."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'env-server'")
pytest.importorskip("websockets", reason="the service needs the extra 'env-server'")
pytest.importorskip("httpx", reason="the tests ask with httpx")

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus

from spear_envs.adapters.conversation import ServiceSettings, make_conversation
from spear_envs.adapters.openenv import Reset, SessionPool, WireError, read_message, write_json
from spear_envs.core.env import SpearEnv
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.core.tasks import NumberedTaskSet, Task
from tests.commands import run_command
from tests.spear_envs.adapters.service import Player, Running, run_service
from tests.spear_envs.corridor import CORRIDOR

FIVE = ("spear/ALFWorld-v0", "spear/WebShop-v0", "spear/Sokoban-v1", "spear/SearchR1-v0", "spear/CodeInterpreter-v0")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with run_service(settings=ServiceSettings(max_sessions=4)) as running:
        yield running


def play_to_the_end(player: Player, twin: SpearEnv[Any], **reset: Any) -> dict[str, Any]:
    """Let the expert of an environment beside the server's play; the two must agree on every turn."""
    found = player.ask("reset", **reset)
    _, info = twin.reset(options={"task": found["metadata"]["task_id"]})
    assert found["reward"] is None and not found["done"]
    while not found["done"]:
        response = twin.parser.respond(twin.expert_plan()[0])
        found = player.ask("step", response=response)
        _, reward, terminated, truncated, info = twin.step(response)
        lines = {**found["metadata"], **found["observation"]}
        assert (found["reward"], lines["terminated"], lines["truncated"]) == (reward, terminated, truncated)
        assert {key: lines[key] for key in info} == json.loads(write_json(info))
    return found


@pytest.mark.parametrize("env_id", FIVE)
def test_any_of_the_five_is_played_and_won(env_id: str) -> None:
    with run_service(env_id) as running, running.connect() as player:
        twin = make_env(env_id)
        found = play_to_the_end(player, twin, seed=5)
        twin.close()
    assert found["metadata"]["won"] and found["metadata"]["score"] == 1


def test_a_picture(running: Running) -> None:
    with run_service("spear/Sokoban-v1") as sokoban, sokoban.connect() as player:
        found = player.ask("reset", seed=1)
    picture = Image.open(io.BytesIO(base64.b64decode(found["observation"]["image"])))
    twin = make_env("spear/Sokoban-v1")
    observation, _ = twin.reset(seed=1)
    assert np.array_equal(np.asarray(picture), observation["image"])


def test_seeds_tasks_splits_and_indexes(running: Running) -> None:
    twins = {split: make_env(CORRIDOR, split=split) for split in ("train", "test")}
    with running.connect() as player:
        first = player.ask("reset", seed=3)
        assert player.ask("reset", seed=3) == first
        wanted = twins["train"].tasks[7].id
        assert player.ask("reset", task=wanted)["metadata"]["task_id"] == wanted
        assert player.ask("reset", index=7)["metadata"]["task_id"] == wanted
        assert player.ask("reset", split="test", index=0)["metadata"]["task_id"] == twins["test"].tasks[0].id
        assert player.ask("reset", seed=3) == first
        assert player.ask("reset", episode_id="mine", seed=3) == first
        player.ask("step", response="<think></think><action>left</action>")
        lines = {"episode_id": "mine", "step_count": 1, "task_id": first["metadata"]["task_id"], "done": False}
        assert player.ask("state") == lines


def test_a_task_that_cannot_be_made_ends_no_session() -> None:
    class Gone(NumberedTaskSet):
        def _make_task(self, index: int) -> Task:
            raise SpearError("the file is gone")

        def _definition(self) -> None:
            return None

    conversation = make_conversation(CORRIDOR)
    conversation.env.tasks = Gone("corridor", "train", 3)
    with pytest.raises(WireError, match="gone"):
        SessionPool(lambda split: conversation, 1).open().reset(Reset(index=0))


def test_what_is_wrong_is_said_and_the_session_goes_on(running: Running) -> None:
    with running.connect() as player:
        assert "send reset first" in player.fail("step", response="x")["message"]
        assert player.ask("state")["done"] is True
        for text, code in (("{", "INVALID_JSON"), ("[]", "INVALID_JSON"), ("{}", "UNKNOWN_TYPE"), (b"{}", None)):
            answer = player.send(text)
            assert answer["type"] == "error" and code in (None, answer["data"]["code"])
        for data in ({"action": "left"}, {"response": 3}, {}, {"response": "x", "timeout_s": 3}):
            assert player.fail("step", **data)["code"] == "VALIDATION_ERROR"
        for data in ({"seed": "3"}, {"seed": -1}, {"seed": True}, {"wide": 1}, {"task": "a", "index": 1}):
            assert player.fail("reset", **data)["code"] == "VALIDATION_ERROR"
        assert player.fail("reset", split="tset")["code"] == "FACTORY_ERROR"
        assert len(player.fail("reset", split="x" * 100_000)["message"]) < 2000
        for text in ({"type": "x" * 100_000}, {"type": "step", "data": {"y" * 100_000: 1}}, {"type": ["z" * 100_000]}):
            assert len(player.send(json.dumps(text))["data"]["message"]) < 2000
        assert player.fail("reset", task="corridor/train/99999")["code"] == "EXECUTION_ERROR"
        assert "the split has" in player.fail("reset", index=10**9)["message"]
        assert "send reset first" in player.fail("step", response="x")["message"]
        player.ask("reset", seed=1)
        malformed = player.ask("step", response="no tags at all")
        assert "could not be read" in malformed["observation"]["text"] and not malformed["metadata"]["format_ok"]
        for _ in range(11):
            found = player.ask("step", response="")
        assert found["metadata"]["truncated"] and found["done"]
        assert "under way any more" in player.fail("step", response="x")["message"]


def test_sessions_are_bounded_and_come_back(running: Running) -> None:
    running.wait_for_sessions(0)
    with running.connect() as one, running.connect(), running.connect(), running.connect():
        one.ask("reset", seed=1)
        with running.connect() as fifth:
            answer = json.loads(fifth.socket.recv(10))["data"]
            assert answer["code"] == "CAPACITY_REACHED" and answer["max_sessions"] == 4
            with pytest.raises(ConnectionClosed):
                fifth.ask("state")
        assert httpx.post(f"{running.url}/reset", json={}).status_code == 503
        assert one.ask("state")["step_count"] == 0
    running.wait_for_sessions(0)
    with running.connect() as player:
        player.ask("reset", seed=2)
        player.socket.send(json.dumps({"type": "close"}))
        with pytest.raises(ConnectionClosed):
            player.socket.recv(10)
    running.wait_for_sessions(0)


def test_sessions_do_not_see_each_other(running: Running) -> None:
    """Many clients at once, each with its own episode, all played to the end and all won."""
    running.wait_for_sessions(0)
    faults: list[BaseException] = []

    def play(first_seed: int) -> None:
        twin = make_env(CORRIDOR)
        try:
            with running.connect() as player:
                for seed in range(first_seed, first_seed + 10):
                    assert play_to_the_end(player, twin, seed=seed)["metadata"]["won"]
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=play, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults


def test_a_session_in_which_nothing_happens_ends() -> None:
    with run_service(settings=ServiceSettings(idle_s=1.0)) as running, running.connect() as player:
        player.ask("reset", seed=1)
        assert json.loads(player.socket.recv(10))["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosed):
            player.socket.recv(10)
        running.wait_for_sessions(0)


def test_messages_and_bodies_are_bounded() -> None:
    with run_service(settings=ServiceSettings(message_bytes=10_000, body_bytes=100)) as running:
        with running.connect() as player:
            player.ask("reset", seed=1)
            player.ask("step", response="x" * 9_000)
            with pytest.raises(ConnectionClosed) as caught:
                player.ask("step", response="x" * 11_000)
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
        running.wait_for_sessions(0)
        assert httpx.post(f"{running.url}/reset", content=b" " * 200).status_code == 413


def test_the_token() -> None:
    with run_service(settings=ServiceSettings(token="s3cret")) as running:
        assert httpx.get(f"{running.url}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path in ("/schema", "/openapi.json"):
                refused = httpx.get(f"{running.url}{path}", headers=headers)
                assert refused.status_code == 401 and "Authorization: Bearer" in refused.json()["detail"]
            with pytest.raises(InvalidStatus) as caught, running.connect(additional_headers=headers):
                pass
            assert caught.value.response.status_code == 401
        right = {"Authorization": "Bearer s3cret"}
        assert httpx.get(f"{running.url}/schema", headers=right).status_code == 200
        with running.connect(additional_headers=right) as player:
            player.ask("reset", seed=1)


def test_pages_of_other_sites_and_other_names_of_this_machine_are_refused(running: Running) -> None:
    for headers in ({"Origin": "https://example.org"}, {"Origin": "null"}):
        assert httpx.get(f"{running.url}/schema", headers=headers).status_code == 403
        with pytest.raises(InvalidStatus), running.connect(additional_headers=headers):
            pass
    assert httpx.get(f"{running.url}/schema", headers={"Host": "example.org"}).status_code == 403
    assert httpx.get(f"{running.url}/schema", headers={"Origin": running.url}).status_code == 200
    assert httpx.get(f"http://localhost:{running.port}/schema").status_code == 200


def test_questions_over_http(running: Running) -> None:
    def ask(path: str, **data: Any) -> Any:
        return httpx.post(f"{running.url}{path}", json=data).json()

    def get(path: str) -> Any:
        return httpx.get(f"{running.url}{path}").json()

    assert get("/health") == {"status": "healthy"} and get("/metadata")["name"] == "Corridor-v0"
    assert get("/schema")["action"]["required"] == ["response"]
    assert "/reset" in get("/openapi.json")["paths"]
    wanted = make_env(CORRIDOR, split="valid").tasks[3].id
    assert ask("/reset", split="valid", index=3)["metadata"]["task_id"] == wanted
    assert "WebSocket /ws" in httpx.post(f"{running.url}/step", json={}).json()["detail"]
    assert httpx.post(f"{running.url}/reset", content=b"[1]").status_code == 422


def test_an_environment_that_fails_is_closed_and_not_used_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.spear_envs.corridor import CorridorEnv

    closed: list[Any] = []
    with running.connect() as player:
        player.ask("reset", seed=1)
        with monkeypatch.context() as patched:
            patched.setattr(CorridorEnv, "close", lambda self: closed.append(self))
            patched.setattr(CorridorEnv, "_act", lambda self, action: 1 // 0)
            text = player.fail("step", response="<think></think><action>left</action>")
            assert text["code"] == "EXECUTION_ERROR" and "ZeroDivisionError" in text["message"]
        assert len(closed) == 1
        assert "send reset first" in player.fail("step", response="x")["message"]
        player.ask("reset", seed=1)
        player.ask("step", response="<think></think><action>left</action>")


def test_a_reset_that_fails_ends_the_episode_before_it(running: Running) -> None:
    for wrong in ({"split": "tset"}, {"index": 10**9}, {"task": "none"}):
        with running.connect() as player:
            player.ask("reset", seed=1, episode_id="first")
            player.fail("reset", episode_id="second", **wrong)
            state = player.ask("state")
            assert state == {"episode_id": "second", "step_count": 0, "task_id": None, "done": True}
            assert "send reset first" in player.fail("step", response="x")["message"]


def test_an_environment_that_cannot_be_made(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with running.connect() as player, monkeypatch.context() as patched:
        patched.setattr("tests.spear_envs.corridor.load_tasks", fail)
        found = player.fail("reset", seed=1, split="valid")
        assert found["code"] == "FACTORY_ERROR" and "ZeroDivisionError" in found["message"]
        patched.undo()
        player.ask("reset", seed=1, split="valid")


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    with run_command("serve", CORRIDOR, "--max-sessions", "2", SPEAR_ENV_TOKEN="s3cret") as command:
        assert command.line.startswith(f"ready: {CORRIDOR}, 2 sessions, at http://127.0.0.1:")
        assert httpx.get(f"{command.url}/metadata").status_code == 401
        found = httpx.get(f"{command.url}/metadata", headers={"Authorization": "Bearer s3cret"}).json()
        assert found["description"].startswith("Cells in a row")
        command.process.terminate()
        out, err = command.process.communicate(timeout=60)
        assert (command.process.returncode, out, err) == (0, "", "")


def test_it_is_not_ready_without_its_packages() -> None:
    code = "import sys; sys.modules['websockets'] = None; from spear_envs.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "spear/Sokoban-v1", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'spear-envs[env-server]'" in done.stderr and "Traceback" not in done.stderr


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
messages = st.fixed_dictionaries(
    {"type": st.sampled_from(["reset", "step", "state", "close", "mcp", ""]) | json_values},
    optional={
        "data": json_values
        | st.fixed_dictionaries(
            {}, optional={name: json_values for name in ("seed", "task", "split", "index", "response")}
        )
    },
)


@settings(max_examples=50)
@given(st.text() | json_values.map(json.dumps) | messages.map(json.dumps))
def test_whatever_is_sent_is_read_or_refused(text: str) -> None:
    try:
        kind, asked = read_message(text)
    except WireError as error:
        assert str(error).endswith((".", ")."))
    else:
        assert kind in ("reset", "step", "state", "close") and isinstance(asked, Reset if kind == "reset" else str)
        if isinstance(asked, Reset) and asked.seed is not None:
            assert type(asked.seed) is int and asked.seed >= 0
