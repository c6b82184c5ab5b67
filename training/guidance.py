"""Advice on settings that couple badly: from the settings alone before a run, and from its metrics while it goes.

The rules are the paper's (``sec:discusshyper``) and what runs of tiny policies showed. Advice stops nothing: it says
what was found and which setting mends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig

from agents.trajectory import Layout
from training.algorithms.choices import Aggregation, BoundsMode, Curriculum, Estimator, ReplayUnit, Singleton
from training.algorithms.settings import SpearSettings

POSITIVE_SHARE = 0.45
"""Share of a step's rows that beat their group, as runs of tiny policies had it."""
DRY_RUN = 10
"""A run of fewer steps is a trial, whose schedules are those of the real one."""
WINDOW = 5
"""Steps that a finding about a run is averaged over."""
PAPER_BOUNDS = "the paper fixes 2 to 60 for agents (outcome 10 or 0) and 1 to 40 for mathematics"


@dataclass(frozen=True)
class Advice:
    """One finding: ``topic`` names its rule, ``mend`` the setting to change, if any."""

    topic: str
    finding: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.finding}: {self.mend}" if self.mend else self.finding


@dataclass(frozen=True)
class RunShape:
    """Sizes of a run that the settings of the algorithm couple with."""

    tasks: int
    """Tasks a step."""
    group_size: int
    """Episodes of each task."""
    max_turns: int
    per_turn: bool
    """Each turn is a row; else each episode."""
    steps: int
    response_limit: int
    """Tokens a row's response may have."""

    @classmethod
    def of_config(cls, config: DictConfig, max_turns: int) -> RunShape:
        """Sizes in a composed configuration; ``max_turns`` is the environment's."""
        return cls(
            tasks=int(config.data.train_batch_size),
            group_size=int(config.actor_rollout_ref.rollout.n),
            max_turns=max_turns,
            per_turn=Layout(config.spear.env.layout) is Layout.PER_TURN,
            steps=int(config.trainer.total_training_steps),
            response_limit=int(config.data.max_response_length),
        )

    @property
    def most_rows(self) -> int:
        """Rows of a step, if every episode takes all its turns."""
        return self.tasks * self.group_size * (self.max_turns if self.per_turn else 1)


# ---- before a run ----------------------------------------------------------------------------------------------------
def review_settings(settings: SpearSettings, shape: RunShape) -> list[Advice]:
    """What in ``settings`` does not fit the sizes of the run, or each other."""
    return [advice for rule in _SETTING_RULES if (advice := rule(settings, shape)) is not None]


def _check_group_size(settings: SpearSettings, shape: RunShape) -> Advice | None:
    choice = settings.advantage
    if shape.group_size > 1 or choice.estimator is Estimator.GAE or choice.singleton is Singleton.RAW:
        return None
    return Advice(
        "group size",
        f"with one episode a task, every advantage of estimator {choice.estimator.value} is 0 and nothing is learned",
        "set actor_rollout_ref.rollout.n=8, or algorithm=ppo",
    )


def _check_group_filter(settings: SpearSettings, shape: RunShape) -> Advice | None:
    kept = max(1, int(settings.filter.groups * shape.tasks + 1e-9))
    if shape.tasks < 2 or kept > 1:
        return None
    return Advice(
        "group filter",
        f"spear.filter.groups={settings.filter.groups:g} keeps 1 of the {shape.tasks} groups of a step",
        "set spear.filter.groups=1, or more tasks in data.train_batch_size",
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
        f"{reward.failure:g} hardly reach ({PAPER_BOUNDS})",
        "set spear.cov.bounds=percentile, or spear.reward.success=10 spear.reward.failure=0",
    )


def _check_buffer(settings: SpearSettings, shape: RunShape) -> Advice | None:
    if not settings.sil.enabled:
        return None
    replay, needed = settings.replay, settings.sil.trigger_ratio * settings.replay.capacity
    if replay.max_age == 0:
        return Advice("replay buffer", "rows of age 0 alone are kept and never replayed", "set spear.replay.max_age=5")
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
        f"at most (some {POSITIVE_SHARE:.0%} beat their group) and they live {lifetime} steps, so that it will hardly "
        "ever replay",
        f"set spear.replay.capacity={capacity}, or a larger spear.replay.max_age",
    )


