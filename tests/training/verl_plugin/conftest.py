"""Checkpoints of a trainer without verl's part of them."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of checkpoints, of which verl's own part is an empty folder; ``resume_step`` is one but the latest."""

    from verl.trainer.ppo.v1 import PPOTrainerSync

    def save(self: Any) -> None:
        (tmp_path / "checkpoints" / f"global_step_{self.global_steps}" / "actor").mkdir()

    def load(self: Any) -> None:
        steps = [0, *(int(path.name[12:]) for path in (tmp_path / "checkpoints").glob("global_step_*"))]
        self.global_steps = getattr(self, "resume_step", max(steps))

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", load)
    return tmp_path / "checkpoints"
