"""A real training one of whose rollout workers is killed: another one plays its episodes, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")
pytest.importorskip("psutil")

from tests.training.test_end_to_end import find_marked, find_marks, read_saved, wait_for
from tests.training.trainings import finish, get_steps, start_training

pytestmark = pytest.mark.nightly
OVERRIDES = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)


def test_the_episodes_of_a_dead_worker_go_to_another_one(sokoban_policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_training("demo", sokoban_policy, out, *OVERRIDES)
    wait_for(lambda: read_saved(out) >= 1, process)
    workers = find_marked(find_marks(process), "RolloutWorker")
    assert len(workers) == 2
    workers[-1].kill()
    finish(process, out)
    steps = get_steps(out)
    assert sorted(steps) == [1, 2] and "a rollout worker has died" in (out / "train.log").read_text()
    assert all(metrics["rows/total"] >= 16 for metrics in steps.values()), "episodes are missing"
