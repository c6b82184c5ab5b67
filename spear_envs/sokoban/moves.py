"""Moves: reading them from the text of an action, and as calls of a tool."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from spear_envs.core.parsing import ParsedResponse, ResponseParser
from spear_envs.core.tools import Tool, make_tool
from spear_envs.sokoban.engine import ACTIONS, STILL
from spear_envs.sokoban.levels import WORDS

_SEPARATOR = re.compile(r"\|\||[,\s]")
_LONGEST_PIECE = 16  # characters of a move with its separators; longer texts are refused unread
_EXCERPT = 24
_REMEMBERED = 128  # longest response to remember, in characters


class RememberingParser:
    """A parser that caches short responses: a tiny model or a script repeats the same few."""

    def __init__(self, parser: ResponseParser) -> None:
        self._parser = parser
        self._remember = lru_cache(maxsize=256)(parser.parse)

    @property
    def hint(self) -> str:
        """As the parser's."""
        return self._parser.hint

    def parse(self, response: str) -> ParsedResponse:
        """As the parser's."""
        return self._remember(response) if len(response) <= _REMEMBERED else self._parser.parse(response)

    def respond(self, action: str, think: str = "") -> str:
        """As the parser's."""
        return self._parser.respond(action, think)


class Moves(NamedTuple):
    """The moves of an action."""

    codes: tuple[int, ...]
    """Moves to play, in order; empty if the text is not understood."""
    words: str
    """The moves in their canonical form, joined by ", "."""
    problem: str
    """Why the text is not understood; empty if it is."""


_SINGLE = {word: Moves((code,), word, "") for word, code in ACTIONS.items()}


def read_moves(text: str, limit: int = 1) -> Moves:
    """Read the moves of an action.

    Each must be one of up, down, left, right, still, in any case; a full stop may follow the last. Up to ``limit``
    moves are joined by commas, blanks or ``||``.
    """
    found = _SINGLE.get(text)
    if found is not None:
        return found
    if len(text) > _LONGEST_PIECE * limit:
        return Moves((), "", f"{text[:_EXCERPT]!a}... is too long for an action. {_explain(limit)}")
    words = [word for word in _SEPARATOR.split(text.strip().lower().removesuffix(".")) if word]
    for word in words:
        if word not in ACTIONS:
            return Moves((), "", f"{word[:_EXCERPT]!a} is not a move. {_explain(limit)}")
    if not words or len(words) > limit:
        return Moves((), "", f"The action holds {len(words)} moves. {_explain(limit)}")
    return Moves(tuple([ACTIONS[word] for word in words]), ", ".join(words), "")


def _explain(limit: int) -> str:
    words = "up, down, left, right"
    if limit == 1:
        return f"Nothing moved. Answer with one of: {words}."
    return f"Nothing moved. Answer with 1 to {limit} of: {words}, joined by commas."


def read_like_peer(text: str) -> Moves:
    """Return the move that verl-agent plays: the first of up, down, left, right, still in the lower-case text.

    "I should not go up, but left" therefore plays up. Without any of them the player stands still.
    """
    lowered = text.lower()
    for word in (*WORDS, "still"):
        if word in lowered:
            return _SINGLE[word]
    return Moves((STILL,), "", "No move was found; the player stood still.")


def find_peer_action(response: str) -> str:
    """Return the action that verl-agent reads from a response: the text between the first ``<action>`` and the first
    ``</action>``, in lower case; empty without them."""
    lowered = response.lower()
    begin, end = lowered.find("<action>"), lowered.find("</action>")
    return lowered[begin + len("<action>") : end] if begin >= 0 and end >= 0 else ""


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
