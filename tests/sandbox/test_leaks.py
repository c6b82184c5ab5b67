"""What many mixed runs leave behind: nothing."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.sandbox import measure_leaks
from sandbox.blocking import BlockingExecutor
from sandbox.local import LocalExecutor


async def play(runs: int) -> list[str]:
    executor = LocalExecutor("namespaces", max_running=6)
    await executor.start()
    try:
        return [f"{figure.name}: {figure.value}" for figure in await measure_leaks(executor, runs) if not figure.held]
    finally:
        await executor.close()


def test_a_few_hundred_runs(pool: BlockingExecutor) -> None:
    assert asyncio.run(play(300)) == []


@pytest.mark.slow
def test_ten_thousand_runs(pool: BlockingExecutor) -> None:
    assert asyncio.run(play(10_000)) == []
