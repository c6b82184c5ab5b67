"""Actions as tool calls with typed arguments, for models and trainers that call functions."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.core.parsing import ParsedResponse, ResponseParser

_TYPES: Mapping[Any, tuple[str, str]] = MappingProxyType(
    {str: ("string", "a text"), int: ("integer", "a whole number"), bool: ("boolean", "true or false")}
)
"""Type in JSON and in words."""
_LIST_BREAK = ", "
_HEADING = re.compile(r"\b(Args|Returns|Raises|choices):", re.IGNORECASE)
"""What frameworks take for parts of a docstring; a description that others wrote may have it."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


class CallError(SpearError):
    """A call that cannot be played; the message is one sentence for the model."""


@dataclass(frozen=True)
class Tool:
    """A kind of action as a function, made by :func:`make_tool`.

    Args:
        function: writes the action in plain form. Its name, docstring and annotations are the tool's.
        form: matches the actions, with a named group for each argument.
    """

    function: Callable[..., str]
    form: re.Pattern[str]

    @property
    def name(self) -> str:
        """Return the name of the function: an identifier."""
        return self.function.__name__

    @property
    def description(self) -> str:
        """Return a sentence about what the tool does."""
        return (self.function.__doc__ or "").strip()

    @cached_property
    def types(self) -> Mapping[str, Any]:
        """Return the type of each argument: a plain one, a ``Literal`` of texts, or a list of either."""
        hints = get_type_hints(self.function)
        return {name: hints[name] for name in self.meanings}

    @cached_property
    def meanings(self) -> Mapping[str, str]:
        """Return a sentence about each argument."""
        hints = get_type_hints(self.function, include_extras=True)
        return {name: hints[name].__metadata__[0] for name in inspect.signature(self.function).parameters}

    @property
    def required(self) -> Sequence[str]:
        """Return the arguments that a call must have: all of them."""
        return tuple(self.types)

    def find_default(self, name: str) -> Any:
        """Return what an argument is that a call may leave out."""
        return None

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of the function in OpenAI's form, for chat templates and servers of models."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        described = {
            name: {**_write_schema(kind), "description": self.meanings[name]} for name, kind in self.types.items()
        }
        parameters: dict[str, Any] = {"type": "object", "properties": described}
        return {**parameters, "required": list(described)} if described else parameters

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Write the action in plain form; raises as :meth:`check`."""
        self.check(arguments)
        return self.function(**arguments)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments.

        Raises:
            CallError: a name, type or value is wrong.
        """
        for name in arguments:
            if name not in self.types:
                known = ", ".join(self.types) or "none"
                raise CallError(
                    f"{self.name} takes no argument {name!r}: it takes {known}.{suggest_name(str(name), self.types)}"
                )
        for name, kind in self.types.items():
            if name not in arguments:
                raise CallError(f"{self.name} needs the argument {name!r}: {_describe(kind)}.")
            if not _fits(arguments[name], kind):
                shown = json.dumps(arguments[name], ensure_ascii=False, default=repr)
                shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
                raise CallError(f"{name!r} of {self.name} is {_describe(kind)}, not {shown}.")

    def read(self, action: str) -> dict[str, Any] | None:
        """Read the arguments of an action in plain form; None if it is not of this tool."""
        found = self.form.fullmatch(action)
        if found is None:
            return None
        return {name: _read_value(text, self.types[name]) for name, text in found.groupdict().items()}

    def dress(self, function: _Function, *before: str) -> _Function:
        """Give a function the tool's name, signature and docstring, from which frameworks make their schemas.

        Args:
            before: parameters in front of the tool's, such as ``self``.

        Raises:
            SpearError: a call must have an argument whose name Python does not allow.
        """
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        parameters = [inspect.Parameter(name, kind) for name in before]
        types: dict[str, Any] = {}
        for name, hint in self.types.items():
            needed = name in self.required
            if name.isidentifier() and not iskeyword(name) and name not in before:
                default = empty if needed else self.find_default(name)
                parameters.append(inspect.Parameter(name, kind, annotation=hint, default=default))
                types[name] = hint
            elif needed:
                raise SpearError(
                    f"the tool {self.name} cannot be a function: Python does not allow its argument {name!r}."
                )
        meanings = {name: _HEADING.sub(r"\1 -", " ".join(self.meanings[name].split())) for name in types}
        lines = [f"    {name}: {meaning}\n" for name, meaning in meanings.items()]
        about = _HEADING.sub(r"\1 -", self.description or self.name)
        dressed: Any = function
        dressed.__name__ = dressed.__qualname__ = self.name
        dressed.__doc__ = "".join([about, *(["\n\nArgs:\n", *lines] if lines else [])])
        dressed.__annotations__ = {**types, "return": str}
        dressed.__signature__ = inspect.Signature(parameters, return_annotation=str)
        return function


