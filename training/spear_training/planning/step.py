"""What a training step amounts to in rows, tokens and optimiser steps, and what replay adds to it. Pure arithmetic."""

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

FORWARD = 1
BACKWARD = 2
"""Cost of a pass over a token, in forward passes."""


@dataclass(frozen=True)
class Texts:
    """Lengths that nobody knows before the training: the most there can be, a guess, or means of another run.

    Attributes:
        turns: of an episode.
        prompt: tokens of a row's prompt.
        response: tokens of a row's response; of a conversation with what the environment said.
        written: of these, tokens that the policy wrote.
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
        return cls(
            turns=total("turns/mean") / max(1, len(steps)),
            prompt=total("tokens/prompt") / rows,
            response=total("tokens/response") / rows,
            written=total("tokens/written") / rows,
            positive=1 - total("replay/dropped_nonpositive") / _count_offered(steps),
        )


def _count_offered(steps: Sequence[dict[str, Any]]) -> float:
    """Rows that were offered to the buffer; a step that replays may offer none."""
    return max(1.0, sum(record["rows/trained"] for record in steps if "replay/dropped_nonpositive" in record))


@dataclass(frozen=True)
class StepSizes:
    """Sizes of one training step. Counts are means and need not be whole.

    Attributes:
        episodes: played.
        rows: of the training batch before any filter.
        trained: rows left by the filter of groups; the filters of single rows are not foreseen.
        row_tokens: of a row, prompt and response.
        optimiser_steps: on-policy ones.
        kept: rows that a step adds to the replay buffer.
        first_replay: the first step that replays, counted from 1; None if the buffer never fills.
        replay_period: steps from one replay to the next.
        drawn: rows of a replay, at most.
        replay_optimiser_steps: of a replay, in steps of their own (``sequential`` coupling).
        store_rows: rows in the buffer at most.
        store_bytes: of these rows.
        passes: forward passes' worth over a token trained on: its update, its old log-probs unless the rollout's stand
            for them, and those of the reference policy where there is a KL term.
        replay_passes: the same of a replayed token, whose old log-probs are stored.
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
    passes: int
    replay_passes: int

    @property
    def tokens(self) -> float:
        """Of all rows of a step."""
        return self.rows * self.row_tokens

    @property
    def on_policy_cost(self) -> float:
        """Forward passes over a token, of all rows trained on."""
        return self.trained * self.row_tokens * self.passes

    @property
    def replay_cost(self) -> float:
        """The same of a step's share of a replay."""
        if self.replay_period is None:
            return 0.0
        return self.drawn * self.row_tokens * self.replay_passes / self.replay_period

    @property
    def replay_ratio(self) -> float:
        """Replay optimiser steps for each on-policy one (``n_SIL`` of ``tab:computationcomplexity``).

        Where both share their steps, replayed rows for each on-policy one.
        """
        if self.replay_period is None:
            return 0.0
        if not self.replay_optimiser_steps:
            return self.drawn / (self.trained * self.replay_period)
        return self.replay_optimiser_steps / (self.optimiser_steps * self.replay_period)


def measure_row(prompt: float, response: float, written: float) -> float:
    """Bytes of a row in the replay buffer: ids, log-probs of the policy's tokens, bits of the mask, and the record."""
    return 4 * (prompt + response) + 4 * written + math.ceil(response / 8) + ROW_BYTES


def size_step(
    settings: SpearSettings,
    shape: RunShape,
    texts: Texts,
    mini_batch: int,
    *,
    bypass: bool = False,
    rewrites: bool = False,
) -> StepSizes:
    """Sizes of a step of a training.

    Args:
        settings: of the algorithm.
        shape: tasks, group size, layout.
        texts: lengths; ``turns`` are cut at the limit of the environment.
        mini_batch: rows of an optimiser step.
        rewrites: the chat template shows earlier responses otherwise than they were written, so that each turn of a
            conversation is a row, too.
        bypass: the rollout's log-probs stand for the old ones (``algorithm.rollout_correction.bypass_mode``).
    """
    episodes = shape.tasks * shape.group_size
    turns = min(texts.turns, shape.max_turns)
    rows = episodes * (turns if shape.per_turn or rewrites else 1)
    groups = max(1, math.floor(settings.filter.groups * shape.tasks))
    trained = rows * groups / shape.tasks
    kept = trained * texts.positive if settings.sil.enabled else 0.0
    first, period, filled = _schedule_replay(settings, kept)
    drawn = min(filled, settings.replay.capacity) if period is not None else 0.0
    joint = settings.sil.coupling is Coupling.JOINT
    replay_passes = FORWARD + BACKWARD + (FORWARD if settings.kl.coefficient > 0 else 0)
    store = filled if period is not None else kept * (settings.replay.max_age or 0)
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
        replay_optimiser_steps=0 if joint else count_minibatches(drawn, mini_batch),
        store_rows=store,
        store_bytes=store * measure_row(texts.prompt, texts.response, texts.written),
        passes=replay_passes + (0 if bypass else FORWARD),
        replay_passes=replay_passes,
    )


def _schedule_replay(settings: SpearSettings, kept: float) -> tuple[int | None, int | None, float]:
    """First step that replays, steps between two replays, and rows in the buffer then.

    A step looks at the buffer before it adds its own rows, and a replay empties the buffer.
    """
    needed = settings.sil.trigger_ratio * settings.replay.capacity
    if kept <= 0:
        return None, None, 0.0
    steps = math.ceil(needed / kept)
    if settings.replay.max_age is not None and steps > settings.replay.max_age:
        return None, None, 0.0
    return 1 + steps, steps if settings.sil.always_add else steps + 1, steps * kept
