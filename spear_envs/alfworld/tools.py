"""Commands as tool calls."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated

from spear_envs.alfworld.wording import WORDING_2_1_2, Wording
from spear_envs.core.tools import Tool, make_tool

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
