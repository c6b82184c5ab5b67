"""``spear/McpTools-v0``: tasks that are solved with the tools of an MCP server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from spear_envs.core.env import ActionResult, SpearEnv
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptTemplate
from spear_envs.core.tasks import Task, check_split
from spear_envs.core.tools import CallError, CallParser
from spear_envs.mcp_tools.client import McpSession, ToolEntry
from spear_envs.mcp_tools.recording import Recording
from spear_envs.mcp_tools.tasks import judge, read_tasks
from spear_envs.mcp_tools.tools import McpTool, make_tools, write_action


class McpToolsEnv(SpearEnv[str]):
    """Each episode has its own server or connection, which is closed with it; the tools are the actions.

    Args:
        tasks: file of JSON lines, see ``docs/mcp-tools.md``.
        server: a command line that starts a server over stdio, or the address of one over HTTP; None for ``recording``.
        recording: file of calls: written with a server, replayed without one.
        split: of the tasks.
        max_turns: calls in an episode.
        answer_tool: name of the tool that ends an episode with an answer.
        seconds: for the server's start, and for each call.
        most_characters: of a result; more is cut off.
        pass_variables: environment variables that a command gets besides ``PATH`` and the like.
        common: see :class:`~spear_envs.core.env.SpearEnv`.

    Raises:
        SpearError: the tasks or the recording cannot be read, or there is neither a server nor a recording.
        EnvFault: ``mcp_unreachable``.
    """

    tools: Sequence[McpTool]  # type: ignore[assignment,misc]
    templates: Mapping[str, PromptTemplate]  # type: ignore[misc]
    splits: ClassVar = ("train", "valid", "test")
    reaching = frozenset({"tasks", "server", "recording", "pass_variables"})

    def __init__(
        self,
        *,
        tasks: str,
        server: str | None = None,
        recording: str | None = None,
        split: str = "train",
        max_turns: int = 16,
        answer_tool: str = "answer",
        seconds: float = 60.0,
        most_characters: int = 8000,
        pass_variables: Sequence[str] = (),
        **common: Any,
    ) -> None:
        for name, value in {"tasks": tasks, "server": server, "recording": recording}.items():
            if not isinstance(value, str) and (value is not None or name == "tasks"):
                raise SpearError(f"{name} is a text, not {value!r}.")
        super().__init__(read_tasks(tasks, check_split(split, self.splits)), max_turns=max_turns, **common)
        self._server = server
        if server is not None:
            self.metadata = {**self.metadata, "blocking": True}  # type: ignore[misc]
            self.restores = False  # a server's state cannot be saved: its calls are repeated
        self._seconds = float(seconds)
        self._variables = tuple(pass_variables)
        self._most = most_characters
        self._session: McpSession | None = None
        self._fresh = False  # the session has had no episode
        self._recording = Recording(recording) if recording else None
        self.tools = make_tools(self._list_tools(), answer_tool)
        self._answer_tool = answer_tool
        self._calls: list[dict[str, Any]] = []
        self._answer: str | None = None
        self._reached = 0.0
        rules = "You have these tools:\n\n" + "\n".join(
            f"- {tool.name}: {tool.description}\n  arguments: {json.dumps(tool.parameters, ensure_ascii=False)}"
            for tool in self.tools
        )
        rules += f"\n\nAn action is one call: a tool's name and its arguments as JSON, such as {answer_tool} "
        rules += '{"answer": "…"}'
        self.templates = {
            "default": DefaultTemplate(rules, parser=self.parser),
            "compact": CompactTemplate(self.parser),
            "tools": DefaultTemplate(parser=CallParser(self.tools, self.parser)),
        }

    def _list_tools(self) -> Sequence[ToolEntry]:
        if self._server is not None:
            self._session = self._connect()
            if self._recording is not None:
                self._recording.add_tools(self._session.tools)
            return self._session.tools
        if self._recording is None or self._recording.tools is None:
            raise SpearError("give a server=, or an existing recording= of one.")
        return self._recording.tools

    def _connect(self) -> McpSession:
        assert self._server is not None
        self._fresh = True
        return McpSession(self._server, seconds=self._seconds, pass_variables=self._variables)

    def _disconnect(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def close(self) -> None:
        """End the connection."""
        self._disconnect()
        super().close()

    def _start(self, task: Task) -> None:
        if self._server is not None and not self._fresh:
            self._disconnect()
            self._session = self._connect()
        self._fresh = False
        self._calls, self._answer, self._reached = [], None, 0.0

    def _act(self, action: str) -> ActionResult:
        name = action.split(None, 1)[0]
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            known = [tool.name for tool in self.tools]
            told = f"There is no tool {name[:40]!r}.{suggest_name(name, known)} There is: {', '.join(known)}."
            return ActionResult(False, message=told)
        arguments = tool.read(action)
        if arguments is None:
            return ActionResult(False, message=f"The arguments of {name} are not a JSON object.")
        try:
            tool.check(arguments)
        except CallError as error:
            return ActionResult(False, message=str(error))
        action = write_action(name, arguments)
        if name == self._answer_tool:
            self._answer = arguments["answer"]
            return self._judge("", done=True, action=action)
        text, is_error = self._call(name, arguments)
        if len(text) > self._most:
            text = f"{text[: self._most]}\n… ({len(text) - self._most:,} characters more)"
        return self._judge(text, ok=not is_error, tool_calls=1, action=action)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        call = {"tool": name, "arguments": dict(arguments)}
        played = [*self._calls, call]
        if self._session is not None:
            result = self._session.call(name, arguments)
            if self._recording is not None:
                self._recording.add(self.task.id, played, result)
        else:
            assert self._recording is not None
            result = self._recording.find(self.task.id, played)
        self._calls.append(call | {"text": result.text, "is_error": result.is_error})
        return result.text, result.is_error

    def _judge(
        self, message: str, *, ok: bool = True, done: bool = False, tool_calls: int = 0, action: str
    ) -> ActionResult:
        before, self._reached = self._reached, judge(self.task, self._calls, self._answer)
        gained, won = self._reached - before, self._reached >= 1
        return ActionResult(ok, gained, won=won, done=done, message=message, tool_calls=tool_calls, action=action)

    def _score(self) -> float:
        return self._reached

    def _observe(self, message: str) -> str:
        return message or ("(nothing)" if self.turn else "(nothing yet: call a tool)")

    def _world(self) -> Any:
        return {"calls": [dict(call) for call in self._calls], "answer": self._answer, "score": self._reached}

    def _restore_world(self, state: Any) -> None:
        """Repeat the calls, since a server's state cannot be saved.

        Raises:
            SpearError: the server answers differently.
        """
        self._start(self.task)
        for call in state["calls"]:
            self._call(call["tool"], call["arguments"])
        if self._calls != state["calls"]:
            raise SpearError("the server answers the same calls differently: its episodes cannot be copied.")
        self._answer, self._reached = state["answer"], state["score"]

    def expert_plan(self) -> list[str]:
        """The rest of the task's ``plan``, else the calls or the answer of its rule."""
        content = self.task.content
        rule = content["reward"]
        plan = content.get("plan", rule.get("calls", []))
        actions = [write_action(call["tool"], call.get("arguments", {})) for call in plan]
        if "answer" in rule:
            right = rule["answer"] if isinstance(rule["answer"], str) else rule["answer"][0]
            actions.append(write_action(self._answer_tool, {"answer": right}))
        return actions[len(self._calls) :]
