"""A pretrained model of 135 M parameters: what the rollouts sample, the trainer finds as probable."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from tests.training.verl_plugin.real_engine import run_alone

pytestmark = pytest.mark.slow


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
