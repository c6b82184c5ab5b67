"""Each finding of ``spear doctor`` is provoked once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from spear_envs import cli
from spear_envs.doctor import machine, packages
from spear_envs.doctor.findings import Finding, Verdict, examine


def one(findings: Iterable[Finding], name: str) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        ((3, 9), "problem", "3.10 to 3.13"),
        ((3, 14), "problem", "to 3.12 for training"),
        ((3, 13), "note", "spear-training needs 3.12 or older"),
        ((3, 12), "note", "3.11"),
        ((3, 11), "ok", ""),
    ],
)
def test_python(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], verdict: str, words: str) -> None:
    monkeypatch.setattr(packages.sys, "version_info", (*version, 1))
    found = one(packages.check_python(), "Python")
    assert found.verdict.value == verdict and words in found.mend


def test_versions_against_the_allowed_and_the_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("spear_training")
    installed = {"torch": "2.13.0+cpu", "transformers": "4.50.0", "ray": "2.61.0rc1", "numpy": "2.3.5"}
    monkeypatch.setattr(packages, "find_version", installed.get)
    ranges = {"torch": SpecifierSet("<2.14,>=2.11"), "transformers": SpecifierSet(">=5.5"), "ray": SpecifierSet(">=2")}
    found = list(packages.check_versions(ranges, {"torch": "2.13.0", "ray": "2.60.0"}))
    assert [(item.name, item.verdict.value) for item in found] == [
        ("torch", "ok"),
        ("transformers", "problem"),
        ("ray", "note"),
        ("numpy", "ok"),
        ("verl", "note"),
    ]
    assert "transformers>=5.5" in found[1].mend and "2.60.0" in found[2].mend and "train" in found[4].mend


def test_ranges_and_pins_have_one_source() -> None:
    """The metadata of the distributions and the constraints of the checkout."""
    pytest.importorskip("spear_training")
    ranges, pins = packages.read_ranges(), packages.read_pins()
    assert "0.9.1" in ranges["verl"] and "0.9.2" not in ranges["verl"]
    assert set(packages.WATCHED) - {"vllm"} <= set(ranges)
    assert pins["verl"] == "0.9.1" and packages.read_pins(Path("nowhere")) == {}


def test_builds_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, verdict in (
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, Verdict.PROBLEM),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, Verdict.OK),
        ({"torch": "2.11.0", "torchvision": "0.26.0"}, Verdict.OK),
    ):
        monkeypatch.setattr(packages, "find_version", installed.get)
        found = one(packages.check_torch(), "torch build")
        assert found.verdict is verdict and ("pip uninstall torchvision" in found.mend) == (verdict is Verdict.PROBLEM)
    monkeypatch.setattr(packages, "find_version", {}.get)
    assert list(packages.check_torch()) == []


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(machine.check_disk(tmp_path / "not" / "yet", 1), "disk").verdict is Verdict.OK
    full = one(machine.check_disk(tmp_path, 10**18), "disk")
    assert full.verdict is Verdict.NOTE and "SPEAR_DATA" in full.mend
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert one(machine.check_disk(tmp_path), "disk").verdict is Verdict.PROBLEM


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    1024 kB\n")
    findings = list(machine.check_memory(tmp_path / "none", meminfo))
    assert one(findings, "shared memory").verdict is Verdict.PROBLEM
    little = one(findings, "memory")
    assert little.verdict is Verdict.NOTE and little.found == "1.0 MB available"
    monkeypatch.setattr(machine, "SHARED_BYTES", 10**18)
    note = one(machine.check_memory(tmp_path, meminfo), "shared memory")
    assert note.verdict is Verdict.NOTE and "--shm-size" in note.mend


def test_graphics_cards() -> None:
    def check(code: str) -> Finding:
        return one(machine.check_graphics((sys.executable, "-c", code)), "GPUs")

    assert one(machine.check_graphics(("no-such-command",)), "GPUs").found.startswith("none")
    assert check("print('NVIDIA H100, 81559 MiB, 570.1')").verdict is Verdict.OK
    broken = check("import sys; sys.exit('Failed to initialize NVML: Driver/library version mismatch')")
    assert broken.verdict is Verdict.PROBLEM and "NVML" in broken.found and "driver" in broken.mend
    assert check("").verdict is Verdict.PROBLEM


def test_isolation() -> None:
    def check(levels: object, code: int) -> Finding:
        said = f"import sys; print({json.dumps({'levels': levels})!r}); sys.exit({code})"
        return one(machine.check_isolation((sys.executable, "-c", said)), "isolation")

    holds = check({"namespaces": [{"ok": True}], "bwrap": [{"ok": False}]}, 0)
    assert holds.verdict is Verdict.OK and "namespaces" in holds.found and "bwrap" not in holds.found
    assert check({"namespaces": [{"ok": False}]}, 78).verdict is Verdict.PROBLEM
    silent = one(machine.check_isolation((sys.executable, "-c", "import sys; sys.exit('no such thing')")), "isolation")
    assert silent.verdict is Verdict.PROBLEM and "no such thing" in silent.found


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SPEAR_OFFLINE", "1")
    nothing = one(machine.check_data(), "data")
    assert nothing.verdict is Verdict.NOTE and "SPEAR_OFFLINE" in nothing.found and "spear data list" in nothing.mend
    (tmp_path / "data" / "webshop" / "raw").mkdir(parents=True)
    assert one(machine.check_data(), "data") == nothing, "a failed download left an empty folder"
    (tmp_path / "data" / "alfworld").mkdir(parents=True)
    (tmp_path / "data" / "alfworld" / "games.zip").touch()
    assert "alfworld in" in one(machine.check_data(), "data").found


def test_a_check_that_fails_is_a_finding() -> None:
    def check_the_moon() -> Iterable[Finding]:
        raise OSError("too far")

    (found,) = examine(check_the_moon)
    assert (found.name, found.verdict) == ("the moon", Verdict.PROBLEM) and "too far" in found.found
    with pytest.raises(ValueError, match="lacks a fix"):
        Finding("x", Verdict.PROBLEM, "y")


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Finding("fine", Verdict.OK, "yes"), Finding("disk", Verdict.PROBLEM, "full", "Free it.")
    for findings, code in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr("spear_envs.doctor.cli.list_checks", lambda findings=findings: {"one": lambda: findings})
        with pytest.raises(SystemExit) as caught:
            cli.main(["doctor"])
        assert caught.value.code == code
        shown = capsys.readouterr().out
        plural = "" if code else "s"
        assert f"{code} problem{plural}, 0 notes" in shown and ("Free it." in shown) == bool(code)
