"""Schedules of gamma and mu, by training step or by metrics of the previous step.

A schedule is a function ``f(t, steps, metrics, **options) -> weight``. ``t`` is the global step, from 1; ``steps`` the
setting of the length (``warmup_steps``, ``decay_steps``); ``metrics`` are those of the previous step, empty at the
first; ``options`` is the setting of that name.
"""

from __future__ import annotations

from spear_envs.core.rewards import cosine_decay, cosine_warmup
from spear_training.algorithms.registry import GAMMA, MU
from spear_training.algorithms.settings import Metrics


@GAMMA.register("cosine")
def warm_up(t: int, steps: int, metrics: Metrics) -> float:
    """From 0 to 1 along a half cosine of ``steps`` (``eq:gamma``)."""
    return cosine_warmup(t, steps)


@MU.register("cosine")
def decay(t: int, steps: int, metrics: Metrics) -> float:
    """From 1 to 0 along a half cosine of ``steps`` (``eq:mudecay``)."""
    return cosine_decay(t, steps)


@GAMMA.register("constant")
@MU.register("constant")
def stay(t: int, steps: int, metrics: Metrics, value: float = 1.0) -> float:
    """``value`` at every step."""
    return value


@GAMMA.register("none")
@MU.register("none")
def leave_out(t: int, steps: int, metrics: Metrics) -> float:
    """0 at every step."""
    return 0.0


@GAMMA.register("entropy")
def follow_entropy(t: int, steps: int, metrics: Metrics, low: float = 0.1, high: float = 0.5) -> float:
    """Cosine warm-up, times the position of the policy's entropy between ``low`` (0) and ``high`` (1), nats per token.

    Self-imitation sharpens a policy; this schedule stops when little entropy is left for exploration.
    """
    return cosine_warmup(t, steps) * _rise(metrics.get("entropy/token-mean", high), low, high)


@GAMMA.register("success")
def follow_success(t: int, steps: int, metrics: Metrics, target: float = 0.5) -> float:
    """The success rate of the previous step over ``target``, at most 1: rare successes are not yet imitated."""
    return _rise(metrics.get("success/all", 0.0), 0.0, target)


@MU.register("success")
def fade_with_success(t: int, steps: int, metrics: Metrics, target: float = 0.5) -> float:
    """1 without success, 0 from ``target`` on: a policy that solves tasks does not need a reward for tool calls."""
    return 1.0 - _rise(metrics.get("success/all", 0.0), 0.0, target)


@MU.register("novelty")
def follow_novelty(t: int, steps: int, metrics: Metrics, target: float = 0.5) -> float:
    """The share of new states over ``target``, at most 1: reward tool calls while they lead to new states."""
    return _rise(metrics.get("anchors/new", target), 0.0, target)


def _rise(value: float, low: float, high: float) -> float:
    """0 up to ``low``, 1 from ``high`` on, linear between."""
    if value >= high:
        return 1.0
    return 0.0 if value <= low else (value - low) / (high - low)
