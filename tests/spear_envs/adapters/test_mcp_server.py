"""An episode as tools of MCP, played by the official client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mcp", reason="needs the extra 'mcp'")

from click.testing import CliRunner
from mcp import Client, StdioServerParameters, stdio_client
from PIL import Image

from spear_envs.adapters.conversation import ENDED
from spear_envs.adapters.mcp_server import PROMPT, ToolEpisode, make_mcp_server
from spear_envs.adapters.serving import serve
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from tests import commands
from tests.spear_envs.corridor import CORRIDOR

HOUSE = "spear/ALFWorld-v0"


def make_plain(env_id: str, **keywords: Any) -> Any:
    return make_env(env_id, keywords={"response_format": "plain", **keywords})


async def play_expert(client: Client, twin: Any) -> Any:
    """Let the expert of an environment beside the server's play by calls of its tools."""
    result = None
    while not twin.done:
        action = twin.expert_plan()[0]
        tool, arguments = next((tool, found) for tool in twin.tools if (found := tool.read(action)) is not None)
        result = await client.call_tool(tool.name, arguments)
        observation, reward, *_ = twin.step(action)
        assert not result.is_error and observation in result.content[0].text
        assert result.meta["spear/reward"] == reward and result.meta["spear/won"] == twin.episode.won
    return result


@pytest.mark.slow
def test_a_client_that_starts_the_command_wins(tmp_path: Path) -> None:
    out = tmp_path / "episode.json"
    twin = make_plain(HOUSE)
    twin.reset(seed=7)

    async def go() -> None:
        command = ["-m", "spear_envs.cli", "serve", HOUSE, "--mcp", "--task", twin.task.id, "--out", str(out)]
        parameters = StdioServerParameters(command=sys.executable, args=command, env={**os.environ}, cwd=commands.ROOT)
        async with Client(stdio_client(parameters)) as client:
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert list(listed) == [tool.name for tool in twin.tools] and "reset" not in listed
            assert listed["take"].input_schema["required"] == ["object", "receptacle"]
            (message,) = (await client.get_prompt(PROMPT)).messages
            assert twin.task.instruction in message.content.text and "look()" in message.content.text
            assert "help()" not in message.content.text
            assert json.loads(out.read_text())["turns"] == 0
            last = await play_expert(client, twin)
            assert last.content[-1].text == ENDED and last.meta["spear/terminated"]
            again = await client.call_tool("look", {})
            assert again.is_error and again.content[0].text == ENDED

    asyncio.run(go())
    written = json.loads(out.read_text())
    assert written["task"] == twin.task.id and written["won"] and written["done"] and written["reward"] == 1.1
    assert written["turns"] == twin.turn and written["fault"] is None


def test_what_is_wrong_is_told_and_costs_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_plain(CORRIDOR)

    async def go() -> None:
        episode = ToolEpisode(env, seed=1)
        async with Client(make_mcp_server(episode)) as client:
            for name, arguments, text in (
                ("reset", {}, "There is no tool 'reset'. There is: act."),
                ("act", {}, "act needs the argument 'action': a text."),
                ("act", {"action": 3}, "'action' of act is a text, not 3."),
            ):
                result = await client.call_tool(name, arguments)
                assert result.is_error and result.content[0].text == text
            assert env.turn == 0 and not episode.ended
            assert episode.describe()["reward"] == -1, "an episode that stops here is lost"
            await asyncio.gather(*(client.call_tool("act", {"action": "left"}) for _ in range(3)))
            assert env.turn == 3
            monkeypatch.setattr(env, "_act", lambda action: 1 // 0)
            result = await client.call_tool("act", {"action": "left"})
            assert result.is_error and "ZeroDivisionError" in result.content[0].text
            assert (await client.call_tool("act", {"action": "left"})).content[0].text == ENDED
            assert episode.describe()["reward"] is None and episode.describe()["fault"] == "env_failed"

    asyncio.run(go())


def test_a_file_that_cannot_be_written_costs_no_observation(tmp_path: Path) -> None:
    out = tmp_path / "out" / "episode.json"
    out.parent.mkdir()
    episode = ToolEpisode(make_plain(CORRIDOR), seed=1, out=out)
    for turn, (source, target) in enumerate(((out.parent, tmp_path / "away"), (tmp_path / "away", out.parent)), 1):
        source.rename(target)
        assert asyncio.run(episode.call("act", {"action": "left"})).info["turn"] == turn
    assert json.loads(out.read_text())["turns"] == 2


def test_a_call_that_the_client_gives_up_is_played_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_plain(CORRIDOR)
    act, played, begun = env._act, [], threading.Event()

    def act_slowly(action: str) -> Any:
        played.append(action)
        begun.set()
        time.sleep(0.1)
        played.append("done")
        return act(action)

    monkeypatch.setattr(env, "_act", act_slowly)

    async def go() -> None:
        episode = ToolEpisode(env, seed=1)
        given_up = asyncio.create_task(episode.call("act", {"action": "up"}))
        assert await asyncio.to_thread(begun.wait, 20)
        given_up.cancel()
        assert (await episode.call("act", {"action": "down"})).info["turn"] == 2
        assert played == ["up", "done", "down", "done"] and episode.describe()["turns"] == 2

    asyncio.run(go())


def test_a_picture_stands_where_the_text_has_its_place() -> None:
    env = make_plain("spear/Sokoban-v1")

    async def go() -> None:
        async with Client(make_mcp_server(ToolEpisode(env, seed=1))) as client:
            first = [message.content for message in (await client.get_prompt(PROMPT)).messages]
            shown = (await client.call_tool("move", {"direction": "up"})).content
            for parts in (first, shown):
                assert [part.type for part in parts] == ["text", "image", "text"]
                assert not any("<image>" in part.text for part in parts if part.type == "text")
            picture = Image.open(io.BytesIO(base64.b64decode(shown[1].data)))
            assert np.array_equal(np.asarray(picture), env._observe("")["image"])

    asyncio.run(go())


def test_wrong_settings_are_refused_before_an_agent_plays(tmp_path: Path) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    for options, text in (
        (["--mcp", "--task", "none"], "none"),
        (["--mcp", "--port", "1"], "--port is not for --mcp"),
        (["--task", "x"], "--task is for --mcp: add it"),
        (["--mcp", "--env", "response_format=tags"], "bare actions"),
        (["--mcp", "--out", str(taken)], "exists: name another file"),
    ):
        result = CliRunner().invoke(serve, [CORRIDOR, *options])
        assert result.exit_code and text in result.output + str(result.exception), options
    assert taken.read_text() == "mine"
    with pytest.raises(SpearError, match="bare actions"):
        ToolEpisode(make_env(CORRIDOR))