def make_tool(form: str) -> Callable[[Callable[..., str]], Tool]:
    """Make a tool of a function that writes an action.

    Each parameter is ``Annotated[type, "What it is."]``, where the type is str, int, bool, a ``Literal`` of texts or a
    list of one of these; the docstring is a sentence for the model.

    Args:
        form: regular expression of the function's results, with a named group for each parameter; lists are joined by
            ``", "``.

    Raises:
        TypeError: an annotation is not one of these, or form and parameters do not fit.
    """

    def make(function: Callable[..., str]) -> Tool:
        tool = Tool(function, re.compile(form, re.DOTALL))
        try:
            written = [_write_schema(kind) for kind in tool.types.values()]
        except (AttributeError, KeyError) as error:
            raise TypeError(f'tool {tool.name}: annotate each parameter Annotated[type, "What it is."]') from error
        if len(written) != len(tool.form.groupindex) or set(tool.form.groupindex) != set(tool.types):
            raise TypeError(f"tool {tool.name}: its form needs a group for each of {', '.join(tool.types)}")
        return tool

    return make


def write_call(tools: Sequence[Tool], name: str, arguments: Mapping[str, Any]) -> str:
    """Write the action of a call in plain form.

    Raises:
        CallError: the tool is unknown, or its arguments are wrong.
    """
    known = {tool.name: tool for tool in tools}
    if name not in known:
        raise CallError(f"There is no tool {name!r}.{suggest_name(name, known)} There is: {', '.join(known)}.")
    return known[name].write(arguments)


def show_call(tools: Sequence[Tool], action: str) -> str:
    """Write an action as the call that plays it, such as ``go_to(receptacle="desk 1")``; keep it if no tool has it."""
    for tool in tools:
        arguments = tool.read(action)
        if arguments is not None:
            shown = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
            return f"{tool.name}({', '.join(shown)})"
    return action


def _write_schema(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is list:
        return {"type": "array", "items": _write_schema(get_args(kind)[0])}
    if get_origin(kind) is Literal:
        return {"type": "string", "enum": list(get_args(kind))}
    return {"type": _TYPES[kind][0]}


def _describe(kind: Any) -> str:
    if get_origin(kind) is list:
        return f"a list, each item {_describe(get_args(kind)[0])}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return _TYPES[kind][1]


def _read_value(text: str, kind: Any) -> Any:
    """Return the value that was written as ``text``; the text itself if it is none of ``kind``."""
    if get_origin(kind) is list:
        return [_read_value(item, get_args(kind)[0]) for item in text.split(_LIST_BREAK)]
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return int(text) if kind is int else text
    except ValueError:
        return text


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return type(value) is kind  # True is not a number


def act(action: Annotated[str, "The action, and nothing else."]) -> str:
    """Takes one action and returns what comes of it."""
    return action


ACT = make_tool("(?P<action>.+)")(act)
"""The only tool of environments with untyped actions."""


@dataclass(frozen=True)
class CallParser:
    """Wraps a parser so that prompts ask for a call."""

    tools: Sequence[Tool]
    inner: ResponseParser

    @property
    def hint(self) -> str:
        """Asks for one call."""
        names = " or ".join(tool.name for tool in self.tools)
        return f"Call {names}, one call at a time; text alone does nothing."

    def parse(self, response: str) -> ParsedResponse:
        """See :class:`ResponseParser`."""
        return self.inner.parse(response)

    def respond(self, action: str, think: str = "") -> str:
        """See :class:`ResponseParser`."""
        return self.inner.respond(action, think)
