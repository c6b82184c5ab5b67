"""Batching concurrent searches into few calls of a retriever, with a cache and counts."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from spear_envs.retrieval.limits import BatchLimits
from spear_envs.retrieval.retriever import Passage, Retriever, RetrieverFault, RetrieverRefusal

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)

PATIENCE_S = 0.25
"""Interval of checking whether a waiting caller is still there."""
ENTRY_BYTES = 320
"""Approximate size of a cache entry without query and passages."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFIX = "spear_retriever_"
SPENT = {"requests": "Requests to third-party servers, retries included.", "cost": "Price of these requests."}

disable_created_metrics()


class Counts:
    """Counts of a service for Prometheus, with those of its process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.queries = self._count("queries", "Queries of admitted requests, repeated ones included.")
        self.hits = self._count("hits", "Queries that the cache answered.")
        self.joined = self._count("joined", "Queries that waited for the same query of another or of the same request.")
        self.batches = self._count("batches", "Calls of the retriever.")
        self.failed_batches = self._count("failed_batches", "Batches in which the retriever raised an error.")
        self.skipped = self._count("skipped", "Queries not computed because nobody waited for them any more.")
        self.rejected = self._count("rejected", "Requests turned away because the queue was full.")
        self.timeouts = self._count("timeouts", "Requests not answered within the deadline.")
        self.answers = self._count("answers", "Answers of /retrieve by HTTP status.", "status")
        self.queue_length = Gauge(
            f"{PREFIX}queue_length", "Distinct queries that wait or are computed.", registry=self.registry
        )
        self.batch_queries = Histogram(
            f"{PREFIX}batch_queries", "Queries of a batch.", buckets=SIZES, registry=self.registry
        )
        self.request_seconds = Histogram(
            f"{PREFIX}request_seconds", "Seconds until a request is answered.", buckets=SECONDS, registry=self.registry
        )

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def read(self, name: str) -> int:
        """Return the present value of a counter without labels."""
        return int(self.registry.get_sample_value(f"{PREFIX}{name}_total") or 0)


class Spent(Collector):
    """Collects what retrievers count themselves, by the name of the index."""

    def __init__(self, retrievers: Callable[[], Mapping[str, Retriever]]) -> None:
        self._retrievers = retrievers

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for name, text in SPENT.items():
            family = CounterMetricFamily(f"{PREFIX}backend_{name}", text, labels=["index"])
            for index, retriever in self._retrievers().items():
                if name in (counts := retriever.counts()):
                    family.add_metric([index], counts[name])
            if family.samples:
                yield family


Cache = LRUCache[tuple[str, int], tuple[Sequence[Passage], int]]
"""Passages of a query at a depth, and the size of the entry in bytes; drops the least recently used."""


def make_cache(max_bytes: int) -> Cache:
    """Make a cache of approximately this size; 0 keeps nothing."""
    return LRUCache(max_bytes, getsizeof=lambda entry: entry[1])


class RetrieverError(Exception):
    """The retriever raised an unexpected error, which is the cause; or a search has no result for another reason."""

    status = 500
    """HTTP status of the answer."""


class OverloadedError(RetrieverError):
    """Too many queries are waiting."""

    status = 503


class DeadlineError(RetrieverError):
    """No result within the deadline."""

    status = 504


class CallerGoneError(RetrieverError):
    """The caller did not wait for the result."""

    status = 499


class WorkerThread:
    """One thread for all calls of a retriever, since OpenMP's threads are set for each calling thread.

    A daemon, so that a hanging retriever cannot keep the process from ending.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="retriever", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function, which must not raise, after those submitted before."""
        self._jobs.put((function, args))

    def close(self) -> None:
        """End after the jobs submitted so far."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, args = job
            function(*args)


class LoopWorker:
    """Works at once on the event loop, for work that is cheaper than a thread."""

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """See :meth:`WorkerThread.submit`."""
        function(*args)

    def close(self) -> None:
        """Do nothing."""


Worker = WorkerThread | LoopWorker


class _Ticket:
    """A request that waits until the last of its queries is answered, by whichever batch computes it."""

    __slots__ = ("future", "missing")

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future
        self.missing = 0

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Entry:
    """A waiting or running query, and the requests that wait for it."""

    __slots__ = ("depth", "hits", "query", "tickets")

    def __init__(self, query: str, depth: int) -> None:
        self.query = query
        self.depth = depth
        self.tickets: list[_Ticket] = []
        self.hits: Sequence[Passage] = ()


