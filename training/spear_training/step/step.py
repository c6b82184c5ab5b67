"""One training step of SPEAR (``alg:sal``), top to bottom, and its metrics."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from spear_agents.play.trajectory import StopReason
from spear_envs.core.rewards import PAID_TERMS
from spear_training.algorithms import ReplayDraw, RowTable, SpearSettings, average_tokens, estimate, whiten_advantages
from spear_training.run.custom_reward import CUSTOM
from spear_training.step.plan import EpisodeReward, StepPlan, find_differing_groups, plan_rows
from spear_training.step.records import EpisodeRecord, Rollout
from spear_training.step.state import SpearState
from spear_training.step.update import Actor, Updater, UpdateSizes, require_finite


class Rollouts(Protocol):
    """Plays the episodes of a step."""

    def play(self, number: int) -> Rollout:
        """Play a batch of tasks; ``number`` counts the batches of this step from 0, whose groups differ."""

    def finish(self) -> None:
        """Called after the last batch: a rollout engine that shares the device may free its memory."""


class Critic(Protocol):
    """PPO's critic."""

    def value(self, rows: RowTable) -> RowTable:
        """Return the rows with the columns ``mask`` and ``values``."""

    def update(self, rows: RowTable, metrics: dict[str, Any]) -> None:
        """Train on ``values`` and ``returns`` of the rows."""


class Stopwatch:
    """Adds up the seconds of blocks by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


DRIVER = "driver"
"""SPEAR's own bookkeeping, on the stopwatch."""


@dataclass(frozen=True)
class StepReport:
    """Result of a step: its episodes, its metrics, and seconds by phase."""

    rollout: Rollout
    metrics: dict[str, Any]
    seconds: dict[str, float]


