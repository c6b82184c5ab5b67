"""Batching of concurrent ``generate`` calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from spear_agents.engines.base import Generation, Request, Sampling
from spear_envs.core.errors import SpearError

RunBatch = Callable[[list[Request]], Awaitable[list[Generation]]]


class MicroBatcher:
    """An :class:`~spear_agents.engines.base.Engine` over a function that answers a list of requests at once.

    Callers that play episodes announce themselves with :meth:`session`. A batch goes

    - at once, when every announced caller waits for an answer (nobody else could join);
    - otherwise when ``max_batch`` calls wait, or ``max_wait_s`` after the first of them.

    With ``deterministic=True`` only the first rule holds: waiting calls are sorted by ``request_id`` and cut into
    chunks of ``max_batch``, so that the batches depend on the episodes alone and never on timing. One batch runs at a
    time; later calls are gathered meanwhile. All calls must come from one event loop.

    Args:
        run_batch: answers requests in order. If it raises, only the callers of that batch get the error.
        max_batch: maximum requests in one call of ``run_batch``.
        max_wait_s: maximum seconds the oldest call waits for others.
    """

    def __init__(
        self, run_batch: RunBatch, *, max_batch: int = 128, max_wait_s: float = 0.005, deterministic: bool = False
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be >= 1, got {max_batch}")
        self._run_batch = run_batch
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._deterministic = deterministic
        self._pending: list[tuple[Request, asyncio.Future[Generation]]] = []
        self.live = 0
        """Number of callers inside :meth:`session`."""
        self._runner: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = False
        self._called = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Announce one caller for the duration of the block, which makes one call at a time."""
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1
            if self._pending:
                self._consider()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """See :class:`~spear_agents.engines.base.Engine`. Raises what ``run_batch`` raised for this batch."""
        if self._deterministic and self.live == 0:
            raise SpearError("deterministic batching needs MicroBatcher.session() around generate")
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._pending.append((Request(prompt_ids, sampling, request_id, images), answer))
        self._consider()
        try:
            return await answer
        except asyncio.CancelledError:
            # A cancelled caller must leave, or the others would wait for an answer nobody collects.
            self._pending = [entry for entry in self._pending if entry[1] is not answer]
            raise

    def _is_ready(self) -> bool:
        waiting = len(self._pending)
        if 0 < self.live <= waiting:
            return True
        return waiting > 0 and not self._deterministic and (self._due or waiting >= self._max_batch)

    def _consider(self) -> None:
        if self._runner is not None:
            return
        if self._is_ready():
            # Deferred: callers started together announce themselves and ask first.
            if not self._called:
                self._called = True
                asyncio.get_running_loop().call_soon(self._go)
        elif not self._deterministic and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._ring)

    def _ring(self) -> None:
        self._timer, self._due = None, True
        self._consider()

    def _go(self) -> None:
        self._called = False
        if self._runner is None and self._is_ready():
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._due = None, False
            entries, self._pending = self._pending, []
            if self._deterministic:
                entries.sort(key=lambda entry: entry[0].request_id)
            chunks = [entries[i : i + self._max_batch] for i in range(0, len(entries), self._max_batch)]
            self._runner = asyncio.get_running_loop().create_task(self._run(chunks))
        elif self._pending:
            self._consider()

    async def _run(self, chunks: list[list[tuple[Request, asyncio.Future[Generation]]]]) -> None:
        results: list[list[Generation] | BaseException] = []
        try:
            for chunk in chunks:
                try:
                    generations = await self._run_batch([request for request, _ in chunk])
                    if len(generations) != len(chunk):
                        raise SpearError(f"the batch runner gave {len(generations)} answers to {len(chunk)} requests")
                    results.append(generations)
                except Exception as error:
                    results.append(error)
                if not self._deterministic:
                    _deliver(chunk, results[-1])
            if self._deterministic:
                # Together, so that every caller's next request joins the same batch.
                for chunk, result in zip(chunks, results, strict=True):
                    _deliver(chunk, result)
        except asyncio.CancelledError:
            for chunk in chunks:
                for _, answer in chunk:
                    answer.cancel()
            raise
        finally:
            self._runner = None
            if self._pending:
                self._consider()


def _deliver(chunk: list[tuple[Request, asyncio.Future[Generation]]], result: list[Generation] | BaseException) -> None:
    for i, (_, answer) in enumerate(chunk):
        if answer.done():  # its caller was cancelled while the batch ran
            continue
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result[i])
