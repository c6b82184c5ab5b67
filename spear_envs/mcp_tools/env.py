"""``spear/McpTools-v0``: tasks that are solved with the tools of an MCP server.

A file of the user's has the tasks, each with a rule for its reward. The server's tools become those of the environment,
with any JSON schema and actions of the form ``name {arguments}``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from spear_envs.core.env import ActionResult, SpearEnv
from spear_envs.core.errors import SpearError, require_whole, suggest_name
from spear_envs.core.machine import import_module
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptTemplate
from spear_envs.core.tasks import ListTaskSet, Task, check_split
from spear_envs.core.tools import CallError, CallParser, Tool
from spear_envs.data.files import read_regular
from spear_envs.mcp_tools.client import McpSession, Recording, ToolEntry

MOST_LEVELS = 32
"""Deepest nesting of a call's arguments."""
_HINTS: Mapping[Any, type] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict
}  # fmt: skip


def _ignore(_validator: Any, _value: Any, _instance: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    return iter(())


def _check_additional(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if "patternProperties" not in schema:
        yield from jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"](
            validator, value, instance, schema
        )


def _check_unique(_validator: Any, value: Any, instance: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    # The package compares each with each: minutes for the list of a long response.
    is_asked = value and isinstance(instance, list)
    if is_asked and len({json.dumps(item, sort_keys=True) for item in instance}) < len(instance):
        yield jsonschema.ValidationError(f"{instance!r} has non-unique elements")


# Patterns are left to the server: they are of ECMA-262, which Python may refuse or search for ever.
_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {
        **dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), _ignore),
        "additionalProperties": _check_additional,
        "uniqueItems": _check_unique,
    },
)


def _drop_dialects(schema: Any) -> Any:
    """Return a schema without ``$schema``, which would choose another validator wherever a reference leads to it."""
    if isinstance(schema, dict):
        kept = (key for key, value in schema.items() if key != "$schema" or not isinstance(value, str))
        return {key: _drop_dialects(schema[key]) for key in kept}
    return [_drop_dialects(part) for part in schema] if isinstance(schema, list) else schema


