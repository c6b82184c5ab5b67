"""The error that a user can fix, its words for what pydantic refuses, and text of others made safe to show."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""What moves the cursor, clears the screen, sets the title or clipboard, or turns the direction of writing."""
_SECRET = re.compile("(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?$", re.IGNORECASE)
_SHORTEST_SECRET = 8
_secrets: dict[str, str] = {}


class SpearError(Exception):
    """Base of all errors that a user can fix. The message is one line that names the fix."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows instead of the traceback."""
        return [f"{type(self).__name__}: {self}"]


def explain_invalid(error: Any, whole: str = "the body") -> str:
    """Describe the first fault of pydantic's ``ValidationError``: where it is, what is allowed, and the value.

    Args:
        whole: what was validated, for a fault of no field.
    """
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or whole
    if first["type"] == "missing":
        return f"{where} is missing."
    message, shown = first["msg"].removeprefix("Value error, ").rstrip("."), repr(first["input"])
    near = suggest_name(str(first["input"]), re.findall("'(.*?)'", message)) if first["type"] == "enum" else ""
    value = "" if isinstance(first["input"], dict) else f" (it is {shown if len(shown) <= 60 else shown[:60] + '…'})"
    return f"{where}: {message[:1].lower()}{message[1:]}{value}.{near}"


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name nearest to ``name``, or an empty string if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def show_text(text: str) -> str:
    r"""Make text of others safe for a terminal or a log: controls become ``\u001b``, keys the names of their variables.

    Line ends and tabs stay. A key is what :func:`hide_secret` has had, or a variable of the environment whose name says
    so.
    """
    if len(text) >= _SHORTEST_SECRET:  # consoles ask for each piece of a line
        named = {os.environ[name]: name for name in os.environ if _names_secret(name)}
        for value, name in {**named, **_secrets}.items():
            if len(value) >= _SHORTEST_SECRET:
                text = text.replace(value, f"[{name}]")
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # valid in JSON too


@lru_cache(maxsize=1024)
def _names_secret(variable: str) -> bool:
    return _SECRET.search(variable) is not None


def show_entry(text: str) -> str:
    """Make text safe as one entry among others: as :func:`show_text`, and further lines are indented."""
    return show_text(text).replace("\n", "\n  ")


def hide_secret(value: str, name: str) -> None:
    """Have :func:`show_text` write ``[name]`` instead of this value."""
    _secrets[value] = name


class _Record(logging.LogRecord):
    """An entry of a log, safe in every handler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = show_entry(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        return show_entry(super().getMessage())


def guard_logs() -> None:
    """Pass all logs of this process through :func:`show_entry`, since they quote what strangers wrote."""
    logging.setLogRecordFactory(_Record)