@dataclass(eq=False)
class SpearStep:
    """A training step over any policy and critic."""

    settings: SpearSettings
    state: SpearState
    actor: Actor
    critic: Critic | None
    _: KW_ONLY
    max_response_length: int
    longest_row: int | None = None
    sizes: UpdateSizes

    def __post_init__(self) -> None:
        self._updater = Updater(self.settings, self.state, self.actor, self.sizes)

    def run(self, t: int, rollouts: Rollouts) -> StepReport:
        """Run global step ``t``, from 1."""
        settings, state, watch = self.settings, self.state, Stopwatch()
        metrics: dict[str, Any] = {}
        mu, gamma = settings.reward.weight(t, state.metrics), settings.sil.weight(t, state.metrics)

        with watch("gen"):  # 1. rollouts
            rollout, chosen = self._roll_out(rollouts, mu, metrics)
        with watch(DRIVER):  # 2.-5. rewards, faults, masks, group filter
            plan = plan_rows(
                rollout,
                settings,
                mu=mu,
                max_response_length=self.max_response_length,
                longest_row=self.longest_row,
                chosen=chosen,
            )
            if state.baseline is not None:  # 8. (also if all rows are filtered)
                state.baseline.extend(plan.baselines)
        if plan.rows.kept.any():
            with watch("old_log_prob"):  # 6. old log-probs, by the actor unless bypassed
                fresh = self.actor.collect(plan.rows.take(plan.rows.kept), metrics)
            fresh = self._estimate(fresh, plan, watch, metrics)  # 7. advantages
            with watch(DRIVER):  # 9. replay
                # D_R has the means of this step, D does not have its rows: replayed rows are older than the step, and
                # their advantages are relative to the level of today.
                learns = self.critic is None or t > settings.critic.warmup
                drawn = self._draw(t, gamma, metrics, learns=learns)
            if learns:
                with watch("update_actor"):  # 10. on-policy and self-imitation updates
                    self._updater.update(fresh, drawn, gamma, metrics)
            with watch(DRIVER):  # 11. this step's rows, after the replay
                self._store(t, fresh, metrics)
        with watch(DRIVER):
            self._summarize(rollout, plan, metrics)
        metrics.update({"spear/gamma": gamma, "spear/mu": mu, "perf/spear_driver_seconds": watch.seconds.pop(DRIVER)})
        state.remember(metrics)
        return StepReport(rollout, metrics, watch.seconds)

    def _roll_out(self, rollouts: Rollouts, mu: float, metrics: dict[str, Any]) -> tuple[Rollout, Sequence[str] | None]:
        """Play a batch of tasks, or with dynamic sampling more, until a batch of groups differ in reward."""
        rollout, number, chosen = rollouts.play(0), 1, None
        if self.settings.sampling.enabled:
            wanted = len({record.group for record in rollout.records})
            chosen = find_differing_groups(rollout.records, self.settings.reward, mu)
            while len(chosen) < wanted and number < self.settings.sampling.max_rounds:
                rollout = Rollout.join([rollout, rollouts.play(number)])
                chosen = find_differing_groups(rollout.records, self.settings.reward, mu)
                number += 1
            metrics["sampling/rounds"], metrics["sampling/differing"] = float(number), len(chosen) / wanted
            chosen = chosen[:wanted]
        # Surplus groups are dropped in order of play, not by reward: a choice by reward would bias the success that is
        # reported.
        rollouts.finish()
        return rollout, chosen

    def _estimate(self, fresh: RowTable, plan: StepPlan, watch: Stopwatch, metrics: dict[str, Any]) -> RowTable:
        """Return the advantages of the fresh rows, by the chosen estimator over all rows that count."""
        known = plan.rows
        if self.critic is not None:
            # Rows removed from the loss are still part of their episode: values run through them.
            known = known.take(np.isin(known.trajectory, fresh.trajectory) & (known.loss_tokens > 0))
            with watch("values"):
                known = self.critic.value(known)
        with watch(DRIVER):
            found = estimate(known, self.settings)
            of_rows = found.shape == (len(known),)
            if of_rows and self.critic is None:
                fresh = fresh.add(advantage=found[known.kept])
            else:
                known = known.add(token_advantages=known.spread(found) if of_rows else found)
                fresh = self._add_token_advantages(fresh, known.take(known.kept), metrics)
        require_finite("advantage of a row", fresh.advantage)
        if self.critic is not None:
            with watch("update_critic"):
                self.critic.update(fresh, metrics)
            require_finite("norm of the critic's gradient", metrics.get("critic/grad_norm", 0.0))
        metrics["advantage/mean"] = float(fresh.advantage.mean())
        metrics["advantage/std"] = float(fresh.advantage.std())
        return fresh

    def _add_token_advantages(self, fresh: RowTable, known: RowTable, metrics: dict[str, Any]) -> RowTable:
        """Return ``fresh`` with the advantages of tokens from ``known``, and a critic's values and returns.

        A row's own advantage is the mean over its loss tokens, before they are whitened.
        """
        raw = known.token_advantages
        # The gate of the replay buffer needs a sign for the row. Whitening would move it: half of a step's tokens are
        # negative after it, even if every episode won.
        fresh = fresh.add(advantage=average_tokens(raw, fresh.mask, fresh), token_advantages=raw)
        if self.critic is None:
            return fresh
        returns = np.where(fresh.mask, raw + known.values, 0.0)
        metrics.update(_describe_values(known.values[fresh.mask], returns[fresh.mask]))
        if self.settings.critic.whiten:
            raw = whiten_advantages(torch.from_numpy(raw), torch.from_numpy(fresh.mask)).numpy()
        return fresh.add(token_advantages=raw, values=known.values, returns=returns)

    def _draw(self, t: int, gamma: float, metrics: dict[str, Any], *, learns: bool) -> RowTable | None:
        """Return the rows to imitate, with recalibrated advantages (``eq:recalibrateadv``); None without a replay."""
        replay = self.state.replay
        if not self.settings.sil.enabled:
            return None
        metrics["replay/evicted_age"] = float(replay.evict(t))
        if not learns or not replay.is_ready(self.state.baseline):  # rows wait for an actor that learns
            return None
        draw = replay.draw(self.state.baseline)
        if len(draw.rows) < self.settings.sil.min_rows:
            metrics["replay/discarded"] = float(draw.considered)
            return None
        metrics.update(summarize_draw(draw, t))
        # The draw has emptied the buffer all the same, so that a warm-up of gamma does not change which rows are old.
        if gamma <= 0:
            return None
        return self.actor.write(draw.rows.add(advantage=draw.advantages.numpy()))

    def _store(self, t: int, fresh: RowTable, metrics: dict[str, Any]) -> None:
        """Put eligible rows of this step into the replay buffer, fetching only their tokens."""
        settings, replay = self.settings.sil, self.state.replay
        # By alg:sal a step that empties D adds nothing, even if no row of it was above the baseline.
        if not settings.enabled or ("replay/discarded" in metrics and not settings.always_add):
            return
        gate = replay.check(fresh)
        if gate.open.any():
            replay.add(self.actor.read_tokens(fresh.take(gate.open).add(origin=np.full(gate.open.sum(), t))))
        metrics["replay/kept"] = float(gate.open.sum())
        metrics["replay/dropped_nonpositive"] = float(gate.nonpositive)
        metrics["replay/dropped_other"] = float(gate.other)

    def _summarize(self, rollout: Rollout, plan: StepPlan, metrics: dict[str, Any]) -> None:
        state = self.state
        metrics.update(summarize_episodes(rollout.records))
        metrics.update(summarize_rows(rollout.rows))
        metrics.update(summarize_rewards(plan.rewards, rollout.records))
        metrics.update(summarize_plan(plan))
        if len(rollout.rows):  # filtered ones included: a masked episode has seen its states, too
            metrics["anchors/new"] = state.meet(rollout.rows.anchor.tolist())
        metrics["replay/size"], metrics["replay/bytes"] = float(len(state.replay)), float(state.replay.nbytes)
        if state.baseline is not None:
            metrics["baseline/size"] = float(len(state.baseline))
            if len(state.baseline):
                metrics["baseline/p50"] = float(state.baseline.percentile())
        if state.bounds is not None:
            metrics["cov/lower"], metrics["cov/upper"] = state.bounds
        metrics["rollout/generations"] = float(rollout.generations)
        metrics["rollout/retried"] = float(rollout.retried)
        if rollout.cached_tokens or rollout.cacheable_tokens:
            metrics["rollout/cached_prompt_share"] = rollout.cached_tokens / rollout.prompt_tokens
        if rollout.cacheable_tokens:
            metrics["rollout/forgotten_share"] = 1.0 - min(1.0, rollout.cached_tokens / rollout.cacheable_tokens)
        # Every response must have been played as a turn.
        metrics["rollout/wasted_generations"] = float(rollout.generations - sum(r.turns for r in rollout.records))


