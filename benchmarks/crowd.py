"""4,096 episodes at a time in one process: delay and memory.

Eight engines with the latencies that ``ahead`` assumes of them decode in real time: each request takes its own number
of decoding steps, and a step takes longer the more requests share it. Prompts, environments, the episode loop and rows
are real, as in ``loop``. A training deals as many episodes to eight workers, so that one here has the work of eight.
Times need a machine on which nothing else runs; memory does not.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil

from benchmarks.ahead import Setup
from benchmarks.loop import LOADS, Instant, Load, make_rows, open_load
from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_agents.engines.base import Finish, Generation, Sampling, StopFinder

BARS = (Bar("memory of an episode", "KiB", at_most=512.0),)
EPISODES = 4096
ENGINES = 8
TICK_S = 0.002
"""Between two looks at the engines; a decoding step takes seven times as long at least."""


class Paced:
    """Engines that answer when as many decoding steps have passed as a response has tokens.

    Attributes:
        late: seconds between the end of each response and when its episode went on.
    """

    def __init__(self, tokenizer: Any, responses: Sequence[tuple[int, ...]], setup: Setup) -> None:
        self._tokenizer, self._responses, self._setup = tokenizer, responses, setup
        self._rng, self._numbers = np.random.default_rng(0), itertools.count()
        self._made = [0.0] * ENGINES
        self._decoding: list[list[tuple[float, int, asyncio.Future[float]]]] = [[] for _ in range(ENGINES)]
        self._clock: asyncio.Task[None] | None = None
        self.late: list[float] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[Any] = ()
    ) -> Generation:
        """A response of the stage, after the time that one of random length takes on the engine with most room."""
        loop = asyncio.get_running_loop()
        if self._clock is None:
            self._clock = loop.create_task(self._run())
        number, done = next(self._numbers), loop.create_future()
        engine = min(range(ENGINES), key=lambda index: len(self._decoding[index]))
        tokens = self._rng.lognormal(np.log(self._setup.tokens), self._setup.spread)
        heapq.heappush(self._decoding[engine], (self._made[engine] + tokens, number, done))
        due = await done
        self.late.append(time.perf_counter() - due)
        ids = self._responses[number % len(self._responses)]
        list(prompt_ids)
        StopFinder(self._tokenizer, sampling.stop_strings).is_reached(ids)
        return Generation(ids, (-0.5,) * len(ids), Finish.STOP)

    async def _run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            for engine, decoding in enumerate(self._decoding):
                pace = self._setup.decode_s + self._setup.decode_each_s * len(decoding)
                self._made[engine] += (now - last) / pace
                while decoding and decoding[0][0] <= self._made[engine]:
                    end, _, done = heapq.heappop(decoding)
                    done.set_result(now - (self._made[engine] - end) * pace)
            last = now


def measure_crowd(load: Load, episodes: int) -> Iterator[Figure]:
    """Figures of a load; episodes have as many turns as its environment's keywords say."""
    stage, process = open_load(load, 64), psutil.Process()
    before = process.memory_info().rss
    stage.play(Instant(stage.tokenizer, stage.responses[::-1]), episodes, episodes)  # makes the environments
    engine = Paced(stage.tokenizer, stage.responses, Setup())
    start, cpu = time.perf_counter(), time.process_time()
    trajectories = stage.play(engine, episodes, episodes)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    made = process.memory_info().rss - before
    turns = sum(len(episode.turns) for episode in trajectories)
    assert len(engine.late) == turns and len(stage.idle) == episodes
    make_rows(trajectories)
    rows = process.memory_info().rss - before - made
    for one in stage.idle:
        one.close()
    note = f"{load.name}, {episodes:,} episodes, {turns:,} turns"
    yield Figure("turns", turns / wall, "a second", note=f"{note}; {cpu / wall:.0%} of a core")
    yield Figure("a response waits, median", 1e3 * float(np.median(engine.late)), "ms", note=note)
    yield Figure("a response waits, 99 of 100", 1e3 * float(np.percentile(engine.late, 99)), "ms", note=note)
    yield Figure("memory of an episode", made / episodes / 1024, "KiB", note="environment, turns and their tokens")
    yield Figure("memory of a row", max(0, rows) / turns / 1024, "KiB", note="its columns, until the queue has them")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    turns = 4 if options.size is Size.QUICK else 25
    yield from measure_crowd(Load(**{**vars(LOADS[0]), "kwargs": {"max_turns": turns}}), EPISODES)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    packages = ("tokenizers", "transformers", "numpy")
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, packages=packages)


if __name__ == "__main__":
    raise SystemExit(main())
