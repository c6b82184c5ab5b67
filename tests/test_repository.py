"""What stands around the code agrees with it: workflows, versions, the pages of the four rooms."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECTS = {
    "spear_sandbox": ROOT / "sandbox" / "pyproject.toml",
    "spear_envs": ROOT / "pyproject.toml",
    "spear_agents": ROOT / "agents" / "pyproject.toml",
    "spear_training": ROOT / "training" / "pyproject.toml",
}
ROOMS = ("sandbox", "spear_envs", "agents", "training")
PAGES = ("CHANGELOG.md", "SECURITY.md", *(f"{room}/README.md" for room in ROOMS))

_TARGET = re.compile(r"^([a-z][\w-]*):", re.M)
_MAKE = re.compile(r"\bmake\s+([a-z][\w-]*)")


def read_workflow(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with spear-training, and with the tools for the site")
    return yaml.safe_load(path.read_text("utf-8"))


def list_steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def list_pythons(project: Path) -> set[str]:
    """Of the classifiers. Python 3.10 has no tomllib."""
    return set(re.findall(r'^\s*"Programming Language :: Python :: (3\.\d+)",$', project.read_text("utf-8"), re.M))


def list_matrix(job: str) -> set[str]:
    """The Pythons that a job of CI runs with."""
    (ci,) = (path for path in WORKFLOWS if path.stem == "ci")
    pythons = read_workflow(ci)["jobs"][job]["strategy"]["matrix"]["python"]
    assert all(isinstance(python, str) for python in pythons), "quote them: 3.10 without quotes is 3.1"
    return set(pythons)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text("utf-8")))
    called = {name for step in list_steps(read_workflow(path)) for name in _MAKE.findall(step.get("run", ""))}
    assert called, "a workflow that calls no target"
    assert called <= targets, f"the Makefile has no target {sorted(called - targets)}"


def test_pythons_of_ci_are_those_of_the_classifiers() -> None:
    pythons = {name: list_pythons(project) for name, project in PROJECTS.items()}
    assert list_matrix("test") == pythons.pop("spear_training")
    assert list_matrix("test") | list_matrix("light") == pythons["spear_envs"]
    assert pythons["spear_sandbox"] == pythons["spear_envs"] == pythons["spear_agents"]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("CHANGELOG.md", r"^## \[([^\]]+)\]"),
        ("CITATION.cff", r"^version: *(\S+)$"),
        ("docs/cite.md", r"^ *version *= *\{([^}]+)\},$"),
        ("sandbox/spear_sandbox/deploy/k8s.yaml", r"^ *image: \S+:(\S+)$"),
    ],
)
def test_version_is_the_same_everywhere(name: str, pattern: str) -> None:
    found = re.search(pattern, (ROOT / name).read_text("utf-8"), re.M)
    assert found is not None, f"{name} names no version"
    assert found[1] == (ROOT / "VERSION").read_text("utf-8").strip()


@pytest.mark.parametrize("package", PROJECTS)
def test_each_room_has_a_page_and_types(package: str) -> None:
    project = PROJECTS[package]
    readme = re.search(r'^readme = "([^"]+)"$', project.read_text("utf-8"), re.M)
    assert readme is not None
    assert (project.parent / readme[1]).read_text("utf-8").startswith(f"# {package.replace('_', '-')}\n")
    assert (project.parent / package / "py.typed").is_file()


@pytest.mark.parametrize("name", PAGES)
def test_links_of_pages_outside_the_site_lead_somewhere(name: str) -> None:
    """Those of docs/ are checked when the site is built."""
    page = ROOT / name
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
