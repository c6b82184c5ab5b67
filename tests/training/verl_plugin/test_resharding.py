"""Checkpoints that are resumed by another number of ranks: verl's engines over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training.verl_plugin.workers import count_saved_ranks
from tests.training.verl_plugin.real_engine import run_alone


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_weights_optimiser_and_schedule() -> None:
    found = run_alone("reshard")
    assert set(found) == {"1 to 2", "2 to 1", "2x2 to 1"}
    for name, measured in found.items():
        assert measured["loaded"] == 0.0, name
        assert measured["learnt"] > 1e-3, name  # the step below moves what is compared
        assert measured["step"] < 1e-5, name  # sums of gradients in another order
        assert measured["drawn"], name  # rank 0 goes on with its random state


def test_a_folder_without_shards_or_with_two_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="the shards of no ranks"):
        count_saved_ranks(tmp_path)
    for ranks in (2, 16):
        (tmp_path / f"model_world_size_{ranks}_rank_0.pt").touch()
    with pytest.raises(SpearError, match=r"the shards of \[2, 16\] ranks"):
        count_saved_ranks(tmp_path)