def _describe_values(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """Compare the critic's values with the returns; the explained variance is 0 if all returns are equal."""
    spread = float(returns.var())
    return {
        "critic/value_mean": float(values.mean()),
        "critic/return_mean": float(returns.mean()),
        "critic/explained_variance": 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0,
    }


# ---- metrics ---------------------------------------------------------------------------------------------------------
def summarize_episodes(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Return success by subtask, score, turns, tool calls, stop reasons (shares) and faults (counts) of a set of
    episodes.

    Success never includes bonus terms. Episodes with a fault only count in ``fault/*`` and ``stop/*``, those from
    snapshots in all but success, score and means of turns and tool calls.
    """
    valid = [record for record in records if record.fault is None]
    whole = [record for record in valid if record.began is None]
    metrics: dict[str, float] = {}
    by_subtask: dict[str, list[bool]] = defaultdict(list)
    for record in whole:
        by_subtask[record.subtask].append(record.won)
    for subtask, wins in sorted(by_subtask.items()):
        metrics[f"success/{subtask}"] = float(np.mean(wins))
    if whole:
        metrics["success/all"] = float(np.mean([record.won for record in whole]))
        custom = [record.terms[CUSTOM] for record in whole if CUSTOM in record.terms]
        if custom:
            metrics["custom_reward/mean"] = float(np.mean(custom))
        for name in ("score", "turns", "tool_calls"):
            metrics[f"{name}/mean"] = float(np.mean([getattr(record, name) for record in whole]))
    if valid:
        turns = max(1, sum(record.turns for record in valid))
        metrics["turns/well_formed"] = sum(record.well_formed_turns for record in valid) / turns
        metrics["turns/valid_action"] = sum(record.valid_actions for record in valid) / turns
    stops = Counter(record.stop for record in records)
    for reason in StopReason:
        metrics[f"stop/{reason.value}"] = stops[reason.value] / max(1, len(records))
    for kind, count in Counter(record.fault for record in records if record.fault is not None).items():
        metrics[f"fault/{kind}"] = float(count)
    return metrics


def summarize_rows(rows: RowTable) -> dict[str, float]:
    """Return the number of tokens of the rows of all episodes without a fault, and the share of rows cut by a length
    limit.
    """
    return {
        "tokens/prompt": float(rows.prompt_length.sum()),
        "tokens/response": float(rows.response_length.sum()),
        "tokens/written": float(rows.loss_tokens.sum()),
        "rows/at_limit": float((~rows.finished | rows.truncated).mean()) if len(rows) else 0.0,
    }


def summarize_rewards(rewards: Sequence[EpisodeReward], records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Return the mean reward and its terms over the episodes without a fault."""
    valid = [reward for reward, record in zip(rewards, records, strict=True) if record.fault is None]
    if not valid:
        return {}
    means = {"total": np.mean([reward.total for reward in valid])}
    means |= {name: np.mean([reward.terms[name] for reward in valid]) for name in PAID_TERMS}
    return {f"reward/{name}": float(mean) for name, mean in means.items()}


def summarize_plan(plan: StepPlan) -> dict[str, float]:
    """Return the share of rows removed by each filter, and the number left."""
    share = 1.0 / max(1, plan.total_rows)
    metrics = {f"mask/{name}": count * share for name, count in plan.masked.items()}
    metrics["groups/equal"] = plan.equal_groups
    metrics["groups/same_outcome"] = plan.same_outcome
    metrics["rows/total"] = float(plan.total_rows)
    metrics["rows/trained"] = float(plan.rows.kept.sum())
    return metrics


def summarize_draw(draw: ReplayDraw, step: int) -> dict[str, float]:
    """Count and describe the rows drawn from the replay buffer at global step ``step``."""
    rows = draw.rows
    counts = ("considered", "eligible", "drawn", "discarded")
    metrics = {f"replay/{name}": float(getattr(draw, name)) for name in counts}
    metrics["replay/mean_age"] = draw.mean_age(step)
    if len(rows) and "won" in rows:
        metrics["replay/failed"] = float((~rows.won).mean())
    return metrics


def summarize_versions(rollout: Rollout, version: int) -> dict[str, float]:
    """Return the age of the weights that wrote a step's rows, in versions before ``version``, that at the start of the
    step.

    Mean and maximum over rows are of the age of their oldest token; another figure is the share of episodes with
    several versions.
    """
    ages = version - rollout.rows.version[rollout.rows.version >= 0]
    if not len(ages):
        return {}
    crossed = [len(record.versions) > 1 for record in rollout.records if record.versions]
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/crossed_push": sum(crossed) / max(1, len(crossed)),
    }


def summarize_ratios(log_probs: Any, rollout_log_probs: Any) -> dict[str, float]:
    """Return the unclipped importance ratios of policy tokens [K]: the trainer's probability over the rollout's."""
    ratios = np.exp(np.asarray(log_probs, dtype=np.float64) - np.asarray(rollout_log_probs, dtype=np.float64))
    return {
        "staleness/ratio_mean": float(ratios.mean()),
        "staleness/ratio_min": float(ratios.min()),
        "staleness/ratio_max": float(ratios.max()),
        "staleness/ratio_ess": float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
    }
