from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import ReplayBuffer, ReplayEntry
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance import RunShape
from spear_training.planning.step import StepSizes, Texts, measure_row, size_step


def make_entry(step: int, prompt: int = 3, response: int = 4, written: int = 2) -> ReplayEntry:
    mask = [1] * written + [0] * (response - written)
    return ReplayEntry(np.zeros(prompt, int), np.zeros(response, int), mask, [0.0] * response, 1.0, 1.0, step, "t")


@given(st.integers(0, 50), st.lists(st.booleans(), min_size=1, max_size=70))
def test_a_row_takes_what_the_buffer_says_it_takes(prompt: int, mask: list[bool]) -> None:
    buffer = ReplayBuffer()
    written = max(1, sum(mask))
    buffer.add([make_entry(1, prompt, len(mask), written)])
    assert measure_row(prompt, len(mask), written) == buffer.nbytes


def simulate(spear: SpearSettings, kept: int, steps: int) -> list[int]:
    """Steps in which the trainer replays, if each step offers ``kept`` rows; its order of things, its buffer."""
    buffer = ReplayBuffer(spear.replay.capacity, trigger_ratio=spear.sil.trigger_ratio, max_age=spear.replay.max_age)
    replayed = []
    for t in range(1, steps + 1):
        buffer.evict(t)
        drawn = buffer.is_ready() and buffer.draw(None).drawn
        if drawn:
            replayed.append(t)
        if spear.sil.always_add or not drawn:
            buffer.add([make_entry(t)] * kept)
    return replayed


SHAPE = RunShape(tasks=8, group_size=4, max_turns=10, per_turn=True, steps=100)


def size(spear: SpearSettings, texts: Texts, shape: RunShape = SHAPE, mini_batch: int = 64) -> StepSizes:
    return size_step(spear, shape, texts, mini_batch)


@settings(max_examples=60)
@given(
    kept=st.integers(1, 12),
    capacity=st.integers(1, 40),
    trigger=st.sampled_from([0.5, 1.0, 1.5]),
    max_age=st.sampled_from([None, 0, 1, 3, 5]),
    always_add=st.booleans(),
)
def test_the_buffer_fills_when_it_is_foretold(
    kept: int, capacity: int, trigger: float, max_age: int | None, always_add: bool
) -> None:
    spear = SpearSettings.from_mapping(
        {
            "sil": {"trigger_ratio": trigger, "always_add": always_add},
            "replay": {"capacity": capacity, "max_age": max_age},
            "filter": {"groups": 1.0},
        }
    )
    # Rows of a step are 32 episodes of one turn, of which so many are kept.
    sizes = size(spear, Texts(1, 3, 4, 2, positive=kept / 32))
    if sizes.first_replay is None or sizes.replay_period is None:
        assert simulate(spear, kept, steps=30) == []
    else:
        third = sizes.first_replay + 2 * sizes.replay_period
        assert simulate(spear, kept, steps=third) == [sizes.first_replay, third - sizes.replay_period, third]


@pytest.mark.parametrize(
    ("tasks", "group", "rows", "mini_batch", "expected"),
    [
        # The paper's sizes: three quarters of 2,048 rows, and of 4,096 turns.
        (128, 16, 1, 512, (2048, 1536, 3, 4)),
        (32, 8, 16, 1024, (4096, 3072, 3, 2)),
        (32, 8, 4, 256, (1024, 768, 3, 8)),
    ],
)
def test_optimiser_steps_of_the_papers_experiments(
    tasks: int, group: int, rows: int, mini_batch: int, expected: tuple[int, ...]
) -> None:
    shape = RunShape(tasks, group, max_turns=50, per_turn=rows > 1, steps=100)
    spear = SpearSettings().override({"replay": {"max_age": None}, "sil": {"coupling": "sequential"}})
    sizes = size(spear, Texts(rows, 100, 10, 10), shape, mini_batch)
    assert (sizes.rows, sizes.trained, sizes.optimiser_steps, sizes.replay_optimiser_steps) == expected
    assert sizes.drawn == 2048


def test_joint_coupling_deals_replayed_rows_into_the_same_optimiser_steps() -> None:
    spear = SpearSettings().override({"sil": {"coupling": "joint"}, "replay": {"capacity": 64}})
    sizes = size(spear, Texts(10, 20, 4, 4), mini_batch=64)
    assert (sizes.optimiser_steps, sizes.replay_optimiser_steps) == (4, 0)
    apart = size(spear.override({"sil": {"coupling": "sequential"}}), Texts(10, 20, 4, 4), mini_batch=64)
    assert (apart.optimiser_steps, apart.replay_optimiser_steps) == (4, 1)


def test_without_self_imitation_nothing_is_replayed() -> None:
    sizes = size(SpearSettings().override({"sil": {"enabled": False}}), Texts(10, 20, 4, 4))
    assert (sizes.kept, sizes.first_replay, sizes.store_bytes) == (0, None, 0)


def test_turns_are_cut_at_the_limit_and_a_conversation_is_one_row() -> None:
    assert size(SpearSettings(), Texts(99, 20, 4, 4)).rows == 8 * 4 * 10
    conversation = RunShape(tasks=8, group_size=4, max_turns=10, per_turn=False, steps=9)
    assert size(SpearSettings(), Texts(99, 20, 4, 4), conversation).rows == 32


def test_a_replay_draws_what_the_buffer_holds() -> None:
    spear = SpearSettings().override({"replay": {"capacity": 60}, "filter": {"groups": 1.0}})
    sizes = size(spear, Texts(10, 20, 5, 5, positive=0.25))
    assert sizes.tokens == 320 * 25 and sizes.written == 320 * 5
    assert (sizes.first_replay, sizes.replay_period, sizes.drawn) == (2, 1, 60)


def test_lengths_of_another_run_are_means_over_its_steps() -> None:
    def step(rows: float, trained: float, nonpositive: float | None) -> dict[str, Any]:
        record = {"rows/total": rows, "rows/trained": trained, "turns/mean": rows / 4, "training/global_step": 1}
        record |= {"tokens/prompt": 10 * rows, "tokens/response": 3 * rows, "tokens/written": 2 * rows}
        return record if nonpositive is None else record | {"replay/dropped_nonpositive": nonpositive}

    # The second step replays and offers nothing to the buffer; the third has no row left.
    history = [{"val/success/all": 0.1}, step(40, 20, 5), step(20, 20, None), {"rows/total": 7.0, "rows/trained": 0.0}]
    assert Texts.measure(history) == Texts(turns=7.5, prompt=10, response=3, written=2, positive=0.75)
