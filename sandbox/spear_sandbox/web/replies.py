"""Reading what a server says of an error."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

__all__ = ["read_detail"]

SHOWN_CHARACTERS = 200


def read_detail(response: httpx.Response) -> str:
    """The sentence of an error, on one line, or the beginning of whatever came.

    FastAPI's list of what it misses in a request becomes ``body.queries: Field required``.
    """
    try:
        detail = json.loads(response.content)["detail"]
    except (ValueError, RecursionError, KeyError, TypeError):
        detail = response.text
    with contextlib.suppress(KeyError, TypeError):
        detail = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in detail)
    return " ".join(str(detail).split())[:SHOWN_CHARACTERS]
