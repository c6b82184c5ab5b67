"""One episode as tools of the Model Context Protocol, by the official package ``mcp``.

The newest revision of the protocol lacks sessions over HTTP, so an episode is a process that its client starts and
talks to over stdin and stdout. The client chooses the task and reads the reward; the agent has the tools.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from spear_envs.adapters.conversation import ENDED, Conversation, Message, find_tools_template
from spear_envs.core.env import SpearEnv
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseFormat
from spear_envs.core.prompts import IMAGE
from spear_envs.core.tools import CallError, write_call

PROMPT = "task"
"""Name of the prompt with the task, the rules and the first observation."""
logger = logging.getLogger(__name__)


class ToolEpisode:
    """A running episode that is played by tool calls.

    Args:
        env: with ``response_format="plain"``.
        task: id of the task; None lets ``seed`` draw it.
        out: a new file that from now on always holds what :meth:`describe` returns, as JSON.

    Raises:
        SpearError: the task is unknown, the environment does not take bare actions, or the file exists.
        OSError: the file cannot be written.
    """

    def __init__(
        self, env: SpearEnv[Any], *, task: str | None = None, seed: int | None = None, out: Path | None = None
    ) -> None:
        if env.response_format is not ResponseFormat.PLAIN:
            raise SpearError("tools act in bare actions: leave response_format at 'plain'.")
        if out is not None and out.exists():
            raise SpearError(f"{out} exists: name another file for this episode.")
        self.env = env
        self._out = out
        self._conversation = Conversation(env, find_tools_template(env))
        self._lock = threading.Lock()
        self._broken = False
        self.first = self.last = self._conversation.reset(task=task, seed=seed)
        self._save()

    @property
    def ended(self) -> bool:
        """Return whether the environment has ended the episode, or failed."""
        return self._broken or self.last.done

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Message:
        """Play a call. Concurrent calls are played one after the other, and a cancelled one is still played.

        Raises:
            CallError: the call cannot be played, which costs no turn; or the episode has ended.
        """
        return await asyncio.to_thread(self._play, name, arguments)

    def _play(self, name: str, arguments: Mapping[str, Any]) -> Message:
        # The thread finishes even if the client cancels the call.
        with self._lock:
            if self.ended:
                raise CallError(ENDED)
            action = write_call(self.env.tools, name, arguments)
            try:
                self.last = self._conversation.respond(action)
            except Exception as error:
                logger.exception("the environment failed")
                self._broken = True
                raise CallError(f"The environment failed ({type(error).__name__}). {ENDED}") from error
            finally:
                try:
                    self._save()
                except OSError as error:  # the turn has been played, and the next call writes the file again
                    logger.error("%s cannot be written: %s", self._out, error.strerror)
            return self.last

    def describe(self) -> dict[str, Any]:
        """Describe play and reward for the client; the reward is None after a fault."""
        info = self.last.info
        return {
            "task": info["task_id"],
            "turns": info["turn"],
            "done": self.last.done,
            "won": info["won"],
            "reward": None if self._broken else self._conversation.pay(self.last),
            "fault": "env_failed" if self._broken else info["fault"],
        }

    def _save(self) -> None:
        if self._out is not None:
            part = self._out.with_name(f"{self._out.name}.part")
            part.write_text(json.dumps(self.describe()) + "\n")
            part.replace(self._out)


def make_mcp_server(episode: ToolEpisode) -> Server[Any]:
    """Make a server of the environment's tools and a prompt with the task; the agent cannot call ``reset``.

    A result carries reward and end in its ``_meta``, which clients do not show to models.
    """

    async def list_tools(context: Any, page: Any) -> types.ListToolsResult:
        tools = [
            types.Tool(name=tool.name, description=tool.description, input_schema=tool.parameters)
            for tool in episode.env.tools
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(context: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            message = await episode.call(asked.name, asked.arguments or {})
        except CallError as error:
            return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)
        content = _show(message)
        if message.done:
            content.append(types.TextContent(type="text", text=ENDED))
        keys = ("turn", "won", "fault")
        paid = {"reward": message.reward, "terminated": message.terminated, "truncated": message.truncated}
        meta = {f"spear/{key}": value for key, value in {**paid, **{key: message.info[key] for key in keys}}.items()}
        return types.CallToolResult(content=content, _meta=meta)

    async def list_prompts(context: Any, page: Any) -> types.ListPromptsResult:
        about = "The task, the rules, and what the environment shows first."
        return types.ListPromptsResult(prompts=[types.Prompt(name=PROMPT, description=about)])

    async def get_prompt(context: Any, asked: types.GetPromptRequestParams) -> types.GetPromptResult:
        if asked.name != PROMPT:
            raise SpearError(f"unknown prompt {asked.name!r}: the only one is {PROMPT!r}.")
        blocks = [types.PromptMessage(role="user", content=part) for part in _show(episode.first)]
        return types.GetPromptResult(messages=blocks)

    rules = episode.first.text
    if episode.first.image is not None:
        rules = rules.replace(IMAGE, f"(a picture: see the prompt {PROMPT!r})")
    return Server(
        "spear-environment",
        version=version("spear-envs"),
        instructions=rules,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
    )


async def serve_stdio(episode: ToolEpisode) -> None:
    """Serve over stdin and stdout until the client leaves."""
    server = make_mcp_server(episode)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


def _show(message: Message) -> list[Any]:
    """Write a message as content, with the picture at its place in the text."""
    image = message.encode_image()
    if image is None:
        return [types.TextContent(type="text", text=message.text)]
    texts = [types.TextContent(type="text", text=text) for text in message.text.split(IMAGE, 1)]
    picture = types.ImageContent(type="image", data=image, mime_type="image/png")
    return [texts[0], picture, *texts[1:]]
