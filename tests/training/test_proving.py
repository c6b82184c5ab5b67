"""``spear prove-gpu`` with stand-ins for its trainings."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train'")

from spear_training import proving
from spear_training.proving import POLICY, REPORT, Prover, prove_gpu
from spear_training.run.compose import compose


def make_policy(prover: Prover) -> dict[str, Any]:
    (prover.out / POLICY).mkdir()
    (prover.out / POLICY / "config.json").write_text("{}")
    return {}


@pytest.mark.parametrize("name", ["gpu #1", "it's", "a: b"])
def test_the_training_takes_the_policy_wherever_it_is(tmp_path: Path, name: str) -> None:
    words = Prover(tmp_path / name, "cpu").list_command("transformers", tmp_path / "run")[3:-2]
    assert compose(words).config.model.path == str(tmp_path / name / POLICY)


def test_a_training_named_alone_has_its_policy_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prover, "_make_policy", make_policy)
    monkeypatch.setattr(Prover, "_train", lambda prover, engine: {"has_policy": prover.has_policy})
    for names in (["policy", "training"], ["training"]):
        arguments = ["--device", "cpu", "--out", str(tmp_path), "--only", "training"]
        assert CliRunner().invoke(prove_gpu, arguments).exit_code == 0
        steps = json.loads((tmp_path / REPORT).read_text())["steps"]
        assert [step["name"] for step in steps] == names
        assert steps[-1]["verdict"] == "ok" and steps[-1]["figures"]["has_policy"]


def test_ctrl_c_leaves_no_training_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "pid"
    program = f"import os, pathlib, time; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(60)"

    def interrupt(_: float) -> None:
        if begun.is_file() and begun.read_text():
            raise KeyboardInterrupt
        pause(0.01)

    prover, pause = Prover(tmp_path, "cpu"), time.sleep
    make_policy(prover)
    monkeypatch.setattr(Prover, "list_command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(proving.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(prover.prove(("training",)))
    monkeypatch.undo()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(begun.read_text())).wait(timeout=10)  # raises if it lives
