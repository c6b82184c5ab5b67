"""The error that a user can fix, and its words for what pydantic refuses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any


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
