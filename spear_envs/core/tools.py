"""Actions as calls of tools, for models and trainers that act by calling functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spear_envs.core.parsing import ParsedResponse, ResponseParser

__all__ = ["ACT", "CallParser", "Tool"]


@dataclass(frozen=True)
class Tool:
    """A kind of action as a function with one text for its argument."""

    name: str
    """Of the function: an identifier."""
    description: str
    """What it does, in a sentence."""
    parameter: str
    """Name of the argument: an identifier."""
    meaning: str
    """What the argument is, in a sentence."""
    before: str = ""
    after: str = ""
    """What stands around the argument in the plain form of the action."""

    def write(self, argument: str) -> str:
        """The action in plain form."""
        return f"{self.before}{argument}{self.after}"

    def schema(self) -> Mapping[str, Any]:
        """The function as chat templates and servers of models take it (JSON schema, OpenAI's form)."""
        argument = {"type": "string", "description": self.meaning}
        parameters = {"type": "object", "properties": {self.parameter: argument}, "required": [self.parameter]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


ACT = Tool("act", "Takes one action and returns what comes of it.", "action", "The action, and nothing else.")
"""The one tool of an environment whose actions are all of one kind."""


@dataclass(frozen=True)
class CallParser:
    """Another parser, whose prompts ask for a call instead of the form of a response."""

    tools: Sequence[Tool]
    inner: ResponseParser

    @property
    def hint(self) -> str:
        """Asks for one call."""
        names = " or ".join(tool.name for tool in self.tools)
        return f"Call {names}, one call at a time; text alone does nothing."

    def parse(self, response: str) -> ParsedResponse:
        """As the other parser."""
        return self.inner.parse(response)

    def respond(self, action: str, think: str = "") -> str:
        """As the other parser."""
        return self.inner.respond(action, think)
