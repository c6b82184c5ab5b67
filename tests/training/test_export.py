from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from safetensors.torch import save_file

from spear_envs.core.errors import SpearError
from spear_training.checkpoints import keep_best, write_manifest
from spear_training.export import export_policy
from tests.training.trainings import save_small_checkpoint


def save_policy(run: Path, step: int, *, value: float = 1.0) -> Path:
    """A checkpoint whose policy is whole, as on a CPU."""
    folder = save_small_checkpoint(run, step)
    whole = folder / "actor" / "huggingface"
    whole.mkdir()
    save_file({"a": torch.full((2, 3), value), "b": torch.ones(4)}, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"}))
    write_manifest(folder)
    return folder


def test_the_latest_the_best_or_a_given_step_is_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        keep_best(save_policy(run, step), "success/all", {1: 0.2, 2: 0.9, 3: 0.5}[step])
    for number, (options, step) in enumerate((({}, 3), ({"best": True}, 2), ({"step": 1}, 1))):
        made = export_policy(run, tmp_path / f"out{number}", **options)
        assert (made.step, made.parameters, made.dtypes) == (step, 10, ("F32",))
        assert {path.name for path in made.folder.iterdir()} == {"model.safetensors", "config.json"}
        assert json.loads((made.folder / "config.json").read_text()) == {"model_type": "qwen3", "dtype": "float32"}


def test_what_cannot_be_exported_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with pytest.raises(SpearError, match="a complete checkpoint yet"):
        export_policy(run, out)
    with pytest.raises(SpearError, match="does not contain a best checkpoint"):
        export_policy(run, out, best=True)
    folder = save_policy(run, 2)
    with pytest.raises(SpearError, match="of step 7, only of 2"):
        export_policy(run, out, step=7)
    with pytest.raises(SpearError, match="exists: choose another"):
        export_policy(run, run)
    (folder / "actor" / "huggingface" / "config.json").unlink()
    with pytest.raises(SpearError, match="missing, torn or changed"):
        export_policy(run, out)
    write_manifest(folder)
    with pytest.raises(SpearError, match=r"lacks weights in safetensors or config\.json"):
        export_policy(run, out)
    (folder / "actor" / "huggingface" / "model.safetensors").write_bytes(b"torn")
    (folder / "actor" / "huggingface" / "config.json").write_text("{}")
    write_manifest(folder)
    with pytest.raises(SpearError, match="cannot be read"):
        export_policy(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
