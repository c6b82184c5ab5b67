"""Rules about the metrics of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    def recent(self, name: str, fewer: float) -> float:
        """Median of the last :data:`WINDOW` values, which one odd step does not move; ``fewer`` if there are fewer."""
        values = self.get(name)[-WINDOW:]
        return float(np.median(values)) if len(values) == WINDOW else fewer


def review_history(records: Sequence[Mapping[str, Any]], settings: SpearSettings) -> list[Advice]:
    """Advice from the metrics of a run."""
    history = History(records)
    rules = (_review_clip, _review_replay, _review_rollouts, _review_policy)
    return [advice for rule in rules for advice in rule(history, settings)]


def _review_clip(history: History, settings: SpearSettings) -> Iterator[Advice]:
    fractions = history.get("clip/cov_fraction")
    if settings.cov.ratio > 0 and len(fractions) >= 3 and not any(fractions):
        fixed = settings.cov.bounds is BoundsMode.FIXED
        yield Advice(
            "covariance clip",
            f"the covariance clip removed no token in {len(fractions)} replays: no covariance lies between its bounds",
            "set spear.cov.bounds=running"
            if fixed
            else "raise spear.cov.lower_top, the share that the bound begins at",
        )


def _review_replay(history: History, settings: SpearSettings) -> Iterator[Advice]:
    replay = settings.replay
    age = replay.max_age if replay.max_age is not None else WINDOW
    if settings.sil.enabled and not history.get("replay/drawn") and len(history) >= max(10, 2 * age):
        largest = max(history.get("replay/size"), default=0.0)
        needed = settings.sil.trigger_ratio * replay.capacity
        mend = "no row beat its group, take easier tasks or a better warm start"
        if largest > 0:
            # Not a smaller buffer: one that replays few rows from the first steps on did worse than none.
            longer = math.ceil(1.25 * needed * age / largest)
            mend = f"set spear.replay.max_age={longer} in a new run, so that the buffer fills"
        elif sum(history.get("replay/dropped_other")) > 0:
            mend = "no good row called a tool, set spear.replay.require_tool_call=false"
        yield Advice(
            "empty buffer",
            f"nothing was replayed in {len(history)} steps, as the buffer held {largest:.0f} at most and starts at "
            f"{needed:g}",
            mend,
        )
    if (share := history.recent("replay/ess", 1.0)) < 0.5:
        yield Advice(
            "stale replay",
            f"the effective number of replayed tokens is {share:.0%} of their count: the policy has moved away from "
            "the one that wrote them",
            "lower spear.replay.max_age or spear.replay.capacity, so that rows are replayed sooner, or the learning "
            "rate",
        )
    if (failed := history.recent("replay/failed", 0.0)) > 0.5:
        mends = []
        if history.recent("spear/mu", 0.0) > 0.05:
            mends.append("fade the reward for tool calls sooner (spear.reward.decay_steps, or spear.reward.mu=none)")
        elif settings.reward.format is FormatMode.BONUS:
            mends.append("set spear.reward.format=none")
        if not replay.require_tool_call:
            mends.append("set spear.replay.require_tool_call=true if failures call no tool")
        if settings.sil.gamma != "success":
            mends.append("let imitation wait for success (spear.sil.gamma=success)")
        yield Advice(
            "imitated failures",
            f"{failed:.0%} of the replayed rows are from failed episodes: where success is rare, a failure with a "
            "bonus beats the baseline",
            ", or ".join([*mends, "begin with easier tasks or a better warm start"]),
        )


def _review_rollouts(history: History, settings: SpearSettings) -> Iterator[Advice]:
    equal, won = history.recent("groups/equal", 0.0), history.recent("success/all", 0.0)
    if equal >= 0.9 and not settings.advantage.needs_critic:
        mend = "raise actor_rollout_ref.rollout.n or actor_rollout_ref.rollout.temperature"
        if won > 0.9:
            mend = "the tasks are mastered, take harder ones"
        elif won < 0.1:
            mend = (
                "the tasks are out of reach, begin with easier ones or a better warm start, or take an algorithm with "
                "the tool-call reward (algorithm=drbot_spear), which tells failures apart"
            )
        finding = f"in {equal:.0%} of the groups all episodes earned the same, so they teach nothing"
        yield Advice("equal advantages", finding, mend)
    # Groups that only a format term tells apart, once the tool-call reward has decayed.
    petty = (history.recent("groups/same_outcome", 0.0) - equal) / (1 - equal) if equal < 1 else 0.0
    divided = settings.advantage.normalize_std and settings.reward.format is not FormatMode.NONE
    if petty >= 0.5 and divided and not history.recent("spear/mu", 0.0):
        yield Advice(
            "petty differences",
            f"{petty:.0%} of the groups whose rewards differ have one outcome: what tells their episodes apart is the"
            " format reward, and divided by the deviation it counts as much as a win",
            "set spear.reward.format=none, or spear.advantage.normalize_std=false",
        )
    mends = {
        "overlong": "raise data.max_response_length, or set spear.filter.overlong=false",
        "void": "set spear.filter.void=off: only a malformed turn that stays in the loss makes such turns rarer",
        "repetition": "lower the temperature, or set spear.filter.repetition=false",
    }
    shares = {name: history.recent(f"mask/{name}", 0.0) for name in mends}
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] > 0.5:
        finding = f"the filter {worst!r} takes {shares[worst]:.0%} of the rows out of the loss"
        yield Advice("masks", finding, mends[worst])
    trained = history.get("rows/trained")[-WINDOW:]
    if len(trained) == WINDOW and not any(trained):
        yield Advice(
            "idle steps",
            f"no row was trained on in the last {WINDOW} steps",
            "look at fault/* and mask/* in the metrics, and switch off the filter that takes the rows out",
        )


def _review_policy(history: History, settings: SpearSettings) -> Iterator[Advice]:
    entropy = history.get("entropy/token-mean")
    if len(entropy) >= 2 * WINDOW and entropy[0] > 0:
        change = history.recent("entropy/token-mean", 0.0) / entropy[0]
        if change < 0.1:
            mend = "raise spear.sil.warmup_steps or spear.cov.ratio, or lower the learning rate"
            yield Advice("entropy", f"the entropy has collapsed to {change:.0%} of its first value", mend)
        if change > 2.0:
            mend = "lower the learning rate, or spear.reward.decay_steps"
            yield Advice("entropy", f"the entropy has grown to {change:.1f} times its first value", mend)
    # The ratio of a sequence has a clip so narrow that it decides many tokens of a healthy run.
    clipped = history.recent("clip/ppo_fraction", 0.0) * (settings.loss.policy != "gspo")
    distance = history.recent("kl/old", 0.0)
    if clipped > 0.3 or distance > 0.2:
        found = f"the ratio clip decides {clipped:.0%} of the tokens"
        if clipped <= 0.3:
            found = f"the policy is {distance:.2f} nats a token away from the one that played"
        yield Advice(
            "large updates",
            f"{found}: a step moves the policy too far",
            "lower actor_rollout_ref.actor.optim.lr, or raise actor_rollout_ref.actor.ppo_mini_batch_size",
        )
    apart = history.recent("training/rollout_log_probs_diff_mean", 0.0)
    if apart > APART and not history.recent("staleness/mean", 0.0):  # older weights differ by design
        yield Advice(
            "rollout engine",
            f"log-probs of the rollout engine and of the actor differ by {apart:.2f} on average",
            "give both the same precision: actor_rollout_ref.rollout.dtype",
        )
