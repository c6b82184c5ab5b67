"""What is in the images and what is not, and the environments at work in theirs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.containers.engine import ROOT, Engine

pytestmark = [pytest.mark.slow, pytest.mark.container]

HARDENED = "--read-only --tmpfs /tmp:mode=1777 --cap-drop ALL --security-opt no-new-privileges --network none"
OWN_NAMESPACES = (
    f"--security-opt seccomp={ROOT / 'sandbox' / 'spear_sandbox' / 'deploy' / 'seccomp.json'} --security-opt unmask=ALL"
)
PACKAGES = """
import importlib.metadata, json, shutil
tools = [tool for tool in ("gcc", "cc", "g++", "c++", "clang", "ld", "make", "pip") if shutil.which(tool)]
packages = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
if "spear-envs" in packages:
    import spear_envs.bm25._ranking
print(json.dumps({"tools": tools, "packages": packages}))
"""
EPISODE = """
import gymnasium as gym

env = gym.make("spear_envs:spear/CodeInterpreter-v0", split="test", response_format="plain")
env.reset(seed=1)
done = False
while not done:
    _, _, terminated, truncated, info = env.step(env.unwrapped.expert_plan()[0])
    done = terminated or truncated
assert info["won"] and not info.get("fault"), info
env.close()
"""
LARGEST_MB = {"sandbox_image": 700, "envs_image": 900, "train_image": 3000}
LARGE = pytest.mark.large
OURS = {
    "sandbox_image": {"spear-sandbox"},
    "envs_image": {"spear-sandbox", "spear-envs", "spear-agents"},
    "train_image": {"spear-sandbox", "spear-envs", "spear-agents", "spear-training"},
}
IMAGES = ["sandbox_image", "envs_image", pytest.param("train_image", marks=LARGE)]


def inspect(engine: Engine, image: str) -> dict[str, Any]:
    (found,) = json.loads(engine.do("podman", "image", "inspect", image))
    assert isinstance(found, dict)
    return found


@dataclass(frozen=True)
class Image:
    """An image, the size that it may have, and those of our distributions that are to be in it."""

    name: str
    largest_mb: int
    ours: set[str]


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> Image:
    return Image(request.getfixturevalue(request.param), LARGEST_MB[request.param], OURS[request.param])


def test_an_image_is_small_labelled_and_not_roots(engine: Engine, image: Image) -> None:
    found = inspect(engine, image.name)
    assert found["Size"] < image.largest_mb * 1e6
    assert found["Config"]["User"] == "10001:10001"
    labels = found["Config"]["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"] == (ROOT / "VERSION").read_text("utf-8").strip()
    assert {"title", "description"} <= {label.rpartition(".")[2] for label in labels}


def test_an_image_has_the_pinned_packages_and_no_tools_to_build_more(engine: Engine, image: Image) -> None:
    done = engine.run(f"{HARDENED} --entrypoint python3", image.name, "-c", PACKAGES)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tools"] == []
    lines = (ROOT / "constraints" / "cpu.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    allowed = {(canonicalize_name(pin.name), next(iter(pin.specifier)).version) for pin in pins}
    installed = {(canonicalize_name(name), version.partition("+")[0]) for name, version in found["packages"].items()}
    unpinned = {name for name, _ in installed - allowed}
    assert unpinned == image.ours and len(installed) > 20


def test_an_image_lists_its_parts(engine: Engine, image: Image) -> None:
    """As CycloneDX, which scanners of known faults read."""
    done = engine.run(f"{HARDENED} --entrypoint cat", image.name, "/opt/spear/sbom.cdx.json")
    listed = json.loads(done.stdout)
    assert listed["bomFormat"] == "CycloneDX"
    found = {(canonicalize_name(part["name"]), part["version"]) for part in listed["components"]}
    done = engine.run(f"{HARDENED} --entrypoint python3", image.name, "-c", PACKAGES)
    installed = {(canonicalize_name(name), version) for name, version in json.loads(done.stdout)["packages"].items()}
    assert found == installed


def test_the_sandboxs_image_has_what_its_programs_may_import_and_no_environment(
    engine: Engine, sandbox_image: str
) -> None:
    done = engine.run(f"{HARDENED} --entrypoint python3", sandbox_image, "-c", PACKAGES)
    found = set(json.loads(done.stdout)["packages"])
    assert {"numpy", "scipy", "sympy", "mpmath"} <= found
    assert not {"gymnasium", "pillow", "pyarrow", "math-verify"} & found
    done = engine.run(HARDENED, sandbox_image, "--help")
    assert done.returncode == 0 and done.stdout.startswith("Usage: spear-sandbox "), done.stdout + done.stderr


def test_an_environment_keeps_the_contract_in_the_image(engine: Engine, envs_image: str) -> None:
    done = engine.run(HARDENED, envs_image, "check", "spear/Sokoban-v1", timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_an_environment_has_a_sandbox_of_its_own_in_the_image(engine: Engine, envs_image: str) -> None:
    done = engine.run(f"{HARDENED} {OWN_NAMESPACES} --entrypoint python3", envs_image, "-c", EPISODE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@LARGE
def test_the_fast_tests_pass_in_their_image(engine: Engine, test_image: str) -> None:
    done = engine.run(f"--shm-size 1g {OWN_NAMESPACES}", test_image, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
