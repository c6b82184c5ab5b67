"""From a response to a command: the form of the response, other ways to write a command, and commands as tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Annotated

from spear_envs.alfworld.grammar import WORDING_2_1_2, Wording
from spear_envs.core.parsing import (
    MAX_RESPONSE_LENGTH,
    ParsedResponse,
    PlainParser,
    TagParser,
    cut_native_thought,
)
from spear_envs.core.tools import Tool, make_tool


class Aliases(str, Enum):
    """Which other ways to write commands are understood."""

    NONE = "none"
    """None, as in TextWorld, so that numbers compare."""
    PAPER = "paper"
    """Those of the paper's list of actions and of other releases; also capitals and repeated blanks."""


_PUT = re.compile(r" (?:in/on|into|in|on) ")
_MOVE = re.compile(r" to ")


def rewrite_command(command: str, wording: Wording, is_admissible: Callable[[str], bool]) -> str:
    """Rewrite ``command`` to the admissible one that it means; return it unchanged if there is none.

    Understood are ``put O in/on R``, ``put O in R``, ``put O on R``, ``put O into R`` and ``move O to R``, whichever
    the game uses; ``goto R``; ``toggle O``, ``toggle O R`` and ``turn on O`` for ``use O``; capitals and
    repeated blanks. A command is only rewritten into an admissible one.
    """
    if is_admissible(command):
        return command
    plain = " ".join(command.lower().split())
    if len(plain) > _LONGEST:
        return command
    for candidate in _list_meanings(plain, wording, is_admissible):
        if is_admissible(candidate):
            return candidate
    return command


_LONGEST = 500
"""Characters of a command that has other meanings: no game has a longer one, and each meaning takes as long as it."""


def _list_meanings(plain: str, wording: Wording, is_admissible: Callable[[str], bool]) -> Iterator[str]:
    yield plain
    verb, _, rest = plain.partition(" ")
    if verb in ("put", "move"):
        begin, middle = wording.put
        for found in (_PUT if verb == "put" else _MOVE).finditer(rest):
            yield f"{begin}{rest[: found.start()]}{middle}{rest[found.end() :]}"
    elif verb == "goto":
        yield f"go to {rest}"
    elif plain.startswith("turn on "):
        yield f"use {plain.removeprefix('turn on ')}"
    elif verb == "toggle":
        yield f"use {rest}"
        words = rest.split(" ")
        for cut in range(1, len(words)):
            # The receptacle must be here, which is when it can be examined.
            if is_admissible(f"examine {' '.join(words[cut:])}"):
                yield f"use {' '.join(words[:cut])}"


_OPEN, _CLOSE = "<action>", "</action>"
_STRICT = TagParser()


@dataclass(frozen=True)
class CommandParser:
    """``<think>…</think><action>…</action>``; the command is played in lower case, like all commands.

    Only the strict form earns the format reward. A command between tags is played even if the rest of the form is
    wrong, since its meaning is clear.
    """

    hint: str = _STRICT.hint

    def parse(self, response: str) -> ParsedResponse:
        """Read a response; never raises."""
        parsed = _STRICT.parse(response)
        if parsed.action is not None:
            return parsed._replace(action=parsed.action.lower())
        if not _is_readable(response):
            return parsed
        native, written = cut_native_thought(response)  # an action rehearsed in it is none
        _, opened, rest = written.partition(_OPEN)
        command, closed, _ = rest.partition(_CLOSE)
        command = command.strip().lower()
        if not (opened and closed and command):
            return parsed
        return ParsedResponse(command, False, parsed.problem, native=native)

    def respond(self, action: str, think: str = "") -> str:
        """Return thoughts and action between their tags."""
        return _STRICT.respond(action, think)


class VerbatimParser(PlainParser):
    """The text is the command, even if empty: like any unknown command, that does nothing."""

    def parse(self, response: str) -> ParsedResponse:
        """Take the response verbatim; only one that is too long or contains NUL is malformed."""
        if not _is_readable(response):
            return super().parse(response)
        native, rest = cut_native_thought(response, "")
        return ParsedResponse(rest if native is None else rest.strip(), True, "", native or "", native=native)


def _is_readable(response: str) -> bool:
    return len(response) <= MAX_RESPONSE_LENGTH and "\0" not in response


Object = Annotated[str, "Name and number of an object, such as apple 1."]
Receptacle = Annotated[str, "Name and number of a receptacle, such as fridge 1."]


@make_tool("go to (?P<receptacle>.+)")
def go_to(receptacle: Receptacle) -> str:
    """Walks to a receptacle and returns what can be seen there."""
    return f"go to {receptacle}"


@make_tool("open (?P<receptacle>.+)")
def open(receptacle: Receptacle) -> str:
    """Opens a receptacle before you and returns what is in it."""
    return f"open {receptacle}"


@make_tool("close (?P<receptacle>.+)")
def close(receptacle: Receptacle) -> str:
    """Closes a receptacle before you."""
    return f"close {receptacle}"


@make_tool("take (?P<object>.+) from (?P<receptacle>.+)")
def take(object: Object, receptacle: Receptacle) -> str:
    """Takes an object from a receptacle before you; you can carry one."""
    return f"take {object} from {receptacle}"


@make_tool("clean (?P<object>.+) with (?P<receptacle>.+)")
def clean(object: Object, receptacle: Receptacle) -> str:
    """Cleans the object that you carry with a sink basin before you."""
    return f"clean {object} with {receptacle}"


@make_tool("heat (?P<object>.+) with (?P<receptacle>.+)")
def heat(object: Object, receptacle: Receptacle) -> str:
    """Heats the object that you carry with a microwave before you."""
    return f"heat {object} with {receptacle}"


@make_tool("cool (?P<object>.+) with (?P<receptacle>.+)")
def cool(object: Object, receptacle: Receptacle) -> str:
    """Cools the object that you carry with a fridge before you."""
    return f"cool {object} with {receptacle}"


@make_tool("slice (?P<object>.+) with (?P<knife>.+)")
def slice(object: Object, knife: Annotated[str, "Name and number of the knife that you carry."]) -> str:
    """Slices an object before you."""
    return f"slice {object} with {knife}"


@make_tool("use (?P<lamp>.+)")
def use(lamp: Annotated[str, "Name and number of a lamp, such as desklamp 1."]) -> str:
    """Switches a lamp before you on."""
    return f"use {lamp}"


@make_tool("examine (?P<thing>.+)")
def examine(thing: Annotated[str, "Name and number of a receptacle before you, or of the object you carry."]) -> str:
    """Returns what is in a receptacle, or how an object is."""
    return f"examine {thing}"


@make_tool("look")
def look() -> str:
    """Returns what is before you."""
    return "look"


@make_tool("inventory")
def inventory() -> str:
    """Returns what you carry."""
    return "inventory"


@make_tool("help")
def help() -> str:
    """Returns the list of commands."""
    return "help"


@lru_cache(maxsize=8)
def find_tools(wording: Wording) -> tuple[Tool, ...]:
    """Make the tools of a game with this wording."""
    begin, middle = wording.put

    def move(object: Object, receptacle: Receptacle) -> str:
        """Puts the object that you carry in or on a receptacle before you."""
        return f"{begin}{object}{middle}{receptacle}"

    form = f"{re.escape(begin)}(?P<object>.+){re.escape(middle)}(?P<receptacle>.+)"
    tools = (go_to, open, close, take, make_tool(form)(move), clean, heat, cool, slice, use, examine, look, inventory)
    return tools if wording.help is None else (*tools, help)


TOOLS = find_tools(WORDING_2_1_2)
"""Commands as functions, with the newest wording."""
