"""The check of verl's names: what it says of a verl that lacks some, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spear_envs.doctor.findings import Verdict
from spear_training import verl_check


def test_it_is_light() -> None:
    code = "import sys, spear_training.verl_check; print({'verl', 'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_a_process_says_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_check, "find_spec", lambda name: True)
    for code, verdict, told in (
        ("print('noise'); print('[]')", Verdict.OK, "that the plugin relies on"),
        ('print(\'["a is gone", "b", "c", "d"]\')', Verdict.PROBLEM, "4 of "),
        ("import no_such_verl", Verdict.PROBLEM, "No module named 'no_such_verl'"),
        ("print('not json')", Verdict.PROBLEM, "it said nothing"),
    ):
        (found,) = verl_check.check_verl((sys.executable, "-c", code))
        assert found.verdict is verdict and told in found.found
    monkeypatch.setattr(verl_check, "find_spec", lambda name: None)
    assert list(verl_check.check_verl()) == []


def test_faults_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old_verl.py").write_text("def step(batch):\n    return batch\n\n\nclass Worker:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(verl_check, "METHODS", {"old_verl:step": ("batch", "metrics"), "old_verl:Worker.reset": ()})
    monkeypatch.setattr(verl_check, "NAMES", ("old_verl:Worker", "no_such_verl:Worker"))
    monkeypatch.setattr(verl_check, "TEXTS", {"old_verl:step": ("return batch",), "old_verl:Worker": ("return 1",)})
    paths = ("old_verl:step", "old_verl:Worker.reset", "no_such_verl:Worker", "old_verl:Worker")
    step, reset, missing, source = map(verl_check.find_fault, paths)
    assert step == "old_verl:step takes batch, not metrics"
    assert reset is not None and "is gone" in reset and missing is not None and "no_such_verl" in missing
    assert source == "old_verl:Worker no longer says return 1"
    assert len(verl_check.list_faults()) == 4
