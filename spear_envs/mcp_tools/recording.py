"""Record calls of a server's tools, and replay them without the server."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.core.tasks import canonical_json
from spear_envs.mcp_tools.client import CallResult, McpFaultKind, ToolEntry


class Recording:
    """JSON lines: the tools in the first, then a call in each, identified by its task and the calls before it.

    Args:
        path: of the file; :meth:`add_tools` begins a new one.

    Raises:
        SpearError: the file is not a recording.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tools: list[ToolEntry] | None = None
        self._calls: dict[str, CallResult] = {}
        self._lock = threading.Lock()
        if not self.path.exists():
            return
        try:
            first, *rest = self.path.read_text(encoding="utf-8").splitlines()
            self.tools = [ToolEntry(**entry) for entry in json.loads(first)["tools"]]
            for line in rest:
                call = json.loads(line)
                self._calls[call["key"]] = CallResult(**call["result"])
        except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
            told = f"is not a recording of an MCP server's calls ({type(error).__name__}: {error}): record it again."
            raise SpearError(f"{self.path} {told}") from error

    def add_tools(self, tools: Sequence[ToolEntry]) -> None:
        """Begin a recording.

        Raises:
            SpearError: it exists, with other tools.
        """
        if self.tools is None:
            self.tools = list(tools)
            self._write({"tools": [asdict(entry) for entry in tools]})
        elif self.tools != list(tools):
            raise SpearError(f"{self.path} was recorded with other tools: name another file.")

    def add(self, task: str, calls: Sequence[Mapping[str, Any]], result: CallResult) -> None:
        """Record the result of the last of an episode's calls."""
        key = _find_key(task, calls)
        if key not in self._calls:
            self._calls[key] = result
            name, arguments = calls[-1]["tool"], calls[-1]["arguments"]
            self._write({"key": key, "task": task, "name": name, "arguments": arguments, "result": asdict(result)})

    def find(self, task: str, calls: Sequence[Mapping[str, Any]]) -> CallResult:
        """Find the result of the last of an episode's calls.

        Raises:
            EnvFault: ``mcp_not_recorded``.
        """
        found = self._calls.get(_find_key(task, calls))
        if found is None:
            told = f"{self.path} lacks the call {calls[-1]['tool']} after these {len(calls) - 1} of {task}"
            raise EnvFault(McpFaultKind.NOT_RECORDED.value, told)
        return found

    def _write(self, value: Any) -> None:
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")


def _find_key(task: str, calls: Sequence[Mapping[str, Any]]) -> str:
    played = [[call["tool"], call["arguments"]] for call in calls]
    return hashlib.sha256(canonical_json([task, played]).encode()).hexdigest()[:32]
