"""Rules about settings and the sizes of a run, applied before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from spear_training.algorithms.choices import BoundsMode, ReplayUnit, Singleton
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance.advice import Advice, RunShape

POSITIVE_SHARE = 0.45
"""Share of a step's rows that beat their group, measured on runs of tiny policies."""
DRY_RUN = 10
"""A run of fewer steps is a trial with the schedules of the real one."""


def review_settings(settings: SpearSettings, shape: RunShape) -> list[Advice]:
    """Advice on settings that do not fit the sizes of the run, or each other."""
    return [*_review_imitation(settings, shape), *_review_others(settings, shape)]


def _review_imitation(settings: SpearSettings, shape: RunShape) -> Iterator[Advice]:
    sil, replay, reward = settings.sil, settings.replay, settings.reward
    if not sil.enabled:
        return
    lower, spread = settings.cov.lower, reward.success - reward.failure
    fixed = settings.cov.ratio > 0 and settings.cov.bounds is BoundsMode.FIXED
    if fixed and lower is not None and lower >= spread:
        yield Advice(
            "covariance bounds",
            f"the covariance clip begins at {lower:g}, which advantages of outcomes {reward.success:g} and "
            f"{reward.failure:g} hardly reach (the paper has 2 to 60 for outcomes 10 and 0, and 1 to 40 for "
            "mathematics)",
            "set spear.cov.bounds=running, or spear.reward.success=10 spear.reward.failure=0",
        )
    by_row = replay.unit is ReplayUnit.SAMPLE
    kept = (shape.most_rows if by_row else shape.tasks * shape.group_size) * settings.filter.groups
    needed, gain = sil.trigger_ratio * replay.capacity, POSITIVE_SHARE * kept
    lifetime = shape.steps if replay.max_age is None else replay.max_age
    if lifetime == 0:
        yield Advice("replay buffer", "rows are dropped before a step can replay them", "set spear.replay.max_age=5")
    elif needed > gain * lifetime:
        capacity = max(1, int(min(kept, 0.8 * gain * lifetime) / sil.trigger_ratio))
        yield Advice(
            "replay buffer",
            f"the replay buffer starts at {needed:g} {'rows' if by_row else 'trajectories'}, but a step brings "
            f"{gain:.0f} at most (some {POSITIVE_SHARE:.0%} beat their group) and they live {lifetime} steps, so it "
            "will hardly ever replay",
            f"set spear.replay.capacity={capacity}, or a larger spear.replay.max_age",
        )
    if sil.gamma == "none":
        yield Advice("warm-up", "self-imitation is on with weight 0", "set spear.sil.gamma=cosine")
    elif sil.gamma == "cosine" and sil.warmup_steps > shape.steps >= DRY_RUN:
        yield Advice(
            "warm-up",
            f"self-imitation warms up over {sil.warmup_steps} steps, the run has {shape.steps}: its weight ends at "
            f"{sil.weight(shape.steps):.2f}",
            f"set spear.sil.warmup_steps={shape.steps} or less",
        )


def _review_others(settings: SpearSettings, shape: RunShape) -> Iterator[Advice]:
    choice, reward = settings.advantage, settings.reward
    if shape.group_size == 1 and not choice.needs_critic and choice.singleton is not Singleton.RAW:
        yield Advice(
            "group size",
            f"with one episode a task, every advantage of estimator {choice.estimator} is 0 and nothing is learned",
            "set actor_rollout_ref.rollout.n=8, or algorithm=ppo",
        )
    if choice.estimator == "gigpo" and not shape.per_turn:
        yield Advice(
            "anchors",
            "GiGPO compares turns, and with one row an episode there are none to compare",
            "set spear.env.layout=per_turn, or an algorithm without GiGPO",
        )
    if reward.mu == "cosine" and reward.decay_steps > shape.steps >= DRY_RUN:
        yield Advice(
            "decay",
            f"the tool-call reward fades over {reward.decay_steps} steps, the run has {shape.steps}: it ends with "
            f"{reward.weight(shape.steps):.2f} of its weight",
            f"set spear.reward.decay_steps={shape.steps} or less",
        )
    spread = reward.success - reward.failure
    if reward.mu != "none" and reward.decay_steps > 0 and spread <= 1.0:
        yield Advice(
            "reward scale",
            f"outcomes differ by {spread:g}, while tool calls earn up to 1: an episode that fails can beat one that "
            "wins",
            "set spear.reward.success=1 spear.reward.failure=-1",
        )
    if settings.loss.policy == "gspo" and settings.clip.low > 0.01:
        yield Advice(
            "sequence clip",
            f"gspo clips the ratio of a sequence, the mean of its tokens', which hardly ever leaves 1 by "
            f"spear.clip.low={settings.clip.low:g}",
            "set spear.clip.low=0.0003 spear.clip.high=0.0004, as its authors do",
        )
