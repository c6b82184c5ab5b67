"""A real training whose episodes are begun ahead of their step: it loses a worker, is killed, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")
pytest.importorskip("psutil")

from spear_agents.engines.base import derive_seed
from tests.training.test_end_to_end import (
    find_marked,
    find_marks,
    kill_everything,
    read_recorded,
    read_saved,
    wait_for,
)
from tests.training.trainings import finish, get_steps, start_training

pytestmark = pytest.mark.nightly

STEPS = 6
AHEAD = (
    "spear.rollout.staleness=1",
    "trainer.save_freq=1",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
)
"""Small steps, each saved, with episodes begun one step ahead."""
OVERRIDES = (
    *AHEAD,
    f"trainer.total_training_steps={STEPS}",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "actor_rollout_ref.rollout.max_num_seqs=1",  # an engine that takes longer than the trainer
)


def test_episodes_go_on_across_pushes_dead_workers_and_kills(sokoban_policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "ahead"
    process = start_training("demo", sokoban_policy, out, *OVERRIDES)
    wait_for(lambda: read_saved(out) >= 1, process)
    find_marked(find_marks(process), "RolloutWorker")[0].kill()
    wait_for(lambda: read_saved(out) >= 3, process)
    kill_everything(process)
    resumed_after = read_saved(out)
    assert 3 <= resumed_after < STEPS, "the run was over before it could be killed"
    text = " ".join(finish(start_training("demo", sokoban_policy, out, *OVERRIDES), out).split())
    assert f"after step {resumed_after}" in text
    assert "start up to 1 step ahead" in text and "weights of each token, cut at 2.0" in text
    found = get_steps(out)
    assert sorted(found) == list(range(1, STEPS + 1))
    for metrics in found.values():
        assert metrics["rollout/wasted_generations"] == metrics["stop/fault"] == 0
        assert metrics["staleness/max"] <= 1
    assert found[1]["staleness/max"] == found[resumed_after + 1]["staleness/max"] == 0, "their weights were the newest"
    assert max(metrics["staleness/crossed_push"] for metrics in found.values()) > 0
    assert any(metrics["staleness/ratio_max"] > 1.001 for metrics in found.values())
    # As in a run in which each step waits for its own episodes: each task once, with the seeds of its step.
    recorded = read_recorded(out)
    assert len({episode.task_id for episode in recorded}) == len(recorded) == 8 * STEPS
    wanted = {derive_seed(0, "train", step, group, 0) for step in found for group in range(8)}
    assert {episode.seed for episode in recorded} == wanted