@dataclass(frozen=True)
class McpTool(Tool):
    """A tool with its server's schema."""

    entry: ToolEntry = field(kw_only=True)

    @property
    def name(self) -> str:
        """Return the name that the server gives the tool."""
        return self.entry.name

    @property
    def description(self) -> str:
        """Return the description that the server gives the tool."""
        return self.entry.description

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the server's JSON schema."""
        return dict(self.entry.schema)

    @property
    def types(self) -> Mapping[str, Any]:
        """Return the Python type of each argument; ``Any`` if the schema does not have a plain one."""
        kinds = {name: about.get("type") for name, about in self._properties.items()}
        return {name: _HINTS.get(kind, Any) if isinstance(kind, str) else Any for name, kind in kinds.items()}

    @property
    def meanings(self) -> Mapping[str, str]:
        """Return the description of each argument, or its name."""
        return {name: about.get("description") or name for name, about in self._properties.items()}

    @property
    def required(self) -> Sequence[str]:
        """Return the arguments that a call must have."""
        return tuple(self.entry.schema.get("required", ()))

    def find_default(self, name: str) -> Any:
        """Return the default in the server's schema, else None."""
        return self._properties[name].get("default")

    @property
    def _properties(self) -> Mapping[str, Mapping[str, Any]]:
        found = self.entry.schema.get("properties", {})
        order = _order_names(self.entry.schema)
        return {name: found[name] if isinstance(found[name], dict) else {} for name in order}

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the action in plain form, without what is None by default; raises as :meth:`check`."""
        absent = {
            name
            for name, about in self._properties.items()
            if arguments.get(name, "") is None and name not in self.required and "default" not in about
        }
        arguments = {name: value for name, value in arguments.items() if name not in absent}
        self.check(arguments)
        return write_action(self.name, arguments)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments against the schema, but for its patterns.

        Raises:
            CallError: they do not fit.
        """
        try:
            # An empty registry, so that a stranger's schema cannot fetch anything.
            validator = _Validator(_drop_dialects(dict(self.entry.schema)), registry=Registry())
            problem = next(validator.iter_errors(dict(arguments)), None)
        except (Unresolvable, RecursionError, OverflowError) as error:
            raise CallError(f"{self.name} cannot take this ({type(error).__name__}).") from error
        if problem is not None:
            place = ".".join(map(str, problem.absolute_path))
            raise CallError(f"{self.name} cannot take this: {place + ': ' if place else ''}{problem.message[:200]}.")

    def read(self, action: str) -> dict[str, Any] | None:
        """Read the arguments of an action; None if it is not of this tool."""
        name, *written = action.split(None, 1)
        if name != self.name:
            return None
        try:
            arguments = json.loads(written[0] if written else "{}")
            # Must also be valid to send: no infinite numbers, lone surrogates or endless nesting.
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return None
        return arguments if isinstance(arguments, dict) and _is_shallow(arguments) else None


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [part for part in level if isinstance(part, (dict, list))]
        level = [item for part in inner for item in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return True
    return False


def write_action(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a call as an action, in which no text looks like the end of a thought."""
    written = json.dumps(dict(arguments), ensure_ascii=False).replace("</think>", "<\\/think>")
    return f"{name} {written}"


def _order_names(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments, those that a call may leave out last, as Python wants it."""
    needed = schema.get("required", ())
    return sorted(schema.get("properties", {}), key=lambda name: name not in needed)


def make_tools(entries: Sequence[ToolEntry], answer: str) -> tuple[McpTool, ...]:
    """Make the server's tools, and the one that ends an episode with an answer.

    Raises:
        SpearError: a tool's name is taken, or its schema is invalid.
    """
    ends = ToolEntry(
        answer,
        "Ends the task with your answer.",
        {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    )
    made: dict[str, McpTool] = {}
    for entry in (*entries, ends):
        if entry.name in made or not re.fullmatch(r"\S+", entry.name):
            raise SpearError(
                f"the tool name {entry.name!r} is taken, empty, or has white space in it: see answer_tool."
            )
        try:
            _Validator.check_schema(dict(entry.schema), format_checker=jsonschema.FormatChecker(()))
        except jsonschema.SchemaError as error:
            raise SpearError(f"the schema of the tool {entry.name!r} is invalid: {error.message}") from error
        made[entry.name] = McpTool(_take(entry), re.compile(".+"), entry=entry)
    return tuple(made.values())


def _take(entry: ToolEntry) -> Any:
    """Make a function with the tool's signature."""

    def take(**arguments: Any) -> str:
        return write_action(entry.name, arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [name for name in _order_names(entry.schema) if name.isidentifier() and not iskeyword(name)]
    take.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return take


_TEXT, _OBJECT = {"type": "string"}, {"type": "object"}


def _describe_object(required: str, **properties: Any) -> dict[str, Any]:
    return {**_OBJECT, "properties": properties, "required": required.split(), "additionalProperties": False}


def _describe_list(items: Any, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


_CALL = _describe_object("tool", tool=_TEXT, arguments=_OBJECT)
_RULES = {
    "answer": {"anyOf": [_TEXT, _describe_list(_TEXT, 1)]},
    "calls": _describe_list(_CALL, 1),
    "function": {**_TEXT, "pattern": "^[^:]+:[^:]+$"},
}
ROW = _describe_object(
    "instruction reward",
    instruction={**_TEXT, "minLength": 1},
    split={"enum": ["train", "valid", "test"]},
    subtask=_TEXT,
    reward={**_describe_object("", **_RULES), "minProperties": 1, "maxProperties": 1},
    plan=_describe_list(_CALL),
    more={},
)
"""JSON schema of a line."""
Rule = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]], "str | None"], float]


def read_tasks(path: str | Path, split: str) -> ListTaskSet:
    """Read the tasks of a split from a file of JSON lines.

    Raises:
        SpearError: the file cannot be read, a line is not a task, or the split is empty.
    """
    path = Path(path)
    try:
        lines = read_regular(path, 2**30).decode("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise SpearError(f"the tasks in {path} cannot be read: {error}.") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = _read_row(line, f"{path}:{number}")
            if row.get("split", "train") == split:
                content: dict[str, Any] = {key: row[key] for key in ("reward", "plan", "more") if key in row}
                name = f"{path.stem}/{split}/{len(tasks):05d}"
                tasks.append(Task(name, split, row.get("subtask", "task"), row["instruction"], content))
    if not tasks:
        raise SpearError(f"{path} has no tasks of the split {split!r}: set 'split' in its lines.")
    return ListTaskSet(tasks)


def _read_row(line: str, place: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        jsonschema.Draft202012Validator(ROW).validate(row)
        if "function" in row["reward"]:
            load_rule(row["reward"]["function"])
    except (ValueError, RecursionError) as error:
        raise SpearError(f"{place} is not JSON ({error}).") from error
    except jsonschema.ValidationError as error:
        where = ".".join(map(str, error.absolute_path)) or "the line"
        raise SpearError(f"{place} is not a task: {where}: {error.message[:200]}.") from error
    except SpearError as error:
        raise SpearError(f"{place}: {error}") from error
    return row


def load_rule(name: str) -> Rule:
    """Load the function ``MODULE:FUNCTION`` of a task's reward.

    Raises:
        SpearError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        rule: Rule | None = getattr(import_module(module), attribute, None)
    except Exception as error:  # the user's module may raise anything
        raise SpearError(f"the rule {name}: {module} cannot be imported ({type(error).__name__}: {error}).") from error
    if not callable(rule):
        raise SpearError(f"the rule {name}: {module} lacks the function {attribute!r}.")
    return rule


def judge(task: Task, calls: Sequence[Mapping[str, Any]], answer: str | None) -> float:
    """Compute the score of an episode, from 0 to 1; it is won at 1.

    Args:
        task: has the rule.
        calls: of the episode, each with ``tool``, ``arguments``, ``text`` and ``is_error``.
        answer: that ended the episode; None while it runs.

    Raises:
        SpearError: the user's function raises, or does not return a score.
    """
    rule = task.content["reward"]
    if "answer" in rule:
        wanted = [rule["answer"]] if isinstance(rule["answer"], str) else rule["answer"]
        return float(answer is not None and _plain(answer) in map(_plain, wanted))
    if "calls" in rule:
        return sum(any(_fits(call, wanted) for call in calls) for wanted in rule["calls"]) / len(rule["calls"])
    try:
        score = float(load_rule(rule["function"])(task.definition(), calls, answer))
    except SpearError:
        raise
    except (Exception, SystemExit) as error:
        raise SpearError(
            f"the rule {rule['function']} failed on {task.id}: {type(error).__name__}: {error}."
        ) from error
    if not 0 <= score <= 1:
        raise SpearError(f"the rule {rule['function']} gave {score} for {task.id}: a score is from 0 to 1.")
    return score


def _fits(call: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    given = call["arguments"]
    asked = wanted.get("arguments", {})
    return (
        call["tool"] == wanted["tool"]
        and not call["is_error"]
        and all(key in given and given[key] == value for key, value in asked.items())
    )


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


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
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= 86_400:
            raise SpearError(f"seconds={seconds!r} is not valid: give a number above 0, of at most 86,400.")
        if not isinstance(pass_variables, (list, tuple)) or not all(isinstance(one, str) for one in pass_variables):
            raise SpearError(f"pass_variables={pass_variables!r} is not valid: give a list of names.")
        if not isinstance(answer_tool, str):
            raise SpearError(f"answer_tool is a text, not {answer_tool!r}.")
        super().__init__(read_tasks(tasks, check_split(split, self.splits)), max_turns=max_turns, **common)
        self._server = server
        if server is not None:
            self.metadata = {**self.metadata, "blocking": True}  # type: ignore[misc]
            self.restores = False  # a server's state cannot be saved: its calls are repeated
        self._seconds = float(seconds)
        self._variables = tuple(pass_variables)
        self._most = require_whole("most_characters", most_characters, 1)
        self._session: McpSession | None = None
        self._fresh = False  # the session has had no episode
        self._recording = Recording(recording) if recording else None
        try:
            self.tools = make_tools(self._list_tools(), answer_tool)
        except BaseException:
            self._disconnect()
            raise
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
        if self._server is not None and (self._session is None or not self._fresh):
            self._disconnect()
            self._session = self._connect()
        self._fresh = False
        self._calls, self._answer, self._reached = [], None, 0.0

    def _act(self, action: str) -> ActionResult:
        name = action.split(None, 1)[0]
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            known = [tool.name for tool in self.tools]
            message = f"There is no tool {name[:40]!r}.{suggest_name(name, known)} There is: {', '.join(known)}."
            return ActionResult(False, message=message)
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
        """Return what is left of the task's ``plan``, else of the calls or the answer of its rule."""
        content = self.task.content
        rule = content["reward"]
        plan = content.get("plan", rule.get("calls", []))
        for call in self._calls:  # others may lie between those of the plan
            plan = plan[1:] if plan and _fits(call | {"is_error": False}, plan[0]) else plan
        actions = [write_action(call["tool"], call.get("arguments", {})) for call in plan]
        if "answer" in rule:
            right = rule["answer"] if isinstance(rule["answer"], str) else rule["answer"][0]
            actions.append(write_action(self._answer_tool, {"answer": right}))
        return actions
