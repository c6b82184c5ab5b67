"""Moves as calls of a tool."""

from __future__ import annotations

from typing import Annotated, Literal

from spear_envs.core.tools import Tool, make_tool

Direction = Literal["up", "down", "left", "right"]
_WORD = "up|down|left|right"


@make_tool(f"(?P<direction>{_WORD})")
def move(direction: Annotated[Direction, "Where to."]) -> str:
    """Moves you one cell, pushing the box that stands there, and returns the board."""
    return direction


def move_often(directions: Annotated[list[Direction], "Where to, one after the other."]) -> str:
    """Moves you cell by cell, pushing boxes that stand there, and returns the board."""
    return ", ".join(directions)


move_often.__name__ = "move"
_MOVE_OFTEN = make_tool(f"(?P<directions>(?:{_WORD})(?:, (?:{_WORD}))*)")(move_often)


def find_tools(moves_per_turn: int) -> tuple[Tool, ...]:
    """Return the tools of an environment with so many moves per turn."""
    return (move if moves_per_turn == 1 else _MOVE_OFTEN,)
