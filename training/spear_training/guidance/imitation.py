"""Rules about the replay buffer and what is learned from it."""

from __future__ import annotations

import math

from spear_training.algorithms.choices import BoundsMode, FormatMode
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance.advice import PAPER_BOUNDS, Advice
from spear_training.guidance.history import WINDOW, History, Rule


def _tell_bounds(history: History, settings: SpearSettings) -> Advice | None:
    lower, upper = history.get("cov/lower"), history.get("cov/upper")
    if not lower or settings.cov.bounds is BoundsMode.FIXED:
        return None
    return Advice(
        "measured bounds",
        f"covariance bounds measured at the first replay: {lower[0]:.3g} to {upper[0]:.3g} ({PAPER_BOUNDS})",
    )


def _find_idle_clip(history: History, settings: SpearSettings) -> Advice | None:
    fractions = history.get("clip/cov_fraction")
    if settings.cov.ratio == 0 or len(fractions) < 3 or any(fractions):
        return None
    fixed = settings.cov.bounds is BoundsMode.FIXED
    return Advice(
        "covariance clip",
        f"the covariance clip took out no token in {len(fractions)} replays: no covariance lies between its bounds",
        "set spear.cov.bounds=running" if fixed else "raise spear.cov.lower_top, the share that the bound begins at",
    )


def _find_late_bounds(history: History, settings: SpearSettings) -> Advice | None:
    share, cov = history.recent("clip/cov_fraction"), settings.cov
    if cov.bounds is not BoundsMode.RUNNING or not share or share >= 0.25 * cov.ratio:
        return None
    return Advice(
        "late bounds",
        f"the covariance clip takes out {share:.2%} of the replayed tokens where spear.cov.ratio is {cov.ratio:.2%}: "
        "few lie between its bounds, which lag behind covariances that shrink",
        "lower spear.cov.momentum, or raise spear.cov.lower_top",
    )


def _find_empty_buffer(history: History, settings: SpearSettings) -> Advice | None:
    age = settings.replay.max_age if settings.replay.max_age is not None else WINDOW
    if not settings.sil.enabled or history.get("replay/drawn") or len(history) < max(10, 2 * age):
        return None
    largest = max(history.get("replay/size"), default=0.0)
    needed = settings.sil.trigger_ratio * settings.replay.capacity
    held = f"the buffer held {largest:.0f} at most and starts at {needed:g}"
    finding = f"nothing was replayed in {len(history)} steps, as {held}"
    if largest == 0 and sum(history.get("replay/dropped_other")) > 0:
        return Advice("empty buffer", finding, "no good row called a tool, set spear.replay.require_tool_call=false")
    if largest == 0:
        return Advice("empty buffer", finding, "no row beat its group, take easier tasks or a better warm start")
    # Not a smaller buffer: one that replays from the first steps on, of few rows, did worse than none.
    longer = math.ceil(1.25 * needed * age / largest)
    return Advice("empty buffer", finding, f"set spear.replay.max_age={longer} in a new run, so that the buffer fills")


def _find_closed_gate(history: History, settings: SpearSettings) -> Advice | None:
    considered, eligible = history.get("replay/considered"), history.get("replay/eligible")
    if len(considered) < 3 or sum(eligible) >= 0.05 * sum(considered):
        return None
    return Advice(
        "recalibration",
        f"only {sum(eligible) / max(1.0, sum(considered)):.1%} of the stored rows beat the median reward of late",
        "lower spear.replay.max_age, or spear.baseline.capacity where the rewards have fallen",
    )


def _find_stale_rows(history: History, settings: SpearSettings) -> Advice | None:
    share = history.recent("replay/ess")
    if share is None or share >= 0.5:
        return None
    return Advice(
        "stale replay",
        f"the replayed tokens count as {share:.0%} of their number: the policy has left the one that wrote them",
        "lower spear.replay.max_age or spear.replay.capacity, so that rows are replayed sooner, or the learning rate",
    )


def _find_imitated_failures(history: History, settings: SpearSettings) -> Advice | None:
    failed = history.recent("replay/failed")
    if failed is None or failed <= 0.5:
        return None
    mends = []
    if (history.recent("spear/mu") or 0.0) > 0.05:
        mends.append("fade the reward for tool calls sooner (spear.reward.decay_steps, or spear.reward.mu=none)")
    elif settings.reward.format is FormatMode.BONUS:
        mends.append("set spear.reward.format=none")
    if not settings.replay.require_tool_call:
        mends.append("set spear.replay.require_tool_call=true where failures call no tool")
    if settings.sil.gamma != "success":
        mends.append("let imitation wait for success (spear.sil.gamma=success)")
    mends.append("begin with easier tasks or a better warm start")
    return Advice(
        "imitated failures",
        f"{failed:.0%} of the replayed rows are of failed episodes: where success is rare, a failure with a bonus "
        "beats the baseline",
        ", or ".join(mends),
    )


IMITATION_RULES: tuple[Rule, ...] = (
    _tell_bounds,
    _find_idle_clip,
    _find_late_bounds,
    _find_empty_buffer,
    _find_closed_gate,
    _find_stale_rows,
    _find_imitated_failures,
)
