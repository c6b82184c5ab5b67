"""Concurrent episodes, independent of each other: nothing waits for the slowest of a batch."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Protocol, TypeVar

import gymnasium as gym
import numpy as np

from spear_agents.engines.base import Engine, Generation, Sampling
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.snapshots import Snapshot
from spear_agents.play.trajectory import Layout, StopReason, Trajectory
from spear_sandbox.web.endpoints import Backoff

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
        """Return the oldest conversations that fit together, and at least the oldest."""
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


Env = gym.Env[Any, Any]


@dataclass(frozen=True)
class Job:
    """One episode to play; ``begin`` is the snapshot it starts from, None for the start of the task."""

    task_id: str
    seed: int
    begin: Snapshot | None = None


class Play(Protocol):
    """Plays a job, as :func:`spear_agents.play.episode.play_episode` does."""

    async def __call__(
        self,
        env: Env,
        engine: Engine,
        prompts: PromptBuilder,
        *,
        task_id: str,
        sampling: Sampling,
        seed: int,
        env_id: str,
    ) -> Trajectory:
        """Play the job and return its last episode."""
        ...


@dataclass(eq=False)
class Retrying:
    """Plays an episode again with the same seed if a fault cut it short: most services recover quickly.

    It is played ``tries`` times at most, after ``wait_s`` doubled each time. ``retried`` counts repeated tries, and
    ``discarded`` the responses in the tries they replaced.
    """

    play: Play
    tries: int
    wait_s: float = 1.0
    retried: int = field(default=0, init=False)
    discarded: int = field(default=0, init=False)

    async def __call__(self, env: Env, engine: Engine, prompts: PromptBuilder, **job: Any) -> Trajectory:
        """Return the first episode without a fault, or the last one."""
        attempt = 1
        while True:
            played = await self.play(env, engine, prompts, **job)
            if played.stop is not StopReason.FAULT or attempt == self.tries:
                return played
            self.retried += 1
            self.discarded += len(played.turns)
            await asyncio.sleep(Backoff(self.wait_s, math.inf, jitter=0).choose_wait(attempt))
            attempt += 1


@dataclass(eq=False)
class Listening:
    """Plays an episode and calls ``on_response`` with each response as soon as it is written."""

    play: Play
    on_response: Callable[[Generation], None]

    async def __call__(self, env: Env, engine: Engine, prompts: PromptBuilder, **job: Any) -> Trajectory:
        """Return the episode of ``play``."""
        return await self.play(env, _Heard(engine, self.on_response), prompts, **job)


@dataclass(eq=False)
class _Heard:
    """An engine whose responses are reported."""

    engine: Engine
    on_response: Callable[[Generation], None]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        answer = await self.engine.generate(prompt_ids, sampling, request_id=request_id, images=images)
        self.on_response(answer)
        return answer


async def play_many(
    jobs: Iterable[Job],
    *,
    make_env: Callable[[], Env],
    release_env: Callable[[Env], None] = methodcaller("close"),
    engine_for: Callable[[Env], Engine],
    prompts: PromptBuilder,
    sampling: Sampling,
    env_id: str,
    concurrency: int = 128,
    on_done: Callable[[Trajectory], None] | None = None,
    play: Play = play_episode,
) -> list[Trajectory]:
    """Play ``jobs`` in order, at most ``concurrency`` at a time; return the trajectories in their order.

    Conversations with an engine that states the size of its cache (``cache_tokens``) wait for each other if they do not
    fit together (:class:`~spear_agents.play.rollout.CacheGate`). ``make_env`` is called once for each concurrent
    episode, and ``release_env`` with each environment at the end. ``play`` plays one job, and ``on_done`` gets each
    trajectory as soon as it ends. Raises the first SpearError of an episode; the others are cancelled.
    """
    waiting = deque(enumerate(jobs))
    done: dict[int, Trajectory] = {}
    count = len(waiting)
    envs: list[Env] = []
    gates: dict[Engine, CacheGate] = {}

    def admit(engine: Engine) -> AbstractContextManager[Engine]:
        capacity = getattr(engine, "cache_tokens", None)
        if capacity is None or prompts.layout is not Layout.CONVERSATION:
            return nullcontext(engine)
        return gates.setdefault(engine, CacheGate(capacity)).admit(engine)

    async def fill_place(env: Env, engine: Engine, stack: ExitStack) -> None:
        with stack:
            while waiting:
                index, job = waiting.popleft()
                # Not every way of playing can begin in a snapshot.
                given: dict[str, Any] = {} if job.begin is None else {"begin": job.begin}
                given |= {"task_id": job.task_id, "seed": job.seed}
                with admit(engine) as seat:
                    trajectory = await play(env, seat, prompts, sampling=sampling, env_id=env_id, **given)
                done[index] = trajectory
                if on_done is not None:
                    on_done(trajectory)
                # A scripted policy never waits: let third-party errors and Ctrl-C through.
                await asyncio.sleep(0)

    places: list[asyncio.Task[None]] = []
    stacks: list[tuple[Env, Engine, ExitStack]] = []
    try:
        for _ in range(min(concurrency, count)):
            env = make_env()
            envs.append(env)
            engine = engine_for(env)
            stack = ExitStack()
            # All are announced before the first asks, or the batcher would take the first caller for the only one.
            stack.enter_context(open_session(engine))
            stacks.append((env, engine, stack))
        places = [asyncio.create_task(fill_place(*entry)) for entry in stacks]
        await asyncio.gather(*places)
    finally:
        for place in places:
            place.cancel()
        await asyncio.gather(*places, return_exceptions=True)
        for *_, stack in stacks:
            stack.close()
        for env in envs:
            release_env(env)
    return [done[index] for index in range(count)]


def open_session(engine: Engine) -> AbstractContextManager[None]:
    """Announce one caller to the engine (:meth:`RequestBatcher.session`), if it needs that."""
    session = getattr(engine, "session", None)
    return session() if session is not None else nullcontext()


Result = TypeVar("Result")


def run_blocking(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, also in a thread with a running loop, as in a notebook. Ctrl-C cancels it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    result: Future[Result] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Result]]] = Future()

    async def run() -> Result:
        task = asyncio.ensure_future(work)
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def play() -> None:
        try:
            result.set_result(asyncio.run(run()))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=play, name="spear-agents", daemon=True)
    thread.start()
    try:
        return result.result()
    except KeyboardInterrupt:
        loop, task = started.result()
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
