"""Each finding of ``spear doctor`` is provoked once."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from spear_envs import doctor
from spear_envs.doctor import Finding, Verdict


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
    monkeypatch.setattr(doctor.sys, "version_info", (*version, 1))
    found = one(doctor.check_python(), "Python")
    assert found.verdict.value == verdict and words in found.mend


def test_versions_against_the_allowed_and_the_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("spear_training")
    installed = {"torch": "2.13.0+cpu", "transformers": "4.50.0", "ray": "2.61.0rc1", "numpy": "2.3.5"}
    monkeypatch.setattr(doctor, "find_version", installed.get)
    ranges = {"torch": SpecifierSet("<2.14,>=2.11"), "transformers": SpecifierSet(">=5.5"), "ray": SpecifierSet(">=2")}
    found = list(doctor.check_versions(ranges, {"torch": "2.13.0", "ray": "2.60.0"}))
    assert [(item.name, item.verdict.value) for item in found] == [
        ("torch", "ok"),
        ("transformers", "problem"),
        ("ray", "note"),
        ("numpy", "ok"),
        ("verl", "note"),
    ]
    assert "transformers>=5.5" in found[1].mend and "2.60.0" in found[2].mend and "train" in found[4].mend


def test_builds_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, verdict in (
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, Verdict.PROBLEM),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, Verdict.OK),
        ({"torch": "2.11.0", "torchvision": "0.26.0"}, Verdict.OK),
    ):
        monkeypatch.setattr(doctor, "find_version", installed.get)
        found = one(doctor.check_torch(), "torch build")
        assert found.verdict is verdict and ("pip uninstall torchvision" in found.mend) == (verdict is Verdict.PROBLEM)
    monkeypatch.setattr(doctor, "find_version", {}.get)
    assert list(doctor.check_torch()) == []


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(doctor.check_disk(tmp_path / "not" / "yet", 1), "disk").verdict is Verdict.OK
    full = one(doctor.check_disk(tmp_path, 10**18), "disk")
    assert full.verdict is Verdict.NOTE and "SPEAR_DATA" in full.mend
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert one(doctor.check_disk(tmp_path), "disk").verdict is Verdict.PROBLEM


def test_memory_is_that_of_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 64000000 kB\n")
    monkeypatch.setattr(doctor, "find_free_memory", lambda: 10**9)
    found = one(doctor.check_memory(tmp_path, tmp_path / "meminfo"), "memory")
    assert found.verdict is Verdict.NOTE and "end other programs" in found.mend


def test_isolation() -> None:
    def check(levels: object, code: int) -> Finding:
        said = f"import sys; print({json.dumps({'levels': levels})!r}); sys.exit({code})"
        return one(doctor.check_isolation((sys.executable, "-c", said)), "isolation")

    holds = check({"namespaces": [{"ok": True}], "bwrap": [{"ok": False}]}, 0)
    assert holds.verdict is Verdict.OK and "namespaces" in holds.found and "bwrap" not in holds.found
    assert check({"namespaces": [{"ok": False}]}, 78).verdict is Verdict.PROBLEM
    silent = one(doctor.check_isolation((sys.executable, "-c", "import sys; sys.exit('no such thing')")), "isolation")
    assert silent.verdict is Verdict.PROBLEM and "no such thing" in silent.found


def test_graphics_cards() -> None:
    def check(code: str) -> Finding:
        return one(doctor.check_graphics((sys.executable, "-c", code)), "GPUs")

    assert one(doctor.check_graphics(("no-such-command",)), "GPUs").found.startswith("none")
    assert check("print('NVIDIA H100, 81559 MiB, 570.1')").verdict is Verdict.OK
    broken = check("import sys; sys.exit('Failed to initialize NVML: Driver/library version mismatch')")
    assert broken.verdict is check("").verdict is Verdict.PROBLEM and "NVML" in broken.found


def test_a_check_that_fails_is_a_finding() -> None:
    def check_the_moon() -> Iterable[Finding]:
        raise OSError("too far")

    (found,) = doctor.examine(check_the_moon)
    assert (found.name, found.verdict) == ("the moon", Verdict.PROBLEM) and "too far" in found.found


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SPEAR_OFFLINE", "1")
    nothing = one(doctor.check_data(), "data")
    assert nothing.verdict is Verdict.NOTE and "SPEAR_OFFLINE" in nothing.found and "spear data list" in nothing.mend
    (tmp_path / "data" / "webshop" / "raw").mkdir(parents=True)
    assert one(doctor.check_data(), "data") == nothing, "a failed download left an empty folder"
    (tmp_path / "data" / "alfworld").mkdir(parents=True)
    (tmp_path / "data" / "alfworld" / "games.zip").touch()
    assert "alfworld in" in one(doctor.check_data(), "data").found


# ---------------------------------------------------------------- as a command, where something is really broken


def add_distribution(folder: Path, name: str, version: str, *requirements: str, package: str | None = None) -> None:
    """A distribution as pip leaves it: metadata, and perhaps a package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    if package is not None:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("")
        (info / "top_level.txt").write_text(f"{package}\n")
        (info / "RECORD").write_text(f"{package}/__init__.py,,\n")


def ask(site: Path, *checks: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and findings by name, with a folder that comes before the installed packages."""
    command = [sys.executable, "-m", "spear_envs.cli", "doctor", "--json", *checks]
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, cwd=site, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return done.returncode, {finding["name"]: finding for finding in report["findings"]}


def test_checks_of_other_packages(tmp_path: Path) -> None:
    add_distribution(tmp_path, "my-cluster", "1.0", package="my_cluster")
    code = "from spear_envs.doctor import Finding, Verdict\n\n\ndef check():\n    "
    code += "return [Finding('scratch', Verdict.PROBLEM, 'not mounted', 'Mount it.')]\n"
    (tmp_path / "my_cluster" / "__init__.py").write_text(code)
    points = "[spear.checks]\nscratch = my_cluster:check\ngone = my_cluster.gone:check\n"
    (tmp_path / "my_cluster-1.0.dist-info" / "entry_points.txt").write_text(points)
    status, found = ask(tmp_path, "scratch", "gone")
    assert status == 1 and found["scratch"]["mend"] == "Mount it."
    assert "No module named 'my_cluster.gone'" in found["gone"]["found"]
