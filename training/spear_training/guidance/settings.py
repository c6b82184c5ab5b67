"""Rules about settings and the sizes of a run, applied before it starts."""

from __future__ import annotations

from collections.abc import Callable

from spear_training.algorithms.choices import BoundsMode, ReplayUnit, Singleton
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance.advice import Advice, RunShape

POSITIVE_SHARE = 0.45
"""Share of a step's rows that beat their group, measured on runs of tiny policies."""
DRY_RUN = 10
"""A run of fewer steps is a trial with the schedules of the real one."""


def review_settings(settings: SpearSettings, shape: RunShape) -> list[Advice]:
    """Advice on settings that do not fit the sizes of the run, or each other."""
    return [advice for rule in _SETTING_RULES if (advice := rule(settings, shape)) is not None]


def _check_group_size(settings: SpearSettings, shape: RunShape) -> Advice | None:
    choice = settings.advantage
    if shape.group_size > 1 or settings.advantage.needs_critic or choice.singleton is Singleton.RAW:
        return None
    return Advice(
        "group size",
        f"with one episode a task, every advantage of estimator {choice.estimator} is 0 and nothing is learned",
        "set actor_rollout_ref.rollout.n=8, or algorithm=ppo",
    )


def _check_fixed_bounds(settings: SpearSettings, shape: RunShape) -> Advice | None:
    cov, reward = settings.cov, settings.reward
    spread = reward.success - reward.failure
    fixed = cov.bounds is BoundsMode.FIXED and cov.lower is not None
    if not (settings.sil.enabled and cov.ratio > 0 and fixed and cov.lower >= spread):  # type: ignore[operator]
        return None
    return Advice(
        "covariance bounds",
        f"the covariance clip begins at {cov.lower:g}, which advantages of outcomes {reward.success:g} and "
        f"{reward.failure:g} hardly reach (the paper has 2 to 60 for outcomes 10 and 0, and 1 to 40 for mathematics)",
        "set spear.cov.bounds=running, or spear.reward.success=10 spear.reward.failure=0",
    )


def _check_buffer(settings: SpearSettings, shape: RunShape) -> Advice | None:
    if not settings.sil.enabled:
        return None
    replay, needed = settings.replay, settings.sil.trigger_ratio * settings.replay.capacity
    if replay.max_age == 0:
        return Advice("replay buffer", "rows are dropped before a step can replay them", "set spear.replay.max_age=5")
    by_row = replay.unit is ReplayUnit.SAMPLE
    units = shape.most_rows if by_row else shape.tasks * shape.group_size
    kept = units * settings.filter.groups
    gain = POSITIVE_SHARE * kept
    lifetime = shape.steps if replay.max_age is None else replay.max_age
    if needed <= gain * lifetime:
        return None
    capacity = max(1, int(min(kept, 0.8 * gain * lifetime) / settings.sil.trigger_ratio))
    return Advice(
        "replay buffer",
        f"the replay buffer starts at {needed:g} {'rows' if by_row else 'trajectories'}, but a step brings {gain:.0f} "
        f"at most (some {POSITIVE_SHARE:.0%} beat their group) and they live {lifetime} steps, so it will hardly ever "
        "replay",
        f"set spear.replay.capacity={capacity}, or a larger spear.replay.max_age",
    )


def _check_warmup(settings: SpearSettings, shape: RunShape) -> Advice | None:
    sil = settings.sil
    if not sil.enabled:
        return None
    if sil.gamma == "none":
        return Advice("warm-up", "self-imitation is on with weight 0", "set spear.sil.gamma=cosine")
    if sil.gamma != "cosine" or sil.warmup_steps <= shape.steps or shape.steps < DRY_RUN:
        return None
    return Advice(
        "warm-up",
        f"self-imitation warms up over {sil.warmup_steps} steps, the run has {shape.steps}: its weight ends at "
        f"{sil.weight(shape.steps):.2f}",
        f"set spear.sil.warmup_steps={shape.steps} or less",
    )


def _check_decay(settings: SpearSettings, shape: RunShape) -> Advice | None:
    reward = settings.reward
    if reward.mu != "cosine" or reward.decay_steps <= shape.steps or shape.steps < DRY_RUN:
        return None
    return Advice(
        "decay",
        f"the tool-call reward fades over {reward.decay_steps} steps, the run has {shape.steps}: it ends with "
        f"{reward.weight(shape.steps):.2f} of its weight",
        f"set spear.reward.decay_steps={shape.steps} or less",
    )


def _check_reward_scale(settings: SpearSettings, shape: RunShape) -> Advice | None:
    reward = settings.reward
    spread = reward.success - reward.failure
    if reward.mu == "none" or reward.decay_steps == 0 or spread > 1.0:
        return None
    return Advice(
        "reward scale",
        f"outcomes differ by {spread:g}, while tool calls earn up to 1: an episode that fails can beat one that wins",
        "set spear.reward.success=1 spear.reward.failure=-1",
    )


def _check_anchors(settings: SpearSettings, shape: RunShape) -> Advice | None:
    if settings.advantage.estimator != "gigpo" or shape.per_turn:
        return None
    return Advice(
        "anchors",
        "GiGPO compares turns, and with one row an episode there are none to compare",
        "set spear.env.layout=per_turn, or an algorithm without GiGPO",
    )


def _check_sequence_clip(settings: SpearSettings, shape: RunShape) -> Advice | None:
    if settings.loss.policy != "gspo" or settings.clip.low <= 0.01:
        return None
    return Advice(
        "sequence clip",
        f"gspo clips the ratio of a sequence, the mean of its tokens', which hardly ever leaves 1 by "
        f"spear.clip.low={settings.clip.low:g}",
        "set spear.clip.low=0.0003 spear.clip.high=0.0004, as its authors do",
    )


_SETTING_RULES: tuple[Callable[[SpearSettings, RunShape], Advice | None], ...] = (
    _check_group_size,
    _check_fixed_bounds,
    _check_buffer,
    _check_warmup,
    _check_decay,
    _check_reward_scale,
    _check_anchors,
    _check_sequence_clip,
)
