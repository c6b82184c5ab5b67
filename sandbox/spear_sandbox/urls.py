"""Addresses of sandbox services: which form they have, and whose turn it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from urllib.parse import urlsplit

__all__ = ["Rotation", "read_urls"]

EXAMPLE = "write, for instance, http://127.0.0.1:8080."


class Rotation:
    """Servers taken in turn; one that failed is asked last for a while. Belongs to one event loop.

    Args:
        urls: at least one.
        first: index of the one to begin with.
        rest_s: how long a server that failed is left out.
    """

    def __init__(self, urls: Sequence[str], first: int = 0, rest_s: float = 2.0) -> None:
        self._urls = list(urls)
        self._turns = itertools.count(first)
        self._rest_s = rest_s
        self._free_from = dict.fromkeys(self._urls, 0.0)

    def choose(self, now: float) -> str:
        """The next server that has not failed lately; if all have, the one that failed first."""
        turn = next(self._turns)
        order = [self._urls[(turn + step) % len(self._urls)] for step in range(len(self._urls))]
        return min(order, key=lambda url: max(self._free_from[url], now))

    def note_failure(self, url: str, now: float) -> None:
        """Leave a server out for a while."""
        self._free_from[url] = now + self._rest_s


def read_urls(urls: str | Sequence[str]) -> tuple[str, ...]:
    """Base URLs, or those of ``/run_code`` itself, without a slash at the end and each once.

    Raises:
        ValueError: there is none, or one is no HTTP address.
    """
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise ValueError(f"no address of a sandbox was given: {EXAMPLE}")
    return tuple(dict.fromkeys(_read_url(str(url)) for url in given))


def _read_url(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address of a sandbox: {EXAMPLE}")
    path = parts.path.rstrip("/").removesuffix("/run_code").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"
