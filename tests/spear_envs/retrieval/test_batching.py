"""Many searches made into few."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.retrieval.batching import (
    CallerGoneError,
    Counts,
    DeadlineError,
    Entry,
    LoopWorker,
    OverloadedError,
    QueryBatcher,
    RetrieverError,
    WorkerThread,
    make_cache,
    plan_batches,
)
from spear_envs.retrieval.indexes import BM25Index
from spear_envs.retrieval.limits import BatchLimits
from spear_envs.retrieval.retriever import Passage
from tests.commands import wait_until
from tests.spear_envs.retrieval.service import ScriptedIndex, make_rows


class Bench:
    """A batcher over a scripted retriever."""

    def __init__(self, cache_bytes: int = 1 << 20, **limits: Any) -> None:
        self.retriever = ScriptedIndex()
        self.counts = Counts()
        self.worker = WorkerThread()
        self.batcher = QueryBatcher(
            self.retriever,
            [self.worker],
            BatchLimits(**limits),
            make_cache(cache_bytes),
            self.counts,
        )

    async def block(self) -> asyncio.Task[Any]:
        """Begin a search that stays on the worker until the gate is opened."""
        self.retriever.gate.clear()
        self.retriever.entered.clear()
        task = asyncio.create_task(self.batcher.search(["999"], 1))
        await asyncio.to_thread(self.retriever.entered.wait, 10)
        return task

    def begin(self, *queries: str, k: int = 3) -> asyncio.Task[Any]:
        return asyncio.create_task(self.batcher.search(queries, k))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.retriever.gate.set()
    made.worker.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def rows_of(hits: Sequence[Passage]) -> list[int]:
    return [int(json.loads(hit.raw)["id"]) for hit in hits]


def test_results_stand_in_the_order_of_the_queries(bench: Bench) -> None:
    async def work() -> None:
        results = await bench.batcher.search(["5", "70", "5", "1"], 2)
        assert [rows_of(hits) for hits in results] == [[5, 6], [70, 71], [5, 6], [1, 2]]
        assert sorted(bench.retriever.computed) == ["1", "5", "70"]
        assert bench.batcher.pending == 0

    run(work)


def test_what_gathers_meanwhile_is_deduplicated_and_batched(bench: Bench) -> None:
    async def work() -> None:
        blocked = await bench.block()
        tasks = [bench.begin(str(i % 20)) for i in range(40)]
        await asyncio.sleep(0)
        bench.retriever.gate.set()
        results = await asyncio.gather(*tasks)
        assert [rows_of(hits)[0] for (hits,) in results] == [i % 20 for i in range(40)]
        await blocked
        assert sorted(map(int, bench.retriever.computed)) == [*range(20), 999]
        assert all(len(batch) <= 16 for batch in bench.retriever.batches)
        assert len(bench.retriever.batches) == 3  # the blocked one, and 20 in two
        assert [bench.counts.read(name) for name in ("queries", "joined", "hits")] == [41, 20, 0]

    run(work)


def test_a_cached_result_equals_a_fresh_one(bench: Bench) -> None:
    async def work() -> None:
        fresh = await bench.batcher.search(["3", "14"], 10)
        cached = await bench.batcher.search(["14", "3"], 10)
        assert cached == fresh[::-1]
        assert len(bench.retriever.batches) == 1 and bench.counts.read("hits") == 2
        # Another k of the same depth is the head of it, and costs nothing.
        assert await bench.batcher.search(["3"], 4) == [fresh[0][:4]]
        assert len(bench.retriever.batches) == 1
        # A greater depth is computed anew.
        assert rows_of((await bench.batcher.search(["3"], 50))[0]) == list(range(3, 53))
        assert bench.retriever.depths == [10, 100]

    run(work)


def test_depths_do_not_mix_in_a_batch(bench: Bench) -> None:
    async def work() -> None:
        blocked = await bench.block()
        tasks = [bench.begin("1", k=3), bench.begin("2", k=100), bench.begin("1", k=11), bench.begin("3", k=10)]
        await asyncio.sleep(0.01)
        bench.retriever.gate.set()
        results = await asyncio.gather(*tasks)
        assert [len(hits) for (hits,) in results] == [3, 100, 11, 10]
        await blocked
        assert sorted(zip(bench.retriever.depths[1:], map(sorted, bench.retriever.batches[1:]), strict=True)) == [
            (10, ["1", "3"]),
            (100, ["1", "2"]),
        ]

    run(work)


def test_a_full_queue_admits_nothing_of_a_request() -> None:
    async def work() -> None:
        bench = Bench(pending=4)
        blocked = await bench.block()
        waiting = bench.begin("1", "2")
        await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError, match="3 queries are waiting and 2 more were asked; at most 4"):
            await bench.batcher.search(["3", "4"], 3)
        assert bench.batcher.pending == 3 and bench.counts.read("rejected") == 1
        joined = bench.begin("1", "2")  # adds nothing to the queue
        await asyncio.sleep(0.01)
        bench.retriever.gate.set()
        await asyncio.gather(blocked, waiting, joined)
        assert rows_of((await bench.batcher.search(["3"], 1))[0]) == [3]
        bench.worker.close()

    run(work)


def test_the_deadline_ends_a_wait_and_leaves_nothing_behind() -> None:
    async def work() -> None:
        bench = Bench(deadline_s=0.5)
        blocked = await bench.block()
        with pytest.raises(DeadlineError, match=r"no result within 0\.5 s"):
            await bench.batcher.search(["1", "2"], 3)
        with pytest.raises(DeadlineError):
            await blocked
        assert bench.batcher.pending == 0 and bench.counts.read("timeouts") == 2
        bench.retriever.gate.set()
        await asyncio.sleep(0.05)
        assert bench.retriever.computed == ["999"]
        assert bench.counts.read("skipped") == 0 or bench.counts.read("skipped") == 2
        assert rows_of((await bench.batcher.search(["1"], 1))[0]) == [1]
        bench.worker.close()

    run(work)


def test_what_nobody_waits_for_any_more_is_not_computed(bench: Bench) -> None:
    async def work() -> None:
        blocked = await bench.block()
        leaving, staying = bench.begin("1", "2"), bench.begin("2", "3")
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        again = bench.begin("1")  # asked anew after the first was given up
        await asyncio.sleep(0.01)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        bench.retriever.gate.set()
        await asyncio.gather(blocked, staying)
        assert sorted(bench.retriever.computed) == ["2", "3", "999"]
        assert bench.counts.read("skipped") == 2 and bench.batcher.pending == 0

    run(work)


def test_a_result_that_nobody_waited_for_leaves_the_same_query_of_another_waiting(bench: Bench) -> None:
    async def work() -> None:
        leaving = await bench.block()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        staying = bench.begin("999", k=1)
        await asyncio.sleep(0.01)
        bench.retriever.seconds = 0.1
        bench.retriever.gate.set()
        await asyncio.to_thread(wait_until, lambda: len(bench.retriever.batches) == 2)
        assert bench.batcher.pending == 1, "a third caller can join"
        assert rows_of((await staying)[0]) == [999]

    run(work)


def test_a_window_on_the_worker_skips_what_was_given_up_meanwhile() -> None:
    async def work() -> None:
        bench = Bench(batch_queries=1)
        bench.retriever.gate.clear()
        tasks = [bench.begin(str(i)) for i in range(5)]
        await asyncio.to_thread(bench.retriever.entered.wait, 10)
        for task in tasks[2:]:
            task.cancel()
        await asyncio.gather(*tasks[2:], return_exceptions=True)
        bench.retriever.gate.set()
        await asyncio.gather(*tasks[:2])
        await bench.batcher.search(["77"], 1)
        # The first window held only the first query; the others gathered while it was computed.
        assert sorted(bench.retriever.computed) == ["0", "1", "77"]
        assert bench.counts.read("skipped") == 3
        bench.worker.close()

    run(work)


def test_a_caller_that_is_gone_is_let_go(bench: Bench) -> None:
    async def work() -> None:
        blocked = await bench.block()
        gone = asyncio.Event()

        async def is_gone() -> bool:
            return gone.is_set()

        task = asyncio.create_task(bench.batcher.search(["1"], 1, is_gone))
        await asyncio.sleep(0.3)
        assert not task.done()
        gone.set()
        with pytest.raises(CallerGoneError):
            await task
        bench.retriever.gate.set()
        await blocked
        assert bench.retriever.computed == ["999"]

    run(work)


def test_a_failing_query_fails_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        blocked = await bench.block()
        good, bad, mixed = bench.begin("1", "2"), bench.begin("poison"), bench.begin("3", "poison")
        await asyncio.sleep(0.01)
        bench.retriever.gate.set()
        await blocked
        assert [rows_of(hits)[0] for hits in await good] == [1, 2]
        for task in (bad, mixed):
            with pytest.raises(RetrieverError, match="RuntimeError: the retriever choked"):
                await task
        assert bench.batcher.pending == 0
        assert [rows_of(hits)[0] for hits in await bench.batcher.search(["3"], 1)] == [3]
        assert bench.counts.read("failed_batches") == 1

    run(work)
    assert "choked" in caplog.text


def test_queries_that_cannot_be_measured_are_searched_one_by_one(bench: Bench) -> None:
    async def work() -> None:
        blocked = await bench.block()
        tasks = [bench.begin("unmeasurable"), bench.begin("7")]
        await asyncio.sleep(0.01)
        bench.retriever.gate.set()
        results = await asyncio.gather(*tasks)
        await blocked
        assert rows_of(results[1][0])[0] == 7
        assert bench.retriever.batches[1:] == [["unmeasurable"], ["7"]]

    run(work)


def test_a_retriever_that_loses_a_row_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.retriever, "search", lambda queries, k: [])

    async def work() -> None:
        with pytest.raises(RetrieverError, match="0 lists of hits for 1 queries"):
            await bench.batcher.search(["1"], 1)

    run(work)


def test_results_after_the_end_of_the_loop_are_dropped() -> None:
    before = {*threading.enumerate()}
    bench = Bench()

    async def work() -> None:
        task = await bench.block()
        task.cancel()

    run(work)
    bench.retriever.gate.set()
    bench.worker.close()
    wait_until(lambda: not {*threading.enumerate()} - before, 10)


LENGTHS = st.lists(st.tuples(st.sampled_from([10, 100]), st.integers(1, 300)), min_size=1, max_size=80)


@given(LENGTHS, st.integers(1, 20), st.integers(1, 600))
def test_batches_keep_the_limits_and_lose_nothing(entries: list[tuple[int, int]], queries: int, tokens: int) -> None:
    window = [Entry(str(i), depth) for i, (depth, _) in enumerate(entries)]
    lengths = [length for _, length in entries]
    batches = plan_batches(window, lengths, BatchLimits(batch_queries=queries, batch_tokens=tokens))
    assert sorted(entry.query for batch in batches for entry in batch) == sorted(entry.query for entry in window)
    for batch in batches:
        assert len({entry.depth for entry in batch}) == 1 and len(batch) <= queries
        longest = max(lengths[int(entry.query)] for entry in batch)
        assert len(batch) == 1 or len(batch) * longest <= tokens


def test_a_small_index_is_searched_on_the_loop_in_windows() -> None:
    corpus = make_rows(300)
    backend = BM25Index(corpus, None)
    assert backend.load.on_loop and backend.load.queries == 16
    threads = []
    search = backend.search

    def note(queries: Sequence[str], k: int) -> list[list[Passage]]:
        threads.append((threading.get_ident(), len(queries)))
        return search(queries, k)

    backend.search = note  # type: ignore[method-assign, assignment]

    async def go() -> None:
        limits = BatchLimits(window=backend.load.queries)
        batcher = QueryBatcher(backend, [LoopWorker()], limits, make_cache(0), Counts())
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.ensure_future(count_turns())
        many = asyncio.ensure_future(batcher.search([f"row {row}" for row in range(40)], 3))
        few = await asyncio.gather(*(batcher.search([f"text {row}"], 3) for row in range(5)))
        assert [rows_of(hits[0])[0] for hits in few] == list(range(5))
        assert [rows_of(hits)[0] for hits in await many] == list(range(40))
        counter.cancel()
        assert batcher.pending == 0
        assert {thread for thread, _ in threads} == {threading.get_ident()}
        assert max(count for _, count in threads) <= 16 and sum(count for _, count in threads) == 45
        assert turns >= 3, "others have their turn between windows"

    asyncio.run(go())


def test_the_cache_keeps_the_last_used_within_its_bytes() -> None:
    async def work() -> None:
        bench = Bench(cache_bytes=3 * (320 + sys.getsizeof("0") + 10 * 120))
        for query in ("1", "2", "3", "1", "4", "1", "2"):  # the fourth drops "2", and "2" drops "3"
            assert rows_of((await bench.batcher.search([query], 3))[0])[0] == int(query)
        assert bench.retriever.computed == ["1", "2", "3", "4", "2"]
        bench.worker.close()
        nothing = Bench(cache_bytes=0)
        for _ in range(2):
            await nothing.batcher.search(["1"], 1)
        assert nothing.retriever.computed == ["1", "1"]
        nothing.worker.close()

    run(work)
