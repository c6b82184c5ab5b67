"""Reading what a server says of an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

__all__ = ["read_detail"]

SHOWN_CHARACTERS = 200


def read_detail(response: httpx.Response) -> str:
    """The sentence of an error, on one line, or the beginning of whatever came."""
    try:
        detail = json.loads(response.content)["detail"]
    except (ValueError, RecursionError, KeyError, TypeError):
        detail = response.text
    return " ".join(str(detail).split())[:SHOWN_CHARACTERS]
