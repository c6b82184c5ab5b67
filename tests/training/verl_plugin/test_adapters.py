"""A policy with an adapter: trained, handed to rollouts, saved and loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from tests.training.verl_plugin.real_engine import run_alone

pytestmark = pytest.mark.slow


def test_an_adapter_learns_and_its_policy_is_whole_wherever_it_goes(tmp_path: Path) -> None:
    found = run_alone("adapter", str(tmp_path))
    assert found["learnt"] > 1e-2
    assert found["base"] == 0, "the weights beneath it stay as they were, after a push too"
    assert found["names"] and len(found["sent"]) == 14 and all("proj" in name for name in found["sent"])
    assert found["reloaded"] < 1e-6, "a checkpoint loads as a model of its own and gives the trainer's log-probs"
    assert found["adapter"] < 1e-6, "and the adapter alone gives the same on the base model"
