"""Reading a server's error messages and its ``Retry-After``."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx


SHOWN_CHARACTERS = 200
LONGEST_BY_DATE_S = 60.0
"""The longest wait for a ``Retry-After`` with a date: its clock, or ours, may be wrong by hours."""


def read_detail(response: httpx.Response) -> str:
    """Read the message of an error, on one line, or the beginning of whatever arrived.

    FastAPI's list of validation errors becomes ``body.queries: Field required``.
    """
    try:
        detail = json.loads(response.content)["detail"]
    except (ValueError, RecursionError, KeyError, TypeError):
        detail = response.text
    with contextlib.suppress(KeyError, TypeError):
        detail = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in detail)
    return " ".join(str(detail).split())[:SHOWN_CHARACTERS]


def read_retry_after(headers: Mapping[str, str], longest_by_date_s: float = LONGEST_BY_DATE_S) -> float | None:
    """Seconds to wait, from either form of the header; None if it is missing or malformed."""
    value = headers.get("retry-after", "").strip()
    with contextlib.suppress(ValueError):
        return max(0.0, float(value)) if math.isfinite(float(value)) else None
    try:
        return min(max(0.0, parsedate_to_datetime(value).timestamp() - time()), longest_by_date_s)
    except (ValueError, TypeError, IndexError):
        return None
