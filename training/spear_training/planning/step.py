"""Rows, tokens and optimiser steps of a training step, and what replay adds to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spear_training.algorithms import Coupling
from spear_training.algorithms.replay import ROW_BYTES
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance import RunShape
from spear_training.step.dealing import count_minibatches


@dataclass(frozen=True)
class Texts:
    """Lengths that are unknown before the training: the maximum, a guess, or means of another run.

    Attributes:
        turns: of an episode.
        prompt, response: tokens of a row; a response in a conversation includes those of the environment.
        written: of these, tokens of the policy.
        positive: share of the rows trained on whose advantage is above 0.
    """

    turns: float
    prompt: float
    response: float
    written: float
    positive: float = 0.5

    @classmethod
    def measure(cls, history: Sequence[dict[str, Any]]) -> Texts:
        """Means over the training steps of a run."""
        steps = [record for record in history if record.get("rows/trained")]

        def total(key: str) -> float:
            return sum(record.get(key) or 0.0 for record in steps)

        rows = max(1.0, total("rows/total"))
        # A step that replays may offer nothing to the buffer.
        offered = sum(record["rows/trained"] for record in steps if "replay/dropped_nonpositive" in record)
        return cls(
            turns=total("turns/mean") / max(1, len(steps)),
            prompt=total("tokens/prompt") / rows,
            response=total("tokens/response") / rows,
            written=total("tokens/written") / rows,
            positive=1 - total("replay/dropped_nonpositive") / max(1.0, offered),
        )


@dataclass(frozen=True)
class StepSizes:
    """Sizes of one training step. Counts are means, not whole numbers.

    Attributes:
        rows: of the training batch before any filter.
        trained: rows left by the group filter; filters of single rows are not predicted.
        row_tokens: of a row, prompt and response.
        written: tokens of the policy in all rows.
        optimiser_steps: on-policy ones.
        kept: rows that a step adds to the replay buffer.
        first_replay: the first step that replays, from 1; None if the buffer never fills.
        replay_period: steps from one replay to the next.
        drawn: rows of a replay, at most.
        replay_optimiser_steps: of a replay, in steps of their own (``sequential`` coupling).
        store_rows, store_bytes: rows in the buffer at most.
    """

    episodes: int
    rows: float
    trained: float
    row_tokens: float
    written: float
    optimiser_steps: int
    kept: float
    first_replay: int | None
    replay_period: int | None
    drawn: float
    replay_optimiser_steps: int
    store_rows: float
    store_bytes: float

    @property
    def tokens(self) -> float:
        """Of all rows of a step."""
        return self.rows * self.row_tokens


def measure_row(prompt: float, response: float, written: float) -> float:
    """Bytes of a row in the replay buffer: ids, log-probs of the policy's tokens, bits of the mask, and the record."""
    return 4 * (prompt + response) + 4 * written + math.ceil(response / 8) + ROW_BYTES


def size_step(
    settings: SpearSettings, shape: RunShape, texts: Texts, mini_batch: int, *, rewrites: bool = False
) -> StepSizes:
    """Sizes of a training step with ``mini_batch`` rows in an optimiser step; turns are cut at the environment's limit.

    ``rewrites``: the chat template changes earlier responses, so each turn of a conversation is a row too.
    """
    episodes = shape.tasks * shape.group_size
    rows = episodes * (min(texts.turns, shape.max_turns) if shape.per_turn or rewrites else 1)
    trained = rows * max(1, math.floor(settings.filter.groups * shape.tasks)) / shape.tasks
    kept = trained * texts.positive if settings.sil.enabled else 0.0
    first = period = None
    drawn, store, age = 0.0, 0.0, settings.replay.max_age
    if kept > 0:
        # A step checks the buffer before it adds its own rows, and a replay empties the buffer.
        steps = math.ceil(settings.sil.trigger_ratio * settings.replay.capacity / kept)
        store = kept * steps
        if age is None or steps <= age:
            first, period = 1 + steps, steps if settings.sil.always_add else steps + 1
            drawn = min(store, settings.replay.capacity)
        else:
            store = kept * age
    return StepSizes(
        episodes=episodes,
        rows=rows,
        trained=trained,
        row_tokens=texts.prompt + texts.response,
        written=rows * texts.written,
        optimiser_steps=count_minibatches(trained, mini_batch),
        kept=kept,
        first_replay=first,
        replay_period=period,
        drawn=drawn,
        replay_optimiser_steps=0 if settings.sil.coupling is Coupling.JOINT else count_minibatches(drawn, mini_batch),
        store_rows=store,
        store_bytes=store * measure_row(texts.prompt, texts.response, texts.written),
    )
