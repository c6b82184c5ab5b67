"""What many mixed runs leave behind: nothing."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks._figures import find_bar
from benchmarks.sandbox import BARS, measure_leaks
from spear_sandbox.blocking import BlockingExecutor
from spear_sandbox.local import LocalExecutor


async def play(runs: int) -> list[str]:
    executor = LocalExecutor("namespaces", max_running=6)
    await executor.start()
    try:
        bars = [bar for bar in BARS if bar.at_most is not None]
        pairs = [(figure, find_bar(figure, bars)) for figure in await measure_leaks(executor, runs)]
        assert sum(bar is not None for _, bar in pairs) == 6
        return [f"{figure.name}: {figure.value}" for figure, bar in pairs if bar and not bar.holds(figure.value)]
    finally:
        await executor.close()


@pytest.mark.slow
def test_a_few_hundred_runs(pool: BlockingExecutor) -> None:
    assert asyncio.run(play(300)) == []


@pytest.mark.nightly
def test_ten_thousand_runs(pool: BlockingExecutor) -> None:
    assert asyncio.run(play(10_000)) == []
