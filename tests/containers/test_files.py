"""What stands in ``Dockerfile``, ``.dockerignore`` and ``compose.yaml``; the other tests of this folder run it."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import PurePosixPath
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.containers.engine import ROOT

DISTRIBUTIONS = {"./sandbox": "sandbox", ".": "", "./agents": "agents", "./training": "training"}
"""What pip is given for each of the four, and the folder of its pyproject.toml."""
COMMANDS = {"sandbox": "spear_sandbox.cli:sandbox", "retriever": "spear_envs.retrieval.cli:retriever"}


def read_stages() -> dict[str, list[str]]:
    """Name of each stage and its instructions, continued lines joined; the first is FROM."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    instructions = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines()
    stages: dict[str, list[str]] = {}
    for line in instructions:
        if line.startswith("FROM "):
            current = stages.setdefault(line.partition(" AS ")[2], [])
        elif not stages:
            continue
        current.append(line)
    return stages


def read_pins(name: str) -> dict[str, list[Requirement]]:
    lines = (ROOT / "constraints" / name).read_text("utf-8").splitlines()
    pins: dict[str, list[Requirement]] = {}
    for pin in (Requirement(line) for line in lines if line and not line.startswith("#")):
        pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    return pins


@pytest.fixture
def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with spear-training")
    found = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.fixture
def projects() -> dict[str, dict[str, Any]]:
    """The table ``project`` of each distribution, by what pip is given for it."""
    tomllib = pytest.importorskip("tomllib", reason="part of Python 3.11")
    return {
        place: tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
        for place, folder in DISTRIBUTIONS.items()
    }


def read_installs() -> dict[str, list[str]]:
    """By stage, what each `pip install` of requirements is given."""
    found: dict[str, list[str]] = {}
    for name, stage in read_stages().items():
        for command in re.findall(r"pip (?:--python \S+ )?install ([^&]*)", "\n".join(stage)):
            if "/wheel/" not in command:
                found.setdefault(name, []).append(command)
    return found


class TestDockerfile:
    def test_everything_that_is_installed_is_pinned(self) -> None:
        installs = [(name, command) for name, commands in read_installs().items() for command in commands]
        for name, command in installs:
            if "--require-hashes" in command:
                continue
            pins = re.search(r"-c constraints/(\w+)\.txt", command)
            assert pins and pins[1] == ("gpu" if name.startswith("gpu") else "cpu"), f"{name}: {command}"
        assert len(installs) >= 6

    def test_the_sandboxs_image_installs_nothing_without_a_digest(self) -> None:
        """The tools of all builds neither: pip itself, setuptools, and what lists an image's parts."""
        found = {name: commands for name, commands in read_installs().items() if "--require-hashes" in commands[0]}
        assert set(found) == {"build", "sbom", "sandbox-packages"}
        for first, *others in found.values():
            assert re.search(r"--no-deps --require-hashes -r constraints/(build|sbom|sandbox)\.txt$", first.strip())
            assert all("--no-deps --no-build-isolation" in other for other in others)
        pins = read_pins("cpu.txt")
        for name in ("build.txt", "sandbox.txt", "sbom.txt"):
            text = (ROOT / "constraints" / name).read_text("utf-8").replace("\\\n", " ")
            lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
            assert all(
                line[1:] and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", part) for part in line[1:])
                for line in lines
            )
            for requirement in (Requirement(line[0]) for line in lines):
                ours = pins.get(canonicalize_name(requirement.name))
                assert ours is None or requirement.specifier in [pin.specifier for pin in ours], requirement
                assert ours is not None or name == "sbom.txt", f"{requirement} is not in constraints/cpu.txt"

    def test_the_lock_of_the_sandbox_is_complete(self) -> None:
        """What its extra `server` needs, and what these need, as far as this environment has it."""
        text = (ROOT / "constraints" / "sandbox.txt").read_text("utf-8")
        locked = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", text, re.M)}
        wanted, seen = {"numpy", "scipy", "sympy", "spear-sandbox"}, set[str]()
        while wanted:
            name = wanted.pop()
            seen.add(name)
            try:
                lines = distribution(name).requires or []
            except PackageNotFoundError:
                continue
            extra = "server" if name == "spear-sandbox" else ""
            place = {"extra": extra, "python_version": "3.11"}  # the image's Python
            for requirement in map(Requirement, lines):
                if requirement.marker is None or requirement.marker.evaluate(place):
                    wanted |= {canonicalize_name(requirement.name)} - seen
        assert locked == seen - {"spear-sandbox"}

    def test_the_label_has_the_version(self) -> None:
        (version,) = re.findall(r'image\.version="(.+?)"', "\n".join(read_stages()["runtime"]))
        assert version == (ROOT / "VERSION").read_text("utf-8").strip()

    def test_the_pins_for_gpus_are_exact_and_within_the_ranges(self, projects: dict[str, dict[str, Any]]) -> None:
        pins = read_pins("gpu.txt")
        assert list(pins) == sorted(pins)
        for version in ("3.10", "3.11", "3.12"):
            for name, found in pins.items():
                fitting = [
                    pin for pin in found if pin.marker is None or pin.marker.evaluate({"python_version": version})
                ]
                assert len(fitting) <= 1, (name, version)
        extras = {"./sandbox": ["server"], ".": ["sandbox", "data", "env-server"], "./agents": ["api", "hf"]}
        for place, project in projects.items():
            named = [*project["dependencies"]]
            for extra in extras.get(place, ["gpu"]):
                named += project["optional-dependencies"][extra]
            for item in map(Requirement, named):
                if item.name.startswith("spear-"):
                    continue
                for pin in pins[canonicalize_name(item.name)]:
                    (exact,) = pin.specifier
                    assert exact.operator == "==" and item.specifier.contains(exact.version), item

    def test_what_git_ignores_and_git_itself_stay_outside(self) -> None:
        lines = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines()]
        left_out = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        wanted = {".git", *(line for line in lines if line and not line.startswith("#"))}
        assert {line for line in wanted if line not in left_out and f"**/{line}" not in left_out} == set()
        assert {"**/.env", "**/*.pem", "**/*.key", "**/.netrc"} <= set(left_out), "secrets"


