"""Admission of conversations to an engine whose key-value cache cannot hold them all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from spear_agents.engines.base import Engine, Generation, Sampling

_SHARE = 0.9
"""Usable share of the cache: its blocks are never all full, and a response grows while it is written."""


class CacheGate:
    """Admits conversations while they fit an engine's key-value cache of ``capacity`` tokens; the others wait.

    A cache that is too small keeps evicting the context that it needs next. Older conversations go first: a turn waits
    until its own context and those of all older conversations fit. A conversation is expected to grow to the mean
    length of those that have ended. The oldest one never waits.
    """

    def __init__(self, capacity: int) -> None:
        self._room = _SHARE * capacity
        self._contexts: dict[int, int] = {}
        """Tokens of each conversation, in the order in which they began."""
        self._waiting: dict[asyncio.Future[None], int] = {}
        """Turns that wait, each with its conversation: a program may ask for several at once."""
        self._begun = 0
        self._ended = 0
        self._ended_tokens = 0

    @contextmanager
    def admit(self, engine: Engine) -> Iterator[Engine]:
        """Yield the engine for one conversation, or for several in sequence, that end with the block."""
        number = self._begun
        self._begun += 1
        self._contexts[number] = 0
        try:
            yield _Seat(self, number, engine)
        finally:
            tokens = self._contexts.pop(number)
            if tokens:
                self._ended += 1
                self._ended_tokens += tokens
            admitted = self._find_admitted()
            for waiting in [waiting for waiting, number in self._waiting.items() if number in admitted]:
                del self._waiting[waiting]
                if not waiting.done():
                    waiting.set_result(None)

    async def wait(self, number: int, tokens: int) -> None:
        """Wait until conversation ``number``, now of ``tokens``, may take its turn."""
        self._contexts[number] = tokens
        if number in self._find_admitted():
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = number
        try:
            await waiting
        finally:
            self._waiting.pop(waiting, None)

    def grow(self, number: int, tokens: int) -> None:
        """Note the tokens of conversation ``number``."""
        self._contexts[number] = tokens

    def _find_admitted(self) -> set[int]:
        """The oldest conversations that fit together, and at least the oldest."""
        expected = self._ended_tokens // self._ended if self._ended else 0
        admitted: set[int] = set()
        total = 0
        for number, tokens in self._contexts.items():
            total += max(tokens, expected)
            if admitted and total > self._room:
                break
            admitted.add(number)
        return admitted


@dataclass(eq=False)
class _Seat:
    """The engine of one conversation."""

    gate: CacheGate
    number: int
    engine: Engine

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """Wait for its turn, then asks the engine."""
        await self.gate.wait(self.number, len(prompt_ids))
        answer = await self.engine.generate(prompt_ids, sampling, request_id=request_id, images=images)
        self.gate.grow(self.number, len(prompt_ids) + len(answer.token_ids))
        return answer
