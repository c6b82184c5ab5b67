"""A training of two steps whose passages come from a file of indexes."""

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the distribution spear-training is not installed")
pytest.importorskip("yaml", reason="the extra 'search' is not installed")

from tests.training.test_end_to_end_presets import EPISODES, run

# docs/retrievers.md has the same training, which the slow set runs.
pytestmark = pytest.mark.nightly

CONFIG = """
indexes:
  words: {kind: bm25}
"""


def test_a_training_on_a_file_of_indexes(tmp_path: Path) -> None:
    config = tmp_path / "retriever.yaml"
    config.write_text(CONFIG, "utf-8")
    training = ("preset=search_qwen2.5_7b", "model=tiny", "algorithm=grpo_spear")
    steps = run(tmp_path / "run", *training, f"env.kwargs.retriever={config}")
    faults = {name: value for metrics in steps.values() for name, value in metrics.items() if name.startswith("fault")}
    assert not any(faults.values()), faults
    for metrics in steps.values():
        played = {name.removeprefix("success/") for name in metrics if name.startswith("success/")} - {"all"}
        assert played and played <= {"1hop", "2hop", "3hop"}
        assert metrics["rows/total"] == EPISODES
