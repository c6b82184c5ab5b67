"""What pages repeat from pyproject.toml and the code: extras, commands, messages of errors."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT

DISTRIBUTIONS = {
    "spear-sandbox": ROOT / "sandbox",
    "spear-envs": ROOT,
    "spear-agents": ROOT / "agents",
    "spear-training": ROOT / "training",
}


def read_page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def test_the_page_on_installing_has_every_extra() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python 3.11")
    projects = {
        name: tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        for name, folder in DISTRIBUTIONS.items()
    }
    rows = re.findall(r"^\| `([\w-]+)` \| ([\w-]+(?:, [\w-]+)*) \|", read_page("installing.md"), re.MULTILINE)
    told = {(extra, name) for extra, names in rows for name in names.split(", ") if name in DISTRIBUTIONS}
    assert told == {(extra, name) for name, project in projects.items() for extra in project["optional-dependencies"]}


def test_the_page_of_commands_has_every_command() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python 3.11")
    page = read_page("commands.md")
    for folder in DISTRIBUTIONS.values():
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        for command in project["entry-points"]["spear.commands"]:
            assert re.search(rf"`spear {command}[ `]", page), command


def test_errors_of_an_algorithm_of_ones_own_are_those_shown() -> None:
    pytest.importorskip("torch", reason="spear-training is not installed")
    from spear_training.algorithms import RowTable, SettingsError, SpearSettings, estimate

    page = read_page("own-algorithm.md")
    with pytest.raises(SettingsError) as wrong_name:
        SpearSettings.from_mapping({"loss": {"policy": "gpso"}})
    assert f"{wrong_name.value}\n" in page
    rows = RowTable(group=["g"] * 5, response_length=[2] * 5)
    with pytest.raises(SettingsError) as wrong_shape:
        estimate(rows, SpearSettings.from_mapping({"advantage": {"estimator": "tests.docs.test_tables:f"}}))
    assert str(wrong_shape.value).replace("tests.docs.test_tables:f", "mine:f") in page


def f(rows: object, settings: object) -> list[float]:
    return [0.0] * 3
