"""A server's tools as tools of an environment: any JSON schema, and actions of the form ``name {arguments}``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from spear_envs.core.errors import SpearError
from spear_envs.core.tools import CallError, Tool
from spear_envs.mcp_tools.client import ToolEntry

MOST_LEVELS = 32
"""Nesting of a call's arguments, at most."""
_HINTS: Mapping[Any, type] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict
}  # fmt: skip


@dataclass(frozen=True)
class McpTool(Tool):
    """A tool with its server's schema."""

    entry: ToolEntry = field(kw_only=True)

    @property
    def name(self) -> str:
        """The server's name."""
        return self.entry.name

    @property
    def description(self) -> str:
        """The server's description."""
        return self.entry.description

    @property
    def parameters(self) -> dict[str, Any]:
        """The server's JSON schema."""
        return dict(self.entry.schema)

    @property
    def types(self) -> Mapping[str, Any]:
        """Python type of each argument; ``Any`` if the schema does not have a plain one."""
        found = self.entry.schema.get("properties", {})
        kinds = {name: about.get("type") if isinstance(about, dict) else None for name, about in found.items()}
        return {name: _HINTS.get(kind, Any) if isinstance(kind, str) else Any for name, kind in kinds.items()}

    @property
    def meanings(self) -> Mapping[str, str]:
        """The description of each argument, or its name."""
        found = self.entry.schema.get("properties", {})
        return {
            name: about.get("description", name) if isinstance(about, dict) else name for name, about in found.items()
        }

    def write(self, arguments: Mapping[str, Any]) -> str:
        """The action in plain form; raises as :meth:`check`."""
        self.check(arguments)
        return write_action(self.name, arguments)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments against the schema.

        Raises:
            CallError: they do not fit.
        """
        # An empty registry, so that a stranger's schema cannot fetch anything.
        validator = jsonschema.Draft202012Validator(self.entry.schema, registry=Registry())
        try:
            problem = next(validator.iter_errors(dict(arguments)), None)
        except (Unresolvable, RecursionError) as error:
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
    """Write a call as an action."""
    return f"{name} {json.dumps(dict(arguments), ensure_ascii=False)}"


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
        if entry.name in made or re.search(r"\s", entry.name):
            raise SpearError(f"the tool name {entry.name!r} is taken, or has white space in it: see answer_tool.")
        try:
            jsonschema.Draft202012Validator.check_schema(dict(entry.schema))
        except jsonschema.SchemaError as error:
            raise SpearError(f"the schema of the tool {entry.name!r} is invalid: {error.message}") from error
        made[entry.name] = McpTool(_take(entry), re.compile(".+"), entry=entry)
    return tuple(made.values())


def _take(entry: ToolEntry) -> Any:
    """Make a function with the tool's signature."""

    def take(**arguments: Any) -> str:
        return write_action(entry.name, arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [name for name in entry.schema.get("properties", {}) if name.isidentifier()]
    take.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return take
