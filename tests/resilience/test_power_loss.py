"""What marks something as complete never outlives it: file, then folder, then mark are synced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from spear_agents.files import write_json
from spear_agents.trajectory import TrajectoryWriter
from spear_envs.data.files import replace_text


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Calls of fsync and rename in their order, with the path."""
    made: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        made.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def replace(self: Path, target: Any) -> Path:
        made.append(("rename", str(target)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    return made


def test_small_files(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    for write in (lambda path: write_json(path, {}), lambda path: replace_text(path, "{}", synced=True)):
        calls.clear()
        write(tmp_path / "a.json")
        assert [kind for kind, _ in calls] == ["sync", "rename", "sync"]
        assert calls[0][1].endswith(".tmp") and calls[2][1] == str(tmp_path)


def test_records_at_the_end_of_an_evaluation(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    with TrajectoryWriter(tmp_path / "episodes.jsonl"):
        pass
    assert ("sync", str(tmp_path / "episodes.jsonl")) in calls


def test_a_checkpoint_before_its_manifest(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    pytest.importorskip("verl", reason="needs the extra 'train'")
    from spear_training.checkpoints import MANIFEST, write_manifest

    folder = tmp_path / "global_step_1"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "weights.pt").write_bytes(b"x")
    (folder / "spear.json").write_text("{}")
    write_manifest(folder)
    mark = calls.index(("rename", str(folder / MANIFEST)))
    synced = {path for kind, path in calls[:mark] if kind == "sync"}
    assert synced >= {str(path) for path in (folder, folder / "actor", tmp_path, folder / "spear.json")}
    assert synced >= {str(folder / name) for name in json.loads((folder / MANIFEST).read_text())["files"]}
