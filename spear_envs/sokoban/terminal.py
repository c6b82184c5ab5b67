"""Boards for the terminal, in colour."""

from __future__ import annotations

_LOOKS = {
    "#": "\x1b[48;5;60m  ",
    "_": "\x1b[48;5;230m  ",
    "O": "\x1b[48;5;224;38;5;160m<>",
    "\u221a": "\x1b[48;5;34;38;5;231;1m\u221a ",
    "X": "\x1b[48;5;137;38;5;94;1m[]",
    "P": "\x1b[48;5;230;38;5;26;1m@ ",
    "S": "\x1b[48;5;224;38;5;26;1m@ ",
}
_RESET = "\x1b[0m"


def paint_board(text: str) -> str:
    """Return a board as coloured cells, two columns each, with ANSI escape sequences."""
    return "\n".join("".join(_LOOKS[symbol] + _RESET for symbol in row) for row in text.split("\n"))
