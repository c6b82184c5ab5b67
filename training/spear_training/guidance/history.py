"""Rules about the metrics of a run that goes on or is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spear_training.algorithms.choices import BoundsMode
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance.advice import PAPER_BOUNDS, Advice

WINDOW = 5
"""Steps that a finding about a run is averaged over."""


class History:
    """Metrics of the steps of a run, in order; what is missing or not finite in a step is left out."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.steps = [record for record in records if "training/global_step" in record]

    def __len__(self) -> int:
        return len(self.steps)

    def get(self, name: str) -> list[float]:
        """All values of a metric."""
        values = (step.get(name) for step in self.steps)
        return [float(value) for value in values if value is not None and np.isfinite(value)]

    def recent(self, name: str) -> float | None:
        """Mean of the last :data:`WINDOW` values; None where there are fewer."""
        values = self.get(name)[-WINDOW:]
        return float(np.mean(values)) if len(values) == WINDOW else None


def review_history(records: Sequence[Mapping[str, Any]], settings: SpearSettings) -> list[Advice]:
    """What the metrics of a run say against its settings.

    Args:
        records: metrics as :func:`spear_agents.metrics.read_history` gives them.
        settings: ``spear`` node of the run.
    """
    history = History(records)
    return [advice for rule in _HISTORY_RULES if (advice := rule(history, settings)) is not None]


def _tell_bounds(history: History, settings: SpearSettings) -> Advice | None:
    lower, upper = history.get("cov/lower"), history.get("cov/upper")
    if not lower or settings.cov.bounds is BoundsMode.FIXED:
        return None
    return Advice(
        "measured bounds",
        f"covariance bounds measured on the first replayed rows: {lower[0]:.3g} to {upper[0]:.3g} ({PAPER_BOUNDS})",
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


def _find_equal_groups(history: History, settings: SpearSettings) -> Advice | None:
    equal = history.recent("groups/equal")
    if equal is None or equal < 0.9 or settings.advantage.needs_critic:
        return None
    won = history.recent("success/all") or 0.0
    if won > 0.9:
        mend = "the tasks are mastered, take harder ones"
    elif won < 0.1:
        mend = (
            "the tasks are out of reach, begin with easier ones or a better warm start, or take an algorithm with the "
            "tool-call reward (algorithm=drbot_spear), which tells failures apart"
        )
    else:
        mend = "raise actor_rollout_ref.rollout.n or actor_rollout_ref.rollout.temperature"
    finding = f"in {equal:.0%} of the groups all episodes earned the same, which teaches nothing"
    return Advice("equal advantages", finding, mend)


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
    capacity = max(1, int(0.8 * largest / settings.sil.trigger_ratio))
    return Advice("empty buffer", finding, f"set spear.replay.capacity={capacity} in a new run")


def _find_closed_gate(history: History, settings: SpearSettings) -> Advice | None:
    considered, eligible = history.get("replay/considered"), history.get("replay/eligible")
    if len(considered) < 3 or sum(eligible) >= 0.05 * sum(considered):
        return None
    return Advice(
        "recalibration",
        f"only {sum(eligible) / max(1.0, sum(considered)):.1%} of the stored rows beat the median reward of late",
        "lower spear.replay.max_age, or spear.baseline.capacity where the rewards have fallen",
    )


def _find_entropy(history: History, settings: SpearSettings) -> Advice | None:
    entropy, recent = history.get("entropy/token-mean"), history.recent("entropy/token-mean")
    if recent is None or len(entropy) < 2 * WINDOW or entropy[0] <= 0:
        return None
    change = recent / entropy[0]
    if change < 0.1:
        mend = "raise spear.sil.warmup_steps or spear.cov.ratio, or lower the learning rate"
        return Advice("entropy", f"the entropy has collapsed to {change:.0%} of what it was at first", mend)
    if change > 2.0:
        mend = "lower the learning rate, or spear.reward.decay_steps"
        return Advice("entropy", f"the entropy has grown to {change:.1f} times what it was at first", mend)
    return None


def _find_masks(history: History, settings: SpearSettings) -> Advice | None:
    mends = {
        "overlong": "raise data.max_response_length, or set spear.filter.overlong=false",
        "void": "set spear.filter.void=off: only a malformed turn that stays in the loss pushes malformed turns down",
        "repetition": "lower the temperature, or set spear.filter.repetition=false",
    }
    shares = {name: history.recent(f"mask/{name}") or 0.0 for name in mends}
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] <= 0.5:
        return None
    return Advice("masks", f"the filter {worst!r} takes {shares[worst]:.0%} of the rows out of the loss", mends[worst])


def _find_idle_steps(history: History, settings: SpearSettings) -> Advice | None:
    if history.recent("rows/trained") != 0:
        return None
    return Advice(
        "idle steps",
        f"no row was trained on in the last {WINDOW} steps",
        "look at fault/* and mask/* in the metrics, and switch off the filter that takes the rows out",
    )


def _find_large_updates(history: History, settings: SpearSettings) -> Advice | None:
    clipped = history.recent("clip/ppo_fraction")
    if clipped is None or clipped <= 0.3:
        return None
    return Advice(
        "large updates",
        f"the ratio clip decides {clipped:.0%} of the tokens: a step moves the policy too far",
        "lower actor_rollout_ref.actor.optim.lr, or raise actor_rollout_ref.actor.ppo_mini_batch_size",
    )


def _find_disagreement(history: History, settings: SpearSettings) -> Advice | None:
    apart = history.recent("training/rollout_log_probs_diff_mean")
    if apart is None or apart <= 0.05:
        return None
    return Advice(
        "rollout engine",
        f"log-probs of the rollout engine and of the actor differ by {apart:.2f} on average",
        "give both the same precision: actor_rollout_ref.rollout.dtype",
    )


def _find_blind_critic(history: History, settings: SpearSettings) -> Advice | None:
    explained = history.recent("critic/explained_variance")
    if explained is None or explained >= 0.05 or len(history) < 4 * WINDOW:
        return None
    return Advice(
        "critic",
        f"after {len(history)} steps the critic explains {max(0.0, explained):.0%} of the returns' variance",
        "raise critic.optim.lr, or let it learn alone at first with spear.critic.warmup",
    )


_HISTORY_RULES: tuple[Callable[[History, SpearSettings], Advice | None], ...] = (
    _tell_bounds,
    _find_idle_clip,
    _find_equal_groups,
    _find_empty_buffer,
    _find_closed_gate,
    _find_entropy,
    _find_masks,
    _find_idle_steps,
    _find_large_updates,
    _find_disagreement,
    _find_blind_critic,
)
