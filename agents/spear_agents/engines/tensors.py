"""What engines in this process share: batches of requests, draws of tokens, weights and memory."""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from spear_agents.engines.base import Generation, Request, Sampling
from spear_envs.core.errors import SpearError

RunBatch = Callable[[list[Request]], Awaitable[list[Generation]]]


class RequestBatcher:
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
            raise SpearError("deterministic batching needs RequestBatcher.session() around generate")
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


_DONT_NEED = 4
"""``MADV_DONTNEED`` of Linux: pages of anonymous memory are dropped, and read as zeros afterwards."""


def release_pages(storage: torch.UntypedStorage) -> int:
    """Drop the contents of a CPU tensor's storage, which reads as zeros afterwards; returns the bytes given back.

    Bytes before the first and after the last whole page stay as they are. Raises OSError if the system refuses.
    """
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    size = (storage.data_ptr() + storage.nbytes()) // page * page - start
    if size <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DONT_NEED):
        raise OSError(ctypes.get_errno(), "madvise failed")
    return size


_HEAD = "lm_head.weight"


def select_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the weights of ``folder`` from ``state``, with the names and shapes they have there.

    A tied output layer may be in ``state`` or not. Raises SpearError if a weight is missing, unknown or of another
    shape, or the folder has no safetensors.
    """
    shapes = read_shapes(folder)
    given = {name: tensor for name, tensor in state.items() if name in shapes or name != _HEAD or not _is_tied(folder)}
    missing = [name for name in sorted(shapes.keys() - given.keys()) if name != _HEAD or not _is_tied(folder)]
    unknown = sorted(given.keys() - shapes.keys())
    other = f"these weights are of another model than {folder}"
    if missing or unknown:
        raise SpearError(f"{other}: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in given.items():
        if tuple(tensor.shape) != shapes[name]:
            raise SpearError(f"{other}: {name} is {tuple(tensor.shape)}, there it is {shapes[name]}")
    return given


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of each weight in a Hugging Face folder. Raises SpearError if it has no safetensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    if not shapes:
        raise SpearError(f"{folder} contains no *.safetensors: save the model with save_pretrained of transformers")
    return shapes


def _is_tied(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool({**(config.get("text_config") or {}), **config}.get("tie_word_embeddings"))


@contextmanager
def share_weights(state: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Put ``state`` in memory at a path for ``torch.load`` in this user's processes, for the duration of the block.

    The memory is anonymous and is freed with this process. Linux only, like vLLM on a CPU.
    """
    with os.fdopen(os.memfd_create("weights", os.MFD_CLOEXEC), "w+b") as file:
        torch.save(dict(state), file)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BLOCK = 256
"""Ids in a block of :func:`invert_mass`."""


def _mix(state: np.ndarray) -> np.ndarray:
    """Return the output function of SplitMix64 (Steele, Lea and Flood 2014): a bijection of uint64 [N]."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniform_at(seeds: np.ndarray, position: int | np.ndarray) -> np.ndarray:
    """Return number ``position`` (one, or uint64 [N]) of each seed's stream (uint64 [N]): float64 [N] in [0, 1).

    SplitMix64 used as a counter: any position of any stream is reached directly, so rows may enter and leave a batch.
    52 bits are kept, so that ``u * total < total`` holds in float64 for every positive total.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        state = _mix(seeds.astype(np.uint64) + _GAMMA) + (np.asarray(position, np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def filter_probs(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero the tokens of ``probs`` [N, V] excluded by top-k and then top-p, without renormalising; rows sum to 1.

    ``top_k`` is int64 [N], 0 for off; of equal probabilities the lower id comes first. ``top_p``, float [N], keeps the
    smallest leading set whose share of the mass left by top-k reaches it.
    """
    ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])
    ordered = ordered.masked_fill(rank >= limit[:, None], 0)
    before = ordered.cumsum(-1) - ordered
    total = ordered.sum(-1, keepdim=True)
    # Rank 0 always stays: the mass before it is 0 and top_p > 0. At top_p = 1 the comparison is skipped, because
    # rounding of the sum could drop a token of the tail.
    keep = (before < top_p[:, None] * total) | (top_p[:, None] >= 1)
    return torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(~keep, 0))


def invert_mass(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the ids (int64 [N]) at which cumulative distributions pass uniform numbers, in the order of the ids.

    Sums are float64, first of blocks of ids and then within the selected block: a running sum over the vocabulary would
    take several times as long. ``probs`` [N, V] are not negative, with a positive sum of each row; ``uniform`` is
    float64 [N] in [0, 1). An id of probability 0 is never drawn.
    """
    size = probs.shape[-1]
    if size % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, -size % _BLOCK))
    blocks = probs.unflatten(-1, (-1, _BLOCK))
    mass = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    place = uniform[:, None] * mass[:, -1:]
    block = (mass <= place).sum(-1, keepdim=True)
    before = torch.nn.functional.pad(mass, (1, 0)).gather(-1, block)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    # The two sums of a block can differ in their last bits.
    rest = torch.minimum(place - before, inner[:, -1:].nextafter(inner.new_zeros(())))
    return block[:, 0] * _BLOCK + (inner <= rest).sum(-1)


def draw_tokens(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row by inversion of its cumulative distribution, in float64 and in the order of the ids.

    ``logits`` are [N, V], ``uniform`` float64 [N] in [0, 1), and ``temperature`` float64 [N]; 0 takes the most probable
    token. ``top_k`` and ``top_p`` are [N], or None when no row filters. Returns token ids int64 [N] and their
    log-probabilities float64 [N], before filters, at the row's temperature (at 1 where the temperature is 0).
    """
    greedy = temperature == 0
    heat = torch.where(greedy, torch.ones_like(temperature), temperature)
    log_probs = torch.log_softmax(logits.double() / heat[:, None], -1)
    probs = log_probs.exp()
    if top_k is not None and top_p is not None:
        probs = filter_probs(probs, top_k, top_p)
    tokens = invert_mass(probs, uniform)
    tokens = torch.where(greedy, log_probs.argmax(-1), tokens)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]
