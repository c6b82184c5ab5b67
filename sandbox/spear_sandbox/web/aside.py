"""Heavy work beside an event loop, so that one client's does not hold up the others'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE = 64 << 10
"""Bytes or characters from which work is done beside the event loop."""
_aside = ThreadPoolExecutor(1, "large-work")
"""One thread: several would take turns with each other before the event loop gets one."""
Result = TypeVar("Result")


async def work_aside(size: int, work: Callable[[], Result]) -> Result:
    """Do this at once, or in a thread if it handles many bytes or characters."""
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_aside, work)
