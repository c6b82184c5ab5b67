"""The SPEAR reward and the schedules that weigh its parts; plain Python, so that environments do not need torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple, Protocol, TypedDict, runtime_checkable


class Criterion(NamedTuple):
    """One requirement of a task, and whether the episode met it."""

    name: str
    """Name of the criterion, such as ``"price"``."""
    met: bool
    wanted: str
    """What the task asks for, in words."""
    found: str
    """What the episode has, in words."""


class RewardTerms(TypedDict):
    """The raw parts of the reward so far, so that a trainer can weigh them itself.

    Environments may add keys, such as ``f1``; ``compose_reward`` does not read them.
    """

    outcome: float
    """+1 once the task is won, -1 before (``eq:outcomereward``)."""
    tool_call: float
    """min(1, 0.1 n) for n tool calls so far, before mu (``eq:actionreward``)."""
    format: float
    """0.1 while there was a response and every one was well formed, else 0 (``eq:formatreward``)."""
    native_return: float
    """Sum of the native rewards so far."""


REWARD_TERM_KEYS: frozenset[str] = frozenset(RewardTerms.__annotations__)
"""Keys of every ``info["reward_terms"]``."""

PAID_TERMS = ("outcome", "tool_call", "format")
"""Terms that :func:`compose_reward` adds up; others are recorded only."""

FORMAT_BONUS = 0.1
"""Reward of a trajectory whose turns are all well formed (``eq:formatreward``)."""

TOOL_CALL_STEP = 0.1
"""Reward of one tool call, before the cap at 1 (``eq:actionreward``)."""


def cosine_warmup(t: float, T: float) -> float:
    """Return the weight gamma of the self-imitation term at global step ``t`` (``eq:gamma``).

    ``(1 - cos(pi t / T)) / 2`` up to ``T``, then 1. ``T <= 0`` means no warm-up: always 1.

    Raises:
        ValueError: ``t`` is negative.
    """
    if t < 0:
        raise ValueError(f"the step must be 0 or more, not {t}")
    if T <= 0 or t >= T:
        return 1.0
    return 0.5 * (1.0 - math.cos(math.pi * t / T))


def cosine_decay(t: float, T: float) -> float:
    """Return the weight mu of the tool-call reward at global step ``t`` (``eq:mudecay``).

    ``(1 + cos(pi t / T)) / 2`` up to ``T``, then 0. ``T <= 0`` means no tool-call reward: always 0.

    Raises:
        ValueError: ``t`` is negative.
    """
    if t < 0:
        raise ValueError(f"the step must be 0 or more, not {t}")
    if T <= 0 or t >= T:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * t / T))


def tool_call_reward(n_calls: int, *, shape: str = "linear", correct: bool | None = None) -> float:
    """Return the reward of using tools, in [0, 1], before its weight mu (``eq:actionreward``).

    Args:
        n_calls: tool calls of the trajectory.
        shape: ``"linear"`` gives min(1, 0.1 n), as in the paper. ``"any_if_correct"`` gives 1 for any calls if the
            trajectory is correct and the linear value otherwise, as the authors' code does for Qwen3 on maths.
        correct: whether the outcome is right; only for ``"any_if_correct"``.

    Raises:
        ValueError: ``n_calls`` is negative, the shape is unknown, or ``correct`` is missing.
    """
    if n_calls < 0:
        raise ValueError(f"n_calls must be 0 or more, not {n_calls}")
    linear = min(1.0, TOOL_CALL_STEP * n_calls)
    if shape == "linear":
        return linear
    if shape != "any_if_correct":
        raise ValueError(f"unknown shape {shape!r}: choose 'linear' or 'any_if_correct'")
    if correct is None:
        raise ValueError("shape 'any_if_correct' needs correct=True or correct=False")
    return 1.0 if correct and n_calls > 0 else linear


def compose_reward(terms: Mapping[str, float], mu: float) -> float:
    """Return the reward of a trajectory: outcome + mu * tool_call + format (``eq:rewardtotal``).

    Args:
        terms: holds ``outcome``, ``tool_call`` (before mu) and ``format``; other keys are ignored.
        mu: weight of the tool-call term, from :func:`cosine_decay` or another schedule.

    Raises:
        ValueError: a term is missing.
    """
    missing = [key for key in PAID_TERMS if key not in terms]
    if missing:
        raise ValueError(f"reward terms lack {', '.join(missing)}; they hold {', '.join(terms) or 'nothing'}")
    return float(terms["outcome"] + mu * terms["tool_call"] + terms["format"])


@runtime_checkable
class Schedule(Protocol):
    """A weight that may change with the global training step, which starts at 1."""

    def __call__(self, t: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same weight at every step.

    Raises:
        ValueError: ``value`` is not finite.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a weight must be a finite number, not {self.value}")

    def __call__(self, t: int) -> float:
        return self.value


@dataclass(frozen=True)
class CosineDecay:
    """From 1 to 0 along a half cosine of ``period`` steps (``eq:mudecay``).

    Raises:
        ValueError: ``period`` is not positive.
    """

    period: int = 200

    def __post_init__(self) -> None:
        if self.period <= 0:
            raise ValueError(f"the period must be positive, not {self.period}; for a weight of 0 use 'none'")

    def __call__(self, t: int) -> float:
        return cosine_decay(t, self.period)


_FORMS = "'none', 'constant', 'constant:0.5', 'cosine:200', a number, or a function of the step"


def make_schedule(spec: str | float | Schedule) -> Schedule:
    """Turn a setting into a schedule.

    Args:
        spec: ``"none"`` (0), ``"constant"`` (1), ``"constant:<value>"``, ``"cosine:<steps>"``, a number (that weight),
            or anything callable with a step.

    Raises:
        ValueError: none of these.
    """
    if callable(spec):
        return spec
    if isinstance(spec, Real) and not isinstance(spec, bool):
        if abs(spec) > sys.float_info.max:
            raise ValueError(f"a weight must be a finite number, not {spec}")
        return Constant(float(spec))
    if isinstance(spec, str):
        name, _, argument = spec.partition(":")
        try:
            if name == "none" and not argument:
                return Constant(0.0)
            if name == "constant":
                return Constant(float(argument or 1.0))
            if name == "cosine" and argument:
                return CosineDecay(int(argument))
        except ValueError as error:
            raise ValueError(f"bad schedule {spec!r} ({error}): use {_FORMS}") from None
    raise ValueError(f"bad schedule {spec!r}: use {_FORMS}")
