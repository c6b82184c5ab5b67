"""``spear advise``: ten metrics of a training that a person acts on, with what to change.

The bounds come from the paper (``sec:discusshyper``) and from runs of tiny policies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from spear_agents.evaluation.records import read_history
from spear_envs.core.errors import SpearError
from spear_sandbox.console import FilePath, echo
from spear_sandbox.terminal import Console
from spear_training.algorithms.choices import FormatMode, Trigger
from spear_training.algorithms.settings import SpearSettings
from spear_training.run.launch import CONFIG_FILE, read_run
from spear_training.run.supervise import Observer

WINDOW = 5
"""Steps that a finding rests on."""
APART = 0.05
"""Largest acceptable mean difference of log-probs between rollouts and trainer, nats."""
MASKS = {
    "overlong": "raise rollout.max_response_length, or set filter.overlong=false",
    "void": "set filter.void=turn or off",
    "repetition": "lower the temperature, or set filter.repetition=false",
    "unreadable": "lower the temperature, or set filter.unreadable=false",
}


class History:
    """Metrics of the steps of a run, in order; missing and non-finite values are left out."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.steps = [record for record in records if "training/global_step" in record]

    def get(self, name: str) -> list[float]:
        """Return all values of a metric."""
        values = [step[name] for step in self.steps if isinstance(step.get(name), (int, float, np.number))]
        return [float(value) for value in values if abs(value) <= sys.float_info.max]

    def recent(self, name: str, fewer: float = 0.0) -> float:
        """Return the median of the last :data:`WINDOW` values, or ``fewer`` if there are fewer."""
        values = self.get(name)[-WINDOW:]
        return float(np.median(values)) if len(values) == WINDOW else fewer


def review_history(records: Iterable[Mapping[str, Any]], settings: SpearSettings) -> dict[str, str]:
    """Return what stands out in the metrics of a run, and what to change: a sentence by topic."""
    history = History(records)
    return dict(
        (*_review_rows(history, settings), *_review_replay(history, settings), *_review_policy(history, settings))
    )


def _review_rows(history: History, settings: SpearSettings) -> Iterator[tuple[str, str]]:
    equal = history.recent("groups/equal")
    if equal >= 0.9 and not settings.advantage.needs_critic:
        yield (
            "equal advantages",
            f"in {equal:.0%} of the groups all episodes earned the same, which teaches nothing: take easier or harder "
            "tasks, or raise rollout.group_size",
        )
    # Groups that only a format term tells apart, once the tool-call reward has decayed.
    petty = (history.recent("groups/same_outcome") - equal) / (1 - equal) if equal < 1 else 0.0
    divided = settings.advantage.normalize_std and settings.reward.format is not FormatMode.NONE
    if petty >= 0.5 and divided and not history.recent("spear/mu"):
        yield (
            "petty differences",
            f"in {petty:.0%} of the groups that differ, only the format reward does, and divided by the deviation it "
            "counts as much as a win: set reward.format=none",
        )
    worst = max(MASKS, key=lambda name: history.recent(f"mask/{name}"))
    if (share := history.recent(f"mask/{worst}")) > 0.5:
        yield "masks", f"the filter {worst!r} takes {share:.0%} of the rows out of the loss: {MASKS[worst]}"
    trained = history.get("rows/trained")[-WINDOW:]
    if len(trained) == WINDOW and not any(trained):
        yield "idle steps", f"no row was trained on in the last {WINDOW} steps: look at fault/*, stop/* and mask/*"


def _review_replay(history: History, settings: SpearSettings) -> Iterator[tuple[str, str]]:
    replay = settings.replay
    age = replay.max_age if replay.max_age is not None else WINDOW
    if settings.sil.enabled and not history.get("replay/drawn") and len(history.steps) >= max(10, 2 * age):
        largest = max(history.get("replay/size"), default=0.0)
        if any(history.get("replay/discarded")):
            yield (
                "small draws",
                f"every draw had fewer than {settings.sil.min_rows} rows and was left out: lower sil.min_rows",
            )
            return
        counted = "rows above P50" if settings.sil.trigger is Trigger.ELIGIBLE else f"{replay.unit.value}s"
        yield (
            "empty buffer",
            f"nothing was replayed in {len(history.steps)} steps: the buffer held {largest:.0f} at most and starts at "
            f"{settings.sil.trigger_ratio * replay.capacity:g} {counted}; raise replay.max_age, or take easier tasks",
        )
    if (share := history.recent("replay/ess", 1.0)) < 0.5:
        yield (
            "stale replay",
            f"the effective number of replayed tokens is {share:.0%} of their count: lower replay.max_age or "
            "replay.capacity, or the learning rate",
        )
    if (failed := history.recent("replay/failed")) > 0.5:
        yield (
            "imitated failures",
            f"{failed:.0%} of the replayed rows are from failed episodes: set sil.gamma=success, fade the reward "
            "for tool calls sooner (reward.decay_steps), or take easier tasks",
        )


def _review_policy(history: History, settings: SpearSettings) -> Iterator[tuple[str, str]]:
    entropy = history.get("entropy/token-mean")
    if len(entropy) >= 2 * WINDOW and entropy[0] > 0:
        change = history.recent("entropy/token-mean") / entropy[0]
        if change < 0.1:
            yield (
                "entropy",
                f"the entropy has fallen to {change:.0%} of its first value: raise sil.warmup_steps or "
                "cov.ratio, or lower the learning rate",
            )
        if change > 2.0:
            yield "entropy", f"the entropy has grown to {change:.1f} times its first value: lower the learning rate"
    # The ratio of a sequence has a clip so narrow that it decides many tokens of a healthy run.
    clipped = history.recent("clip/ppo_fraction") * (settings.loss.policy != "gspo")
    distance = history.recent("kl/old")
    if clipped > 0.3 or distance > 0.2:
        yield (
            "large updates",
            f"a step moves the policy too far ({clipped:.0%} of the tokens clipped, {distance:.2f} nats a token): "
            "lower optimizer.lr, or raise train.mini_batch_size",
        )
    apart = history.recent("training/rollout_log_probs_diff_mean")
    if apart > APART and not history.recent("staleness/mean"):  # older weights differ by design
        yield (
            "rollout engine",
            f"log-probs of the rollout engine and of the actor differ by {apart:.2f} on average: give both the same "
            "precision, rollout.dtype",
        )


def watch_metrics(observer: Observer, settings: SpearSettings, console: Console) -> Observer:
    """Return ``observer`` wrapped so that it also prints each finding once, after the step that shows it."""
    text: set[str] = set()

    def observe(history: list[dict[str, Any]]) -> None:
        observer(history)
        for topic, sentence in review_history(history, settings).items():
            if topic not in text:
                text.add(topic)
                console.print("advice", sentence, style="yellow", highlight=False)

    return observe


@click.command("advise")
@click.argument("run", type=FilePath())
def advise(run: Path) -> None:
    """Report suspicious metrics of a training, and which setting to change.

    RUN is the folder of `spear train --out`, of a running or a finished training.

    \b
      spear advise runs/alfworld
    """
    path = run / CONFIG_FILE
    if not path.is_file():
        raise SpearError(f"{run} does not contain {CONFIG_FILE}: name the folder of a training")
    settings = read_run(run).algorithm
    found = review_history(read_history(run), settings)
    for sentence in found.values() or ["nothing stands out"]:
        echo(sentence)
