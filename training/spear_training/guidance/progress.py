"""Rules about rollouts, the policy and the critic."""

from __future__ import annotations

from spear_agents.usage import THRASHING
from spear_training.algorithms.choices import FormatMode
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance.advice import Advice
from spear_training.guidance.history import WINDOW, History, Rule

MASKED = 0.5
"""Share of the rows that a filter should not take out of the loss."""

PETTY = 0.5
"""Share of the groups with unlike rewards that should not owe them to the format alone."""

APART = 0.05
"""Mean difference of log-probs between rollouts and trainer, in nats, that is too much."""


def _find_equal_groups(history: History, settings: SpearSettings) -> Advice | None:
    equal = history.recent("groups/equal")
    if equal is None or equal < 0.9 or settings.advantage.needs_critic:
        return None
    finding = f"in {equal:.0%} of the groups all episodes earned the same, which teaches nothing"
    return Advice("equal advantages", finding, _judge_tasks(history))


def _find_petty_differences(history: History, settings: SpearSettings) -> Advice | None:
    """Groups that a format term or tool calls alone tell apart, once the tool-call reward has decayed."""
    equal, same, mu = (history.recent(name) for name in ("groups/equal", "groups/same_outcome", "spear/mu"))
    if equal is None or same is None or mu or equal >= 1 or not settings.advantage.normalize_std:
        return None
    if settings.reward.format is FormatMode.NONE:
        return None
    petty = (same - equal) / (1 - equal)
    if petty < PETTY:
        return None
    return Advice(
        "petty differences",
        f"{petty:.0%} of the groups whose rewards differ have one outcome: what tells their episodes apart is the"
        " format reward, and divided by the deviation it counts as much as a win",
        "set spear.reward.format=none, or spear.advantage.normalize_std=false",
    )


def _judge_tasks(history: History) -> str:
    won = history.recent("success/all") or 0.0
    if won > 0.9:
        return "the tasks are mastered, take harder ones"
    if won < 0.1:
        return (
            "the tasks are out of reach, begin with easier ones or a better warm start, or take an algorithm with the "
            "tool-call reward (algorithm=drbot_spear), which tells failures apart"
        )
    return "raise actor_rollout_ref.rollout.n or actor_rollout_ref.rollout.temperature"


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
    if shares[worst] <= MASKED:
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
    # The ratio of a sequence has a clip so narrow that it decides many tokens of a healthy run.
    clipped = (history.recent("clip/ppo_fraction") or 0.0) * (settings.loss.policy != "gspo")
    distance = history.usual("kl/old") or 0.0
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
    if apart is None or apart <= APART or history.recent("staleness/mean"):  # with older weights it has to
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


def _find_limits(history: History, settings: SpearSettings) -> Advice | None:
    cut = history.recent("rows/at_limit")
    if cut is None or cut <= 0.2 or (history.recent("mask/overlong") or 0.0) > MASKED:
        return None
    context = (history.recent("stop/context_limit") or 0.0) > 0.5 * cut
    return Advice(
        "limits of length",
        f"{cut:.0%} of the rows ran into a limit of length",
        f"raise data.max_{'prompt' if context else 'response'}_length, or ask for shorter responses",
    )


def _find_idle_ranks(history: History, settings: SpearSettings) -> Advice | None:
    balance = history.recent("perf/rank_balance")
    if balance is None or balance <= 1.1:
        return None
    return Advice(
        "idle ranks",
        f"the rank with the most tokens has {balance:.2f} times the mean, and the others wait for it",
        "set trainer.balance_batch=true, or, where it is, raise actor_rollout_ref.actor.ppo_mini_batch_size",
    )


def _find_thrashing(history: History, settings: SpearSettings) -> Advice | None:
    forgotten = history.recent("rollout/forgotten_share")
    if forgotten is None or forgotten <= 1 - THRASHING:
        return None
    return Advice(
        "prefix cache",
        f"the rollout engine reads {forgotten:.0%} of what it has read before once more: its cache is too small",
        "raise actor_rollout_ref.rollout.engine_kwargs.vllm_cpu.kv_cache_gib",
    )


def _find_dull_tasks(history: History, settings: SpearSettings) -> Advice | None:
    differing, sampling = history.usual("sampling/differing"), settings.sampling
    if differing is None or differing >= 1:
        return None
    return Advice(
        "dynamic sampling",
        f"after {sampling.max_rounds} rounds of tasks only {differing:.0%} of the groups that a step wants differ",
        f"raise spear.sampling.max_rounds, or {_judge_tasks(history)}",
    )


PROGRESS_RULES: tuple[Rule, ...] = (
    _find_equal_groups,
    _find_petty_differences,
    _find_dull_tasks,
    _find_entropy,
    _find_masks,
    _find_limits,
    _find_idle_steps,
    _find_large_updates,
    _find_disagreement,
    _find_blind_critic,
    _find_idle_ranks,
    _find_thrashing,
)
