"""Folders and files of strangers: no command runs, reaches or reads what they name, nor waits for what never comes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spear_agents.cli import evaluate
from spear_agents.exports.cli import export_data
from spear_agents.panels.cli import panel, rescore
from spear_agents.panels.panel import OFFICIAL, digest_panel, write_panel
from spear_agents.records import EPISODES, SETTINGS
from spear_agents.replay.runs import Run
from spear_agents.shortcuts import evaluate as run
from spear_envs.core.errors import SpearError
from spear_envs.data.files import read_yaml_text

HARMFUL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("strangers_module:spear/Sokoban-v1", {"modality": "text"}),
    ("this:spear/Sokoban-v1", {}),
    ("spear/McpTools-v0", {"tasks": "tasks.jsonl", "server": "touch trace"}),
    ("spear/McpTools-v0", {"tasks": "x", "server": "reboot"}),
    ("spear/McpTools-v0", {"tasks": "x", "pass_variables": ["HOME"]}),
    ("spear/CodeInterpreter-v0", {"sandbox": "http://127.0.0.1:9"}),
    ("spear/CodeInterpreter-v0", {"dataset": "/etc/passwd"}),
    ("spear/CodeInterpreter-v0", {"dataset": ".."}),
    ("spear/SearchR1-v0", {"retriever": "http://127.0.0.1:9"}),
    ("spear/SearchR1-v0", {"retriever": ["http://127.0.0.1:9"]}),
    ("spear/SearchR1-v0", {"retriever": "retriever.yaml"}),
    ("spear/SearchR1-v0", {"corpus": "tasks.jsonl"}),
    ("spear/Sokoban-v1", {"level": "/dev/zero"}),
    ("no/Such-v0", {}),
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of one episode, without harm."""
    folder = tmp_path_factory.mktemp("strangers") / "run"
    run("spear/Sokoban-v1", engine="random", tasks=1, env_kwargs={"modality": "text"}, out=folder, progress=False)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the files name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strangers_module.py").write_text("open('trace', 'w')\n")
    (tmp_path / "retriever.yaml").write_text("kind: bm25\n")
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    return tmp_path


def copy_run(source: Path, target: Path, **settings: Any) -> Path:
    shutil.copytree(source, target)
    path = target / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return target


def write_strangers_panel(path: Path, env_id: str, kwargs: dict[str, Any]) -> Path:
    written = write_panel(OFFICIAL["sokoban-tiny"]) | {"env_id": env_id, "env_kwargs": kwargs}
    path.write_text(json.dumps(written | {"digest": digest_panel(written)}))
    return path


@pytest.mark.parametrize(("env_id", "kwargs"), HARMFUL)
def test_no_environment_is_made_that_runs_reaches_or_reads(
    here: Path, played: Path, env_id: str, kwargs: dict[str, Any]
) -> None:
    folder = copy_run(played, here / "run", env_id=env_id, env_kwargs=kwargs, engine="hf", model="policy")
    file = write_strangers_panel(here / "panel.json", env_id, kwargs)
    lines = (folder / EPISODES).read_text().replace('"tokens": "bytes"', '"tokens": "model"')
    (folder / EPISODES).write_text(lines)
    commands: list[tuple[Any, list[str]]] = [
        (rescore, [str(folder)]),
        (panel, ["verify", str(file)]),
        (panel, ["export", str(file), "--out", "copy.json"]),
        (evaluate, ["--panel", str(file), "--engine", "random"]),
    ]
    if '"tokens": "model"' in lines:
        commands.append((export_data, [str(folder), "--form", "dataset", "--out", "out"]))
    for command, words in commands:
        found = CliRunner().invoke(command, words)
        assert isinstance(found.exception, SpearError), (words, found.output)
        assert "--trust" in str(found.exception) and "\n" not in str(found.exception)
    assert not (here / "trace").exists()


def test_consent_is_given_on_the_command_line(here: Path, played: Path) -> None:
    (here / "mine.py").write_text("import spear_envs\n")
    folder = copy_run(played, here / "run", env_id="mine:spear/Sokoban-v1")
    assert CliRunner().invoke(rescore, [str(folder)]).exit_code == 1
    assert CliRunner().invoke(rescore, [str(folder), "--trust"], catch_exceptions=False).exit_code == 0
    plain = copy_run(played, here / "plain")
    assert CliRunner().invoke(rescore, [str(plain)], catch_exceptions=False).exit_code == 0, "words and numbers"


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [make_pipe, link_zero, make_huge])
@pytest.mark.parametrize("name", [SETTINGS, EPISODES, "metrics/0.jsonl"])
def test_a_page_reads_regular_files_of_bounded_size(
    tmp_path: Path, played: Path, name: str, make: Callable[[Path], None]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(played, folder)
    (folder / "metrics").mkdir()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    try:
        assert Run(folder).summarise()["trainings"] == []
    except SpearError as error:
        assert str(folder) in str(error)
    if name == SETTINGS:
        found = CliRunner().invoke(rescore, [str(folder)])
        assert isinstance(found.exception, SpearError)


@pytest.mark.timeout(20)
def test_yaml_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(["a0: &a0 [1]", *levels]))
    for text in (file.read_text(), "a: &a [*a]", "a: *a " + "[" * 100_000):
        file.write_text(text)
        with pytest.raises((yaml.YAMLError, RecursionError)):
            read_yaml_text(file)
    file.write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    assert yaml.safe_load(read_yaml_text(file)) == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