class TestCompose:
    def test_ports_are_published_on_loopback_only(self, compose: dict[str, Any]) -> None:
        ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
        assert {name for name, found in ports.items() if found} == {"sandbox", "retriever"}
        assert all(port.startswith("127.0.0.1:") for found in ports.values() for port in found)
        assert not [service for service in compose["services"].values() if "network_mode" in service]

    def test_no_container_has_rights(self, compose: dict[str, Any]) -> None:
        for service in compose["services"].values():
            assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
            assert "no-new-privileges:true" in service["security_opt"]
            assert not {"privileged", "cap_add", "devices", "user", "pid", "ipc"} & set(service)

    def test_the_sandbox_has_its_profile_and_a_proc_of_its_own(self, compose: dict[str, Any]) -> None:
        options = dict(option.split("=") for option in compose["services"]["sandbox"]["security_opt"] if "=" in option)
        assert options["systempaths"] == "unconfined" and options["apparmor"] == "${SPEAR_APPARMOR:-unconfined}"
        profile = PurePosixPath(options["seccomp"])
        assert not profile.is_absolute() and (ROOT / profile).is_file()
        others = [name for name, service in compose["services"].items() if "seccomp" in str(service["security_opt"])]
        assert others == ["sandbox"], "the others keep the engine's own profile"

    def test_the_trainer_waits_until_both_are_healthy(self, compose: dict[str, Any]) -> None:
        services = compose["services"]
        assert all(service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL") for service in services.values())
        assert services["trainer"]["depends_on"] == {
            name: {"condition": "service_healthy"} for name in ("sandbox", "retriever")
        }
        for name, port in (("sandbox", 8080), ("retriever", 8000)):
            assert f"127.0.0.1:{port}/health" in services[name]["healthcheck"]["test"][-1]
            assert services[name]["ports"] == [f"127.0.0.1:${{SPEAR_{name.upper()}_PORT:-{port}}}:{port}"]

    @pytest.mark.parametrize("service", sorted(COMMANDS))
    def test_its_arguments_are_the_commands(self, compose: dict[str, Any], service: str) -> None:
        module, _, name = COMMANDS[service].partition(":")
        group = getattr(importlib.import_module(module), name)
        if service == "sandbox":
            (line,) = (line for line in read_stages()["sandbox"] if line.startswith("CMD "))
            first, *arguments = re.findall(r'"(.*?)"', line)
        else:
            of, first, *arguments = compose["services"][service]["command"]
            assert of == service
        context = group.commands[first].make_context(first, list(arguments))
        assert context.params["host"] == "0.0.0.0"
        assert context.params["port"] == {"sandbox": 8080, "retriever": 8000}[service]

    def test_the_trainers_overrides_compose(self, compose: dict[str, Any]) -> None:
        pytest.importorskip("verl", reason="spear-training is not installed")
        from spear_training.run.compose import compose as compose_words

        command, *arguments = compose["services"]["trainer"]["command"]
        assert command == "train" and arguments[-2] == "--out"
        assert compose_words(arguments[:-2]).config.env.kwargs["sandbox"] == "http://sandbox:8080"
