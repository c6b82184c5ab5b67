"""Half a minute of the benchmark's siege: whatever is killed, no episode is lost and none has a wrong reward."""

from __future__ import annotations

import pytest

from benchmarks._siege import Injury, run_siege
from tests.sandbox.service import need_isolation


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_is_wrong_whatever_is_killed() -> None:
    need_isolation()
    report = run_siege(seconds=30.0, clients=64, interval_s=1.5, jobs=16)
    assert report.lost == [] and report.wrong == []
    assert set(report.injuries) == {injury.value for injury in Injury}
    assert report.most_held == 64 and report.episodes > 64
    assert set(report.faults) <= {
        "sandbox_unavailable", "sandbox_timeout", "retriever_unavailable", "retriever_timeout"
    }  # fmt: skip
