"""Checkpoints on disk, and ``spear prove-gpu`` at small sizes."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch

from spear_envs.core.errors import SpearError
from spear_training.proving import REPORT, Prover, prove_gpu
from spear_training.run import checkpoints
from spear_training.run.checkpoints import (
    BEST,
    FORMAT,
    MANIFEST,
    STATE,
    TENSORS,
    check_files,
    check_origin,
    clear_unfinished,
    describe_code,
    finish_checkpoint,
    keep_best,
    list_steps,
    list_whole,
    read_best,
    read_state,
    remove_old,
    write_state,
)
from spear_training.run.compose import compose
from spear_training.run.launch import prepare_training
from spear_training.verl_plugin import proofs
from tests.training.trainings import save_small_checkpoint


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_nested_state_comes_back_with_its_tensors_and_arrays(tmp_path: Path) -> None:
    state = {
        "format": FORMAT,
        "numbers": [1, 2.5, None, True, 2**100],
        "deep": {"tensor": torch.arange(3), "array": np.arange(4, dtype=np.uint8), "empty": torch.empty(0)},
        "rows": [{"tensor": torch.ones(2, 2)}],
    }
    write_state(tmp_path, state)
    found = read_state(tmp_path)
    assert found["numbers"] == state["numbers"]
    assert torch.equal(found["deep"]["tensor"], torch.arange(3)) and isinstance(found["deep"]["array"], np.ndarray)
    assert found["deep"]["empty"].numel() == 0 and torch.equal(found["rows"][0]["tensor"], torch.ones(2, 2))


@pytest.mark.parametrize("name", ["actor/model.pt", "data.pt", STATE, TENSORS, MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damage_is_one_error_that_names_the_file(tmp_path: Path, name: str, damage: str) -> None:
    folder = save_small_checkpoint(tmp_path, 3)
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[0] ^= 0xFF
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(SpearError, match="remove this checkpoint") as caught:
        check_files(folder)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["torch", "pickle"])
@pytest.mark.parametrize("name", ["actor/model.pt", "data.pt", "actor/more.pt"])
def test_a_pickle_that_would_run_something_is_told_and_not_loaded(tmp_path: Path, kind: str, name: str) -> None:
    folder = save_small_checkpoint(tmp_path, 3)
    trace = tmp_path / "trace"
    if kind == "torch":
        torch.save({"weights": Bomb(trace)}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(Bomb(trace)))
    finish_checkpoint(folder)  # whoever can change a file can change the list of files
    with pytest.raises(SpearError, match=r"would run .*mkdir|cannot be read") as caught:
        check_files(folder)
    assert name in str(caught.value)
    assert not trace.exists()


def test_names_reached_through_an_allowed_module_are_told_too(tmp_path: Path) -> None:
    # Protocol 4 lets a name go through attributes, and that module has imported others.
    module, name = b"torch.distributed.device_mesh", b"os.mkdir"
    trace = str(tmp_path / "trace").encode()
    code = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name + b"\x93"
    code += b"\x8c" + bytes([len(trace)]) + trace + b"\x85R."
    folder = save_small_checkpoint(tmp_path, 3)
    with zipfile.ZipFile(folder / "data.pt", "w") as file:
        for member, data in (("data.pkl", code), ("version", b"3\n"), ("byteorder", b"little")):
            file.writestr(f"archive/{member}", data)
    finish_checkpoint(folder)
    with pytest.raises(SpearError, match=r"would run|cannot be read"):
        check_files(folder)
    assert not (tmp_path / "trace").exists()


def test_another_configuration_is_told_with_the_override(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "global_step_3"
    write_state(folder, {"format": FORMAT, "config": {"a.b": 1, "free.x": 2}, "code": describe_code()})
    check_origin(folder, {"a.b": 1, "free.x": 5, "free.y": 6}, exact=True, changeable=["free"])
    with pytest.raises(SpearError, match=r"a\.b was 1, is now 2 and 1 more.*checkpoint\.resume=changed"):
        check_origin(folder, {"a.b": 2, "c": 0}, exact=True, changeable=["free"])
    check_origin(folder, {"a.b": 2, "c": 0}, exact=False, changeable=["free"])


def test_other_code_is_told_with_the_override(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "global_step_3"
    write_state(folder, {"format": FORMAT, "config": {}, "code": {"version": "0.0.1", "source": "abc"}})
    with pytest.raises(SpearError, match=r"version 0\.0\.1, sources abc.*checkpoint\.resume=changed"):
        check_origin(folder, {}, exact=True, changeable=[])
    check_origin(folder, {}, exact=False, changeable=[])


def test_folders_of_a_users_own_are_no_checkpoints(tmp_path: Path) -> None:
    folder = save_small_checkpoint(tmp_path, 7)
    for name in ("007", "7_old", "notes", "\u0667"):
        shutil.copytree(folder, folder.with_name(f"global_step_{name}"))
    assert list_whole(folder.parent) == list_steps(folder.parent) == [7]
    before = sorted(folder.parent.iterdir())
    remove_old(folder.parent, 1)
    assert sorted(folder.parent.iterdir()) == before


def test_a_best_whose_value_is_damaged_gives_way(tmp_path: Path) -> None:
    keep_best(save_small_checkpoint(tmp_path, 1), "success", 0.5)
    (tmp_path / "checkpoints" / BEST / "best.json").write_text('{"step": 1, "metric": "success", "value": NaN}')
    assert keep_best(save_small_checkpoint(tmp_path, 2), "success", 0.4)
    assert read_best(tmp_path / "checkpoints") == {"step": 2, "metric": "success", "value": 0.4}


def test_the_best_is_kept_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    assert read_best(checkpoints) is None
    values = (0.5, 0.5, 0.7, float("nan"))
    kept = [keep_best(save_small_checkpoint(tmp_path, n), "success", value) for n, value in enumerate(values, 1)]
    assert kept == [True, False, True, False]
    assert read_best(checkpoints) == {"step": 3, "metric": "success", "value": 0.7}
    (checkpoints / "global_step_3" / "data.pt").unlink()
    check_files(checkpoints / BEST)
    assert keep_best(save_small_checkpoint(tmp_path, 5), "score", 0.1), "by another metric"
    best = tmp_path / "checkpoints" / "best"
    shutil.rmtree(best)
    best.write_text("in the way")
    with pytest.raises(SpearError, match="cannot be written"):
        keep_best(save_small_checkpoint(tmp_path, 6), "score", 0.2)
    assert not list(best.parent.glob(".best*"))


def test_a_kill_while_the_best_changes_leaves_the_better_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_best(save_small_checkpoint(tmp_path, 1), "success", 0.5)
    put = checkpoints.put_folder

    def die(draft: Path, target: Path) -> None:
        if draft.name.endswith(".tmp"):
            raise KeyboardInterrupt
        put(draft, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "put_folder", die)
        keep_best(save_small_checkpoint(tmp_path, 2), "success", 0.6)
    assert not keep_best(save_small_checkpoint(tmp_path, 3), "success", 0.1)
    assert read_best(tmp_path / "checkpoints") == {"step": 1, "metric": "success", "value": 0.5}


def test_what_a_killed_save_left_is_not_part_of_the_next_one(tmp_path: Path) -> None:
    folder = save_small_checkpoint(tmp_path, 20)
    whole = json.loads((folder / MANIFEST).read_text())["files"]
    clear_unfinished(folder)
    check_files(folder)  # a whole one stays
    (folder / MANIFEST).unlink()
    for name in ("actor/model_world_size_4_rank_0.pt", ".spear.safetensors.7.tmp"):
        (folder / name).touch()
    clear_unfinished(folder)
    assert json.loads((save_small_checkpoint(tmp_path, 20) / MANIFEST).read_text())["files"] == whole


def read(out: Path) -> dict[str, Any]:
    report = json.loads((out / REPORT).read_text())
    return {step["name"]: step for step in report["steps"]} | {"packages": report["packages"]}


@pytest.mark.parametrize("name", list(proofs.PROOFS))
def test_a_device_gives_what_the_cpu_gives(name: str) -> None:
    figures = proofs.PROOFS[name]("cpu", "small")
    assert figures and all(value is False or value >= 0 for value in figures.values())


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


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_training_on_a_gpu_can_be_composed(engine: str, tmp_path: Path, model_folder: Path) -> None:
    overrides = Prover(tmp_path, "cuda").list_command(engine, tmp_path / "run")[3:-2]
    overrides = [word for word in overrides if not word.startswith("model.path=")]
    training = prepare_training(compose((*overrides, f"model.path={model_folder}")), tmp_path / "run")
    config, rollout = training.config, training.config.rollout
    assert (config.cluster.device.value, rollout.engine.value, rollout.dtype.value) == ("cuda", engine, "bfloat16")
    assert not config.deterministic


@pytest.mark.nightly
def test_a_training_is_killed_and_resumed(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--only", "policy", "--only", "training"]
    result = CliRunner().invoke(prove_gpu, arguments)
    assert result.exit_code == 0, result.output
    assert read(tmp_path)["training"]["figures"]["rollout_log_probs_diff_max"] < 1e-4
