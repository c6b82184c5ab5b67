"""Rules about the metrics of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spear_training.algorithms.choices import BoundsMode, FormatMode
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance.advice import Advice

WINDOW = 5
"""Steps that a finding rests on."""
APART = 0.05
"""Largest acceptable mean difference of log-probs between rollouts and trainer, nats."""


class History:
    """Metrics of the steps of a run, in order; missing and non-finite values are left out."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.steps = [record for record in records if "training/global_step" in record]

    def __len__(self) -> int:
        return len(self.steps)

    def get(self, name: str) -> list[float]:
        """All values of a metric."""
        values = (step.get(name) for step in self.steps)
        return [float(value) for value in values if value is not None and np.isfinite(value)]

    def recent(self, name: str) -> float | None:
        """Median of the last :data:`WINDOW` values, which one odd step does not move; None if there are fewer."""
        values = self.get(name)[-WINDOW:]
        return float(np.median(values)) if len(values) == WINDOW else None


def review_history(records: Sequence[Mapping[str, Any]], settings: SpearSettings) -> list[Advice]:
    """Advice from the metrics of a run."""
    history = History(records)
    return [advice for rule in _RULES if (advice := rule(history, settings)) is not None]


# ---- replay ----------------------------------------------------------------------------------------------------------
def _find_idle_clip(history: History, settings: SpearSettings) -> Advice | None:
    fractions = history.get("clip/cov_fraction")
    if settings.cov.ratio == 0 or len(fractions) < 3 or any(fractions):
        return None
    fixed = settings.cov.bounds is BoundsMode.FIXED
    return Advice(
        "covariance clip",
        f"the covariance clip removed no token in {len(fractions)} replays: no covariance lies between its bounds",
        "set spear.cov.bounds=running" if fixed else "raise spear.cov.lower_top, the share that the bound begins at",
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
    # Not a smaller buffer: one that replays few rows from the first steps on did worse than none.
    longer = math.ceil(1.25 * needed * age / largest)
    return Advice("empty buffer", finding, f"set spear.replay.max_age={longer} in a new run, so that the buffer fills")


def _find_stale_rows(history: History, settings: SpearSettings) -> Advice | None:
    share = history.recent("replay/ess")
    if share is None or share >= 0.5:
        return None
    return Advice(
        "stale replay",
        f"the effective number of replayed tokens is {share:.0%} of their count: the policy has moved away from the "
        "one that wrote them",
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
        mends.append("set spear.replay.require_tool_call=true if failures call no tool")
    if settings.sil.gamma != "success":
        mends.append("let imitation wait for success (spear.sil.gamma=success)")
    mends.append("begin with easier tasks or a better warm start")
    return Advice(
        "imitated failures",
        f"{failed:.0%} of the replayed rows are from failed episodes: where success is rare, a failure with a bonus "
        "beats the baseline",
        ", or ".join(mends),
    )


# ---- rollouts --------------------------------------------------------------------------------------------------------
def _find_equal_groups(history: History, settings: SpearSettings) -> Advice | None:
    equal = history.recent("groups/equal")
    if equal is None or equal < 0.9 or settings.advantage.needs_critic:
        return None
    won = history.recent("success/all") or 0.0
    mend = "raise actor_rollout_ref.rollout.n or actor_rollout_ref.rollout.temperature"
    if won > 0.9:
        mend = "the tasks are mastered, take harder ones"
    elif won < 0.1:
        mend = (
            "the tasks are out of reach, begin with easier ones or a better warm start, or take an algorithm with the "
            "tool-call reward (algorithm=drbot_spear), which tells failures apart"
        )
    finding = f"in {equal:.0%} of the groups all episodes earned the same, so they teach nothing"
    return Advice("equal advantages", finding, mend)


def _find_petty_differences(history: History, settings: SpearSettings) -> Advice | None:
    """Groups that only a format term tells apart, once the tool-call reward has decayed."""
    equal, same, mu = (history.recent(name) for name in ("groups/equal", "groups/same_outcome", "spear/mu"))
    if equal is None or same is None or mu or equal >= 1 or not settings.advantage.normalize_std:
        return None
    petty = (same - equal) / (1 - equal)
    if settings.reward.format is FormatMode.NONE or petty < 0.5:
        return None
    return Advice(
        "petty differences",
        f"{petty:.0%} of the groups whose rewards differ have one outcome: what tells their episodes apart is the"
        " format reward, and divided by the deviation it counts as much as a win",
        "set spear.reward.format=none, or spear.advantage.normalize_std=false",
    )


def _find_masks(history: History, settings: SpearSettings) -> Advice | None:
    mends = {
        "overlong": "raise data.max_response_length, or set spear.filter.overlong=false",
        "void": "set spear.filter.void=off: only a malformed turn that stays in the loss makes such turns rarer",
        "repetition": "lower the temperature, or set spear.filter.repetition=false",
    }
    shares = {name: history.recent(f"mask/{name}") or 0.0 for name in mends}
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] <= 0.5:
        return None
    return Advice("masks", f"the filter {worst!r} takes {shares[worst]:.0%} of the rows out of the loss", mends[worst])


def _find_idle_steps(history: History, settings: SpearSettings) -> Advice | None:
    trained = history.get("rows/trained")[-WINDOW:]
    if len(trained) < WINDOW or any(trained):
        return None
    return Advice(
        "idle steps",
        f"no row was trained on in the last {WINDOW} steps",
        "look at fault/* and mask/* in the metrics, and switch off the filter that takes the rows out",
    )


# ---- the policy ------------------------------------------------------------------------------------------------------
def _find_entropy(history: History, settings: SpearSettings) -> Advice | None:
    entropy, recent = history.get("entropy/token-mean"), history.recent("entropy/token-mean")
    if recent is None or len(entropy) < 2 * WINDOW or entropy[0] <= 0:
        return None
    change = recent / entropy[0]
    if change < 0.1:
        mend = "raise spear.sil.warmup_steps or spear.cov.ratio, or lower the learning rate"
        return Advice("entropy", f"the entropy has collapsed to {change:.0%} of its first value", mend)
    if change > 2.0:
        mend = "lower the learning rate, or spear.reward.decay_steps"
        return Advice("entropy", f"the entropy has grown to {change:.1f} times its first value", mend)
    return None


def _find_large_updates(history: History, settings: SpearSettings) -> Advice | None:
    # The ratio of a sequence has a clip so narrow that it decides many tokens of a healthy run.
    clipped = (history.recent("clip/ppo_fraction") or 0.0) * (settings.loss.policy != "gspo")
    distance = history.recent("kl/old") or 0.0
    if clipped <= 0.3 and distance <= 0.2:
        return None
    found = f"the ratio clip decides {clipped:.0%} of the tokens"
    if clipped <= 0.3:
        found = f"the policy is {distance:.2f} nats a token away from the one that played"
    return Advice(
        "large updates",
        f"{found}: a step moves the policy too far",
        "lower actor_rollout_ref.actor.optim.lr, or raise actor_rollout_ref.actor.ppo_mini_batch_size",
    )


def _find_disagreement(history: History, settings: SpearSettings) -> Advice | None:
    apart = history.recent("training/rollout_log_probs_diff_mean")
    if apart is None or apart <= APART or history.recent("staleness/mean"):  # older weights differ by design
        return None
    return Advice(
        "rollout engine",
        f"log-probs of the rollout engine and of the actor differ by {apart:.2f} on average",
        "give both the same precision: actor_rollout_ref.rollout.dtype",
    )


_RULES: tuple[Callable[[History, SpearSettings], Advice | None], ...] = (
    _find_idle_clip,
    _find_empty_buffer,
    _find_stale_rows,
    _find_imitated_failures,
    _find_equal_groups,
    _find_petty_differences,
    _find_entropy,
    _find_masks,
    _find_idle_steps,
    _find_large_updates,
    _find_disagreement,
)
