"""A real training on pictures: two steps of a tiny Qwen2.5-VL on Sokoban, with replay, through verl on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from safetensors.torch import load_file

from agents.engines.hf import HFModel
from tests.training.trainings import finish, get_steps, start_training
from training.export import export_policy

pytestmark = pytest.mark.slow

OVERRIDES = (
    "spear.env.kwargs.modality=image",
    "spear.env.kwargs.max_turns=4",
    "spear.env.template=default",
    "spear.replay.capacity=16",  # filled by the first step, so that the second replays rows with pictures
    "spear.filter.void=off",
    "data.train_batch_size=4",
    "data.val_max_samples=8",
    "data.max_prompt_length=512",
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
)


def test_a_tiny_vision_policy_trains_on_pictures(tiny_vision_policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    finish(start_training("demo", tiny_vision_policy, out, *OVERRIDES), out)
    steps = get_steps(out)
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["training/rollout_log_probs_diff_max"] < 1e-4
        assert metrics["rows/trained"] > 0 and metrics["actor/grad_norm"] > 0
        assert metrics["rollout/wasted_generations"] == 0
    assert steps[2]["replay/drawn"] > 0
    made = export_policy(out, tmp_path / "policy")
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_vision_policy, made.folder))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert "visual.patch_embed.proj.weight" in moved, "no gradient reached the vision tower"
    assert HFModel(made.folder).reader is not None, "the image processor is part of the export"
