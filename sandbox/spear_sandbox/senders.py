"""Where requests come from."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

__all__ = ["find_stranger", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_stranger(headers: Mapping[str, str], local: bool) -> str | None:
    """Why a request comes from where it should not; None for one that does not.

    A browser lets every page speak to this machine: as another site, which it says, or under a name that its owner has
    pointed here.

    Args:
        headers: of the request, in small letters.
        local: the service listens on the loopback interface.
    """
    origin = headers.get("origin")
    try:
        host = urlsplit(f"//{headers.get('host', '')}")
        foreign = origin is not None and urlsplit(origin).netloc != host.netloc
        here = is_loopback(host.hostname or "")
    except ValueError:  # brackets that hold no address
        foreign = here = False
    if foreign:
        return "pages of other sites may not speak to this service."
    if local and not here:
        return "this service is for this machine alone: ask it under 127.0.0.1 or localhost, or start it with --host."
    return None