def _check_baseline(settings: SpearSettings, shape: RunShape) -> Advice | None:
    capacity, kept = settings.baseline.capacity, max(1, int(settings.filter.groups * shape.tasks + 1e-9))
    if not settings.sil.enabled or capacity == 0 or capacity >= kept:
        return None
    return Advice(
        "baseline buffer",
        f"spear.baseline.capacity={capacity} holds less than the {kept} group means of one step",
        f"set spear.baseline.capacity={max(settings.replay.capacity, kept)} (1 to 4 times spear.replay.capacity)",
    )


def _check_warmup(settings: SpearSettings, shape: RunShape) -> Advice | None:
    sil = settings.sil
    if not sil.enabled:
        return None
    if sil.gamma is Curriculum.NONE:
        return Advice("warm-up", "self-imitation is on with weight 0", "set spear.sil.gamma=cosine")
    if sil.gamma is Curriculum.CONSTANT or sil.warmup_steps <= shape.steps or shape.steps < DRY_RUN:
        return None
    return Advice(
        "warm-up",
        f"self-imitation warms up over {sil.warmup_steps} steps, the run has {shape.steps}: its weight ends at "
        f"{sil.weight(shape.steps):.2f}",
        f"set spear.sil.warmup_steps={shape.steps} or less",
    )


def _check_decay(settings: SpearSettings, shape: RunShape) -> Advice | None:
    reward = settings.reward
    if reward.mu is not Curriculum.COSINE or reward.decay_steps <= shape.steps or shape.steps < DRY_RUN:
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
    if reward.mu is Curriculum.NONE or reward.decay_steps == 0 or spread > 1.0:
        return None
    return Advice(
        "reward scale",
        f"outcomes differ by {spread:g}, while tool calls earn up to 1: an episode that fails can beat one that wins",
        "set spear.reward.success=1 spear.reward.failure=-1",
    )


def _check_scale_factor(settings: SpearSettings, shape: RunShape) -> Advice | None:
    loss, limit = settings.loss, shape.response_limit
    if loss.aggregation is not Aggregation.SEQ_MEAN_TOKEN_SUM_NORM or loss.scale_factor is None:
        return None
    # A conversation's limit counts what the environment says too, and that is no part of the loss.
    least = 0.25 if shape.per_turn else 0.05
    if least <= loss.scale_factor / limit <= 4.0:
        return None
    return Advice(
        "scale factor",
        f"the loss is divided by spear.loss.scale_factor={loss.scale_factor:g}, a response has up to {limit} tokens, "
        "so the gradient is far from the size that the learning rate was chosen for",
        f"set spear.loss.scale_factor={limit}",
    )


def _check_anchors(settings: SpearSettings, shape: RunShape) -> Advice | None:
    if settings.advantage.estimator is not Estimator.GIGPO or shape.per_turn:
        return None
    return Advice(
        "anchors",
        "GiGPO compares turns, and with one row an episode there is none to compare",
        "set spear.env.layout=per_turn, or an algorithm without GiGPO",
    )


_SETTING_RULES: tuple[Callable[[SpearSettings, RunShape], Advice | None], ...] = (
    _check_group_size,
    _check_group_filter,
    _check_fixed_bounds,
    _check_buffer,
    _check_baseline,
    _check_warmup,
    _check_decay,
    _check_reward_scale,
    _check_scale_factor,
    _check_anchors,
)


# ---- while a run goes ------------------------------------------------------------------------------------------------
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
        records: metrics as :func:`agents.metrics.read_history` gives them.
        settings: ``spear`` node of the run.
    """
    history = History(records)
    return [advice for rule in _HISTORY_RULES if (advice := rule(history, settings)) is not None]


def _tell_bounds(history: History, settings: SpearSettings) -> Advice | None:
    lower, upper = history.get("cov/lower"), history.get("cov/upper")
    if not lower or settings.cov.bounds is not BoundsMode.PERCENTILE:
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
        "set spear.cov.bounds=percentile" if fixed else "raise spear.cov.lower_top, the share that the bound begins at",
    )


def _find_equal_groups(history: History, settings: SpearSettings) -> Advice | None:
    equal = history.recent("groups/equal")
    if equal is None or equal < 0.9 or settings.advantage.estimator is Estimator.GAE:
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
