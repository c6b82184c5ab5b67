"""Every step of ``spear prove-gpu`` here, at small sizes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training.launch import compose_config
from spear_training.proving import REPORT, Prover, prove_gpu
from spear_training.verl_plugin import proofs

KIT = Path(__file__).parents[2] / "scripts" / "gpu_kit.sh"


def read(out: Path) -> dict[str, Any]:
    report = json.loads((out / REPORT).read_text())
    return {step["name"]: step for step in report["steps"]} | {"packages": report["packages"]}


@pytest.mark.parametrize("name", list(proofs.PROOFS))
def test_a_device_gives_what_the_cpu_gives(name: str) -> None:
    figures = proofs.PROOFS[name]("cpu", "small")
    assert figures and all(value is False or value >= 0 for value in figures.values())


def test_a_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = proofs.run_packed
    monkeypatch.setattr(proofs, "run_packed", lambda network, rows, kind: whole(network, rows, kind).roll(1, 0))
    with pytest.raises(SystemExit, match="spear_packed differs from rows alone by"):
        proofs.compare_attention("cpu", "small")


def test_a_step_that_fails_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no memory")

    steps = {"a": fail, "b": lambda: {"x": 1.5}}
    monkeypatch.setattr(Prover, "list_steps", lambda self: steps)
    result = CliRunner().invoke(prove_gpu, ["--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 1 and "no memory" in result.output and "x 1.5" in result.output
    report = read(tmp_path)
    assert report["a"]["verdict"] == "failed" and report["b"]["verdict"] == "ok" and "torch" in report["packages"]


def test_a_machine_without_a_gpu_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SpearError, match="torch sees no GPU"):
        CliRunner().invoke(prove_gpu, ["--out", str(tmp_path)], catch_exceptions=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SpearError, match="no step 'x': choose attention, log-probs"):
        CliRunner().invoke(prove_gpu, ["--only", "x"], catch_exceptions=False)


@pytest.mark.parametrize("engine", ["spear_hf", "vllm"])
def test_the_training_on_a_gpu_can_be_composed(engine: str, tmp_path: Path, model_folder: Path) -> None:
    overrides = Prover(tmp_path, "cuda").list_command(engine, tmp_path / "run")[3:-2]
    overrides = [word for word in overrides if not word.startswith("actor_rollout_ref.model.path=")]
    config = compose_config((*overrides, f"actor_rollout_ref.model.path={model_folder}"), tmp_path / "run")
    assert config.trainer.device == "cuda" and config.actor_rollout_ref.rollout.name == engine
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16" and not config.spear.deterministic


@pytest.mark.nightly
def test_a_training_is_killed_and_resumed(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--only", "policy", "--only", "training"]
    result = CliRunner().invoke(prove_gpu, arguments)
    assert result.exit_code == 0, result.output
    assert read(tmp_path)["training"]["figures"]["rollout_log_probs_diff_max"] < 1e-4


def test_the_kit_is_a_script_that_runs() -> None:
    assert os.stat(KIT).st_mode & stat.S_IXUSR
