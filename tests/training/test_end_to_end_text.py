"""Short real trainings on the text environments: their presets, but smaller, and each with another algorithm."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from tests.training.trainings import finish, get_steps, start_training

pytestmark = pytest.mark.slow

STEPS = 2
SMALLER = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
    "data.train_batch_size=6",
    "data.val_max_samples=12",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=24",
    "spear.replay.capacity=16",
)


@pytest.mark.parametrize(
    ("preset", "algorithm", "env_id", "epochs", "loss", "subtasks"),
    [
        # Of 5.7, 4.9, 5.4 and 6.8 nats before: it knows the form of a response.
        (
            "alfworld_tiny",
            "drbot_gigpo_spear",
            "spear/ALFWorld-v0",
            1,
            2.5,
            {"pick", "look", "clean", "heat", "cool", "pick2"},
        ),
        # A conversation is one row where the others have ten.
        (
            "code_tiny",
            "rloo_sil",
            "spear/CodeInterpreter-v0",
            12,
            2.5,
            {
                *("powers", "squares", "multiples", "digits", "products"),
                *("remainders", "factorials", "common_multiples", "coprime", "loops"),
            },
        ),
        ("search_tiny", "grpo_spear", "spear/SearchR1-v0", 12, 2.5, {"1hop", "2hop", "3hop"}),
        (
            "webshop_tiny",
            "gigpo",
            "spear/WebShop-v0",
            1,
            3.5,
            {"beauty", "electronics", "fashion", "garden", "grocery"},
        ),
    ],
)
def test_a_warm_started_policy_trains(
    preset: str, algorithm: str, env_id: str, epochs: int, loss: float, subtasks: set[str], tmp_path: Path
) -> None:
    from training.warmstart import RECIPES, train_policy

    policy, out = tmp_path / "warmstart", tmp_path / "run"
    # Neither short rows first nor a loss on prompts: the loss is that on responses.
    recipe = replace(RECIPES[env_id], episodes=150, short_epochs=0, epochs=epochs, prompt_weight=0.0, panel_tasks=0)
    report = train_policy(recipe, policy)
    assert report.loss < loss

    finish(start_training(preset, policy, out, f"algorithm={algorithm}", *SMALLER), out)
    steps = get_steps(out)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for metrics in steps.values():
        assert metrics["rollout/wasted_generations"] == 0
        # Prompts of unequal length: padded on the left where they are played, not at all where they are learnt.
        assert metrics["training/rollout_log_probs_diff_max"] < 1e-4
        assert 0 <= metrics["success/all"] <= 1
        assert 0 <= metrics["turns/valid_action"] <= 1
        played = {name.removeprefix("success/") for name in metrics if name.startswith("success/")} - {"all"}
        assert played and played <= subtasks
        assert math.isfinite(metrics["loss/on_policy"])
        # Groups that all win or all lose are filtered out.
        assert metrics["actor/grad_norm"] > 0 or metrics["success/all"] in (0, 1)
        assert 0 < metrics["entropy/token-mean"] < 7
    assert 0 <= steps[STEPS]["val/success/all"] <= 1
    assert (out / "checkpoints" / f"global_step_{STEPS}" / "actor" / "huggingface" / "tokenizer.json").is_file()