class QueryBatcher:
    """Searches for many callers of one event loop, on worker threads.

    Concurrent equal queries are computed once. Without a waiting time: while windows of queries are computed, the next
    one gathers.

    Args:
        retriever: its ``search`` and ``lengths`` are called by the workers only.
        workers: one for each concurrent call of the retriever; closed by their owner.
    """

    def __init__(
        self, retriever: Retriever, workers: Sequence[Worker], limits: BatchLimits, cache: Cache, counts: Counts
    ) -> None:
        self._retriever = retriever
        self._idle = list(workers)
        self._is_on_loop = any(isinstance(worker, LoopWorker) for worker in workers)
        self._is_woken = False
        self._limits = limits
        self._cache = cache
        self._counts = counts
        self._entries: dict[tuple[str, int], Entry] = {}
        self._queue: deque[Entry] = deque()

    @property
    def pending(self) -> int:
        """Count the distinct queries that wait or are computed now."""
        return len(self._entries)

    async def search(
        self, queries: Sequence[str], k: int, is_gone: Callable[[], Awaitable[bool]] | None = None
    ) -> list[Sequence[Passage]]:
        """Find at most ``k`` hits of each query, in order.

        What only a cancelled or gone caller waited for is not computed.

        Args:
            queries: any text.
            k: at most the greatest depth of the limits.
            is_gone: whether the caller has given up; polled.

        Raises:
            OverloadedError: the queue is full; nothing was admitted.
            DeadlineError: it took too long.
            CallerGoneError: ``is_gone`` said so.
            RetrieverFault, RetrieverRefusal: from the retriever.
            RetrieverError: it failed otherwise on one of the queries.
        """
        depth = next(depth for depth in self._limits.depths if depth >= k)
        found: dict[str, Sequence[Passage]] = {}
        missing = []
        for query in dict.fromkeys(queries):
            cached = self._cache.get((query, depth))
            if cached is None:
                missing.append(query)
            else:
                found[query] = cached[0]
        self._admit(queries, found, missing, depth)
        if missing:
            loop = asyncio.get_running_loop()
            ticket = _Ticket(loop.create_future())
            entries = [self._join(query, depth, ticket) for query in missing]
            self._wake(loop)
            try:
                await self._wait(ticket, is_gone)
            finally:
                if ticket.missing:
                    self._leave(entries, ticket)
            found.update((entry.query, entry.hits) for entry in entries)
        return [found[query][:k] for query in queries]

    def _admit(
        self, queries: Sequence[str], found: dict[str, Sequence[Passage]], missing: list[str], depth: int
    ) -> None:
        fresh = sum((query, depth) not in self._entries for query in missing)
        if len(self._entries) + fresh > self._limits.pending:
            self._counts.rejected.inc()
            raise OverloadedError(
                f"{len(self._entries)} queries are waiting and {fresh} more were asked; "
                f"at most {self._limits.pending} may wait. Try again later."
            )
        hits = sum(query in found for query in queries)
        self._counts.queries.inc(len(queries))
        self._counts.hits.inc(hits)
        self._counts.joined.inc(len(queries) - hits - fresh)

    async def _wait(self, ticket: _Ticket, is_gone: Callable[[], Awaitable[bool]] | None) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._limits.deadline_s
        while not ticket.future.done():
            left = end - loop.time()
            if left <= 0:
                self._counts.timeouts.inc()
                raise DeadlineError(
                    f"no result within {self._limits.deadline_s:g} s; {len(self._entries)} queries wait."
                )
            await asyncio.wait({ticket.future}, timeout=min(left, PATIENCE_S))
            if is_gone is not None and not ticket.future.done() and await is_gone():
                raise CallerGoneError("the client has disconnected.")
        ticket.future.result()

    def _join(self, query: str, depth: int, ticket: _Ticket) -> Entry:
        entry = self._entries.get((query, depth))
        if entry is None:
            entry = self._entries[query, depth] = Entry(query, depth)
            self._queue.append(entry)
        entry.tickets.append(ticket)
        ticket.missing += 1
        return entry

    def _leave(self, entries: list[Entry], ticket: _Ticket) -> None:
        for entry in entries:
            if ticket in entry.tickets:
                entry.tickets.remove(ticket)
                if not entry.tickets:
                    # It can no longer be joined, so its worker may skip it.
                    self._entries.pop((entry.query, entry.depth), None)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start computing what waits; on the loop after all present requests have joined."""
        if not self._is_on_loop:
            self._send(loop)
        elif not self._is_woken:
            self._is_woken = True
            loop.call_soon(self._send, loop)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the next windows to idle workers."""
        self._is_woken = False
        while self._idle and (window := self._take_window()):
            worker = self._idle.pop()
            worker.submit(self._compute, window, worker, loop)
            if self._is_on_loop:  # the loop does other work before the next window
                break

    def _take_window(self) -> list[Entry]:
        window: list[Entry] = []
        while self._queue and len(window) < self._limits.window:
            entry = self._queue.popleft()
            if entry.tickets:
                window.append(entry)
            else:
                self._counts.skipped.inc()
        return window

    def _compute(self, window: list[Entry], worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        """Search for a window, on the worker; deliver each batch when it is done."""
        batches = self._plan(window)
        for left, batch in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
            wanted = [entry for entry in batch if entry.tickets]
            results = self._search(wanted) if wanted else []
            done = None if left else worker
            if self._is_on_loop:
                self._deliver(wanted, results, len(batch) - len(wanted), done, loop)
                continue
            try:
                loop.call_soon_threadsafe(self._deliver, wanted, results, len(batch) - len(wanted), done, loop)
            except RuntimeError:  # the loop was closed meanwhile
                logger.debug("results came after the end of the service")
                return

    def _plan(self, window: list[Entry]) -> list[list[Entry]]:
        try:
            lengths = self._retriever.lengths([entry.query for entry in window])
            return plan_batches(window, lengths, self._limits)
        except Exception:
            logger.exception("the lengths of %d queries cannot be found; each is searched alone", len(window))
            return [[entry] for entry in window]

    def _search(self, batch: list[Entry]) -> list[Sequence[Passage] | Exception]:
        """Return the hits of each entry; if the batch fails, the errors of those that also fail alone."""
        try:
            hits = self._retriever.search([entry.query for entry in batch], batch[0].depth)
            if len(hits) != len(batch):
                raise RuntimeError(f"the retriever gave {len(hits)} lists of hits for {len(batch)} queries")
            return list(hits)
        except (RetrieverFault, RetrieverRefusal) as error:  # of the retriever as a whole: retries take as long
            return [error] * len(batch)
        except Exception as error:
            if len(batch) > 1:
                return [result for entry in batch for result in self._search([entry])]
            logger.exception("the retriever failed on a query of %d characters", len(batch[0].query))
            failure = RetrieverError(f"the retriever failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return [failure]

    def _deliver(
        self,
        batch: list[Entry],
        results: list[Sequence[Passage] | Exception],
        skipped: int,
        done: Worker | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Take a batch's results, on the loop; a worker done with its window gets the next one."""
        self._counts.skipped.inc(skipped)
        if batch:
            self._counts.batches.inc()
            self._counts.batch_queries.observe(len(batch))
            self._counts.failed_batches.inc(any(isinstance(result, Exception) for result in results))
        for entry, result in zip(batch, results, strict=True):
            # Another entry may have replaced one whose callers had all left.
            if self._entries.get((entry.query, entry.depth)) is entry:
                del self._entries[entry.query, entry.depth]
            tickets, entry.tickets = entry.tickets, []
            if isinstance(result, Exception):
                for ticket in tickets:
                    ticket.missing -= 1
                    ticket.fail(result)
                continue
            self._keep(entry, result)
            entry.hits = result
            for ticket in tickets:
                ticket.missing -= 1
                if not ticket.missing and not ticket.future.done():
                    ticket.future.set_result(None)
        if done is not None:
            self._idle.append(done)
            if self._queue:
                self._wake(loop)

    def _keep(self, entry: Entry, hits: Sequence[Passage]) -> None:
        size = ENTRY_BYTES + sys.getsizeof(entry.query) + sum(passage.held_bytes for passage in hits)
        with suppress(ValueError):  # larger than the whole cache
            self._cache[entry.query, entry.depth] = hits, size


def plan_batches(window: Sequence[Entry], lengths: Sequence[int], limits: BatchLimits) -> list[list[Entry]]:
    """Plan batches of one depth and similar lengths, within the limits of queries and tokens.

    A query longer than the limit of tokens has its own batch.
    """
    batches: list[list[Entry]] = []
    order = sorted(zip(window, lengths, strict=True), key=lambda pair: (pair[0].depth, pair[1]))
    for _, pairs in groupby(order, key=lambda pair: pair[0].depth):
        batch: list[Entry] = []
        for entry, length in pairs:
            if len(batch) >= limits.batch_queries or (len(batch) + 1) * length > limits.batch_tokens:
                if batch:
                    batches.append(batch)
                batch = []
            batch.append(entry)
        batches.append(batch)
    return batches
