"""A policy with an adapter: trained, handed to rollouts, saved and loaded again."""

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from tests.training.verl_plugin.real_engine import run_alone

pytestmark = pytest.mark.slow


def test_an_adapter_learns_and_its_policy_is_whole_wherever_it_goes(tmp_path: Path) -> None:
    found = run_alone("adapter", str(tmp_path))
    assert found["learnt"] > 1e-2
    assert found["base"] == 0, "the weights beneath it stay as they were, after a push too"
    assert found["names"] and len(found["sent"]) == 14 and all("proj" in name for name in found["sent"])
    assert found["reloaded"] < 1e-6, "a checkpoint loads as a model of its own and gives the trainer's log-probs"
    assert found["adapter"] < 1e-6, "and the adapter alone gives the same on the base model"


@pytest.fixture(scope="module")
def folder() -> str:
    """SmolLM2-135M-Instruct."""
    getting = pytest.importorskip("spear_agents.model_files")
    try:
        return getting.resolve_model("smollm2-135m")
    except SpearError as error:
        pytest.skip(f"the model cannot be had: {error}")


@pytest.mark.parametrize(("dtype", "mean"), [("bfloat16", 0.04), ("float32", 1e-4)])
def test_rollouts_and_trainer_agree(folder: str, dtype: str, mean: float) -> None:
    # Without a cold start at temperature 1, where hardly a token is certain: rounding shows most.
    found = run_alone("rollout", folder, dtype)
    assert found["tokens"] > 60
    assert found["mean"] <= mean, found
