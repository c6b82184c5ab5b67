"""PPO for real: a critic and a reference policy beside the actor, and a checkpoint that brings all of it back."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from tests.training.trainings import finish, get_steps, start_training

pytestmark = pytest.mark.slow

STEPS = 3
OVERRIDES = (
    "algorithm=ppo_spear",
    "spear.kl.coefficient=0.01",
    "spear.replay.capacity=8",  # so small that the later steps replay
    "spear.sil.warmup_steps=3",
    "spear.reward.decay_steps=3",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=null",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=8",
    "data.val_max_samples=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
)


def test_ppo_trains_its_critic_and_resumes_exactly(tmp_path: Path) -> None:
    from training.warmstart import WarmStartSettings, train_policy

    policy, out = tmp_path / "warmstart", tmp_path / "run"
    sokoban = WarmStartSettings(
        "spear/Sokoban-v0", env_kwargs={"modality": "text"}, episodes=600, epochs=1, panel_tasks=0
    )
    train_policy(sokoban, policy)
    finish(start_training("demo", policy, out, *OVERRIDES), out)
    steps = get_steps(out)
    assert sorted(steps) == list(range(1, STEPS + 1))
    first, last = steps[1], steps[STEPS]
    # The critic begins with the value 0 everywhere and moves from there.
    assert first["critic/value_mean"] == 0 and first["critic/explained_variance"] == 0
    assert last["critic/value_mean"] != 0
    # The reference is the policy before the first step.
    assert 0 <= first["kl/reference"] < last["kl/reference"]
    for metrics in steps.values():
        assert metrics["critic/grad_norm"] > 0 and metrics["actor/grad_norm"] > 0
        assert math.isfinite(metrics["critic/loss"]) and metrics["critic/loss"] > 0
    # Rows that were better than the critic thought are stored, and come back.
    assert any(metrics["replay/kept"] > 0 for metrics in steps.values())
    assert any(metrics.get("loss/sil", 0) < 0 for metrics in steps.values())

    # As if the run had been killed after its second step.
    checkpoints = out / "checkpoints"
    assert (checkpoints / "global_step_2" / "critic").is_dir()
    shutil.rmtree(checkpoints / f"global_step_{STEPS}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    assert "after step 2" in finish(start_training("demo", policy, out, *OVERRIDES), out)
    assert get_steps(out)[STEPS] == pytest.approx(last, nan_ok=True, rel=0, abs=0)
