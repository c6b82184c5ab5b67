from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_training.step.ahead import BatchesAhead, summarize_ratios


@given(lead=st.integers(0, 4), last=st.integers(1, 9), killed=st.integers(1, 9))
def test_no_batch_is_older_than_the_lead_and_a_resumed_run_plays_the_same_tasks(
    lead: int, last: int, killed: int
) -> None:
    drawn = iter(range(100))

    def open_batches() -> tuple[BatchesAhead[tuple[int, list[str], int]], list[int]]:
        now = [0]
        draw = lambda: [str(next(drawn))]  # noqa: E731
        return BatchesAhead(lead, draw, lambda step, tasks: (step, tasks, now[0])), now

    batches, now = open_batches()
    learnt = []
    for step in range(1, last + 1):
        now[0] = step - 1  # version of the weights
        batches.reach(step, last)
        begun_for, tasks, version = batches.take()
        assert begun_for == step and 0 <= step - 1 - version <= lead
        learnt += tasks
        if step == killed:
            kept = batches.list_drawn()
            assert len(kept) == min(lead, last - step), "so many are under way"
            batches, now = open_batches()
            batches.restore(kept)
    assert learnt == [str(number) for number in range(last)], "each task once, in order"
    assert batches.list_drawn() == []


def test_ratios_before_any_clipping() -> None:
    probs, rollout = np.array([0.5, 0.1, 0.4]), np.array([0.25, 0.2, 0.4])
    found = summarize_ratios(np.log(probs), np.log(rollout))
    assert found["staleness/ratio_mean"] == pytest.approx((2 + 0.5 + 1) / 3)
    assert (found["staleness/ratio_min"], found["staleness/ratio_max"]) == (pytest.approx(0.5), pytest.approx(2))
    assert found["staleness/ratio_ess"] == pytest.approx(3.5**2 / (3 * (4 + 0.25 + 1)))
    same = summarize_ratios(np.log(probs), np.log(probs))
    assert set(same.values()) == {1.0}
