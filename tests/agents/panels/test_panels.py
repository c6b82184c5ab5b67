"""Panels, rescoring and the ledger, through their commands."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.ledger.__main__ import ledger
from spear_agents import panels
from spear_agents.cli import evaluate
from spear_agents.panels import OFFICIAL, Panel, Protocol, export_panel, find_differences, panel, read_panel, rescore
from spear_envs.core.errors import SpearError

ROOT = Path(__file__).resolve().parents[3]
SMALL = Panel(
    "small", "four corridors", "tests.spear_envs.corridor:tests/Corridor-v0", "test", {}, Protocol(2, history=1)
)


def call(command: Any, *arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the random policy and the expert on a small panel, and the panel's file."""
    folder = tmp_path_factory.mktemp("runs")
    export_panel(SMALL, folder / "small.json")
    for engine in ("random", "expert"):
        call(evaluate, "--panel", folder / "small.json", "--engine", engine, "--out", folder / engine)
    return folder


@pytest.fixture
def edit(runs: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a file of the runs with something replaced."""

    def change(name: str, old: str, new: str) -> Path:
        text = (runs / name).read_text()
        assert old in text
        path = tmp_path / Path(name).name
        path.write_text(text.replace(old, new, 1))
        return path

    return change


def test_the_official_panels_have_unlike_names_and_embedded_ones_are_made_here(tmp_path: Path) -> None:
    shown = call(panel, "list")
    assert all(name in shown for name in OFFICIAL)
    call(panel, "export", "webshop", "--out", tmp_path / "w.json")
    told = call(panel, "verify", tmp_path / "w.json")
    assert "100 tasks" in told
    found, written = read_panel(tmp_path / "w.json")
    assert found == OFFICIAL["webshop"] and written["tasks"][0]["content"]
    with pytest.raises(SpearError, match="Did you mean 'webshop'"):
        call(panel, "export", "webshp")


def test_a_panel_that_the_code_does_not_make_is_told(runs: Path, edit: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="changed after it was written"):
        call(panel, "verify", edit("small.json", '"samples": 2', '"samples": 3'))
    for other in ("{}", "[]", '{"format": 1}', "\x00"):
        (tmp_path / "other.json").write_text(other)
        with pytest.raises(SpearError, match="is not a panel"):
            call(panel, "verify", tmp_path / "other.json")
    for old, new, words in (
        ('"instruction": "', '"instruction": "x', "tasks differ"),
        ('"max_turns": ', '"max_turns": 1', "max_turns is"),
    ):
        path = edit("small.json", old, new)
        written = json.loads(path.read_text())
        path.write_text(json.dumps(written | {"digest": panels.digest_panel(written)}))
        assert words in call(panel, "verify", path, code=1)
        with pytest.raises(SpearError, match="does not match this code"):
            call(evaluate, "--panel", path, "--engine", "expert")
    _, written = read_panel(runs / "small.json")
    assert find_differences(written, SMALL) == []


def test_a_panel_decides_how_it_is_played(runs: Path) -> None:
    settings = json.loads((runs / "random" / "settings.json").read_text())
    assert (settings["split"], settings["history"], settings["seed"]) == ("test", 1, 0)
    for more in (("--temperature", "0.5"), ("--tasks", "1"), ("tests/Corridor-v0",)):
        with pytest.raises(SpearError, match="decides the tasks"):
            call(evaluate, "--panel", runs / "small.json", "--engine", "expert", *more)
    with pytest.raises(SpearError, match="which tasks"):
        call(evaluate, "--engine", "expert")


def test_recorded_responses_give_the_recorded_rewards(runs: Path, tmp_path: Path) -> None:
    assert "0 values differ" in call(rescore, runs / "random")
    shutil.copytree(runs / "expert", tmp_path / "forged")
    episodes = tmp_path / "forged" / "episodes.jsonl"
    lines = episodes.read_text().splitlines()
    forged = json.loads(lines[0])
    forged |= {"won": False, "stop": "failed", "reward_terms": forged["reward_terms"] | {"outcome": -1.0}}
    forged["turns"][0]["reward"] = 5.0
    episodes.write_text("\n".join([json.dumps(forged), *lines[1:]]) + "\n")
    shown = call(rescore, tmp_path / "forged", code=1)
    assert "turn 1 pays" in shown and "recorded 5" in shown and "won is True, recorded False" in shown
    # Fewer turns are another way to score, and no fault of the record.
    found = json.loads(call(rescore, runs / "expert", "--env", "max_turns=1", "--json"))
    assert found["recorded"]["mean"] == 1.0 > found["replayed"]["mean"] and found["differences"]


def test_a_ledger_is_computed_anew(runs: Path, tmp_path: Path) -> None:
    file, folder = runs / "small.json", tmp_path / "results"
    for engine in ("random", "expert"):
        call(ledger, "add", runs / engine, "--panel", file, "--name", engine, "--ledger", folder)
    # An entry names its panel as a stranger finds it; that of a file is the file's.
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().replace('"panel": "small"', f'"panel": "{file}"'))
    shown = call(ledger, "verify", "--ledger", folder, "--play")
    assert shown.count("(played again)") == 2 and "expert: holds, 100.0 %" in shown
    assert "the same episodes" in call(ledger, "verify", "expert", "--ledger", folder, "--run", runs / "expert")
    outside = call(ledger, "verify", "expert", "--ledger", folder, "--run", runs / "random", code=1)
    assert "is outside 100.0 %" in outside
    call(ledger, "page", "--ledger", folder, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.index("| expert | 100.0") < page.index("| random |")
    call(ledger, "verify", "--ledger", folder, "--page", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(page.replace("100.0", "100.1"))
    assert "does not match this ledger" in call(
        ledger, "verify", "--ledger", folder, "--page", tmp_path / "page.md", code=1
    )
    with pytest.raises(SpearError, match="an entry is never changed"):
        call(ledger, "add", runs / "random", "--panel", file, "--name", "random", "--ledger", folder)
    with pytest.raises(SpearError, match="panel sokoban says"):
        call(ledger, "add", runs / "random", "--panel", "sokoban", "--name", "x", "--ledger", folder)
    entry = json.loads((folder / "expert.json").read_text())
    entry["success"]["mean"] = 0.99
    (folder / "expert.json").write_text(json.dumps(entry))
    assert "unlike its figures" in call(ledger, "verify", "--ledger", folder, code=1)
    entry["outcomes"][next(iter(entry["outcomes"]))] = [0.0, 0.0]
    (folder / "expert.json").write_text(json.dumps(entry))
    assert "the digest does not match" in call(ledger, "verify", "--ledger", folder, code=1)


def test_a_published_model_is_played_again(runs: Path, tiny_model: Path, tmp_path: Path) -> None:
    file, folder, model = runs / "small.json", tmp_path / "results", tmp_path / "model"
    shutil.copytree(tiny_model, model)
    play = ("--panel", file, "--engine", "hf", "--model", model, "--out", tmp_path / "run")
    call(evaluate, *play)
    add = ("add", tmp_path / "run", "--panel", file, "--ledger", folder, "--publish")
    call(ledger, *add, "--name", "tiny", "--model", "a tiny model")
    path = folder / "tiny.json"
    entry = json.loads(path.read_text())
    assert entry["model"] == "a tiny model" and entry["command"].endswith("--model results/policies/tiny")
    path.write_text(json.dumps(entry | {"panel": str(file)}))
    verify = ("verify", "--ledger", folder, "--play")
    assert "tiny: holds" in (told := call(ledger, *verify)) and "(played again: " in told
    with pytest.raises(SpearError, match="a scripted player is not the folder of a model"):
        call(ledger, "add", runs / "random", *add[2:], "--name", "none")
    (folder / "policies" / "left").mkdir()
    with pytest.raises(SpearError, match="left exists: choose another name"):
        call(ledger, *add, "--name", "left")
    assert not list((folder / "policies").glob(".*")) and sorted(folder.glob("*.json")) == [path]
    settings = tmp_path / "run" / "settings.json"
    played = settings.read_text()
    for change in ({"model_digest": None, "engine": "openai"}, {"model": "hub/name"}, {"vllm": {"lora": "adapter"}}):
        settings.write_text(json.dumps(json.loads(played) | change))
        with pytest.raises(SpearError, match="publish copies one"):
            call(ledger, *add, "--name", "other")
    own = folder / "policies" / "own"
    shutil.copytree(model, own)
    settings.write_text(json.dumps(json.loads(played) | {"model": str(own)}))
    call(ledger, *add, "--name", "own")  # it is where it belongs
    (folder / "own.json").unlink()
    settings.write_text(played)
    config = json.loads((folder / "policies" / "tiny" / "config.json").read_text())
    for weights in (model, folder / "policies" / "tiny"):
        (weights / "config.json").write_text(json.dumps(config | {"initializer_range": 0.5}))
    with pytest.raises(SpearError, match="other weights than the run was played with"):
        call(ledger, *add, "--name", "other")
    assert "does not hold the weights of tiny" in call(ledger, *verify, code=1)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "../.."},
        {"weights": "/policies/demo-spear-60"},
        {"weights": 5},
        {"engine": "openai"},
        {"engine": "other"},
        {"outcomes": {}},
        {"outcomes": {"a": []}},
        {"outcomes": {"a": ["1"]}},
        {"outcomes": [1]},
        {"success": None},
        {"panel": 5},
    ],
)
def test_entries_that_say_something_else_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    entry = json.loads((ROOT / "results" / "demo-spear-60.json").read_text())
    (tmp_path / "demo-spear-60.json").write_text(json.dumps(entry | change))
    with pytest.raises(SpearError, match=r"demo-spear-60\.json is not an entry of a ledger"):
        call(ledger, "verify", "--ledger", tmp_path, "--play")


@pytest.mark.slow
def test_the_ledger_of_this_project_holds_and_its_page_is_made_of_it() -> None:
    call(ledger, "verify", "--ledger", ROOT / "results", "--page", ROOT / "docs" / "leaderboard.md")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo-warmstart", "demo-spear-60"])
def test_the_published_policies_are_played_again(name: str) -> None:
    assert "played again: " in call(ledger, "verify", name, "--ledger", ROOT / "results", "--play")


def test_the_table_of_the_readme_is_made_of_the_ledger(tmp_path: Path) -> None:
    page, written = tmp_path / "README.md", (ROOT / "README.md").read_text("utf-8")
    fill = ("fill", page, "--ledger", ROOT / "results")
    assert "| all | 31.6% [" in written
    page.write_text(written, "utf-8")
    assert "unchanged" in call(ledger, *fill), "spear ledger fill README.md updates it"
    page.write_text(written.replace("| all | 31.6%", "| all | 31.5%").replace("(59)", "(60)"), "utf-8")
    assert "updated" in call(ledger, *fill) and page.read_text("utf-8") == written
    for old, new, told in (
        ("<!-- ledger: demo-warmstart", "<!-- ledger: demo-cold", "'demo-cold' is not in the ledger"),
        ("sokoban-random sokoban-expert", "webshop-random", "webshop-random is on other tasks"),
        ("<!-- end -->", "", "does not mark a table"),
    ):
        page.write_text(written.replace(old, new), "utf-8")
        with pytest.raises(SpearError, match=told):
            call(ledger, *fill)
        assert page.read_text("utf-8") == written.replace(old, new)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "-x", "n" * 101])
def test_names_that_are_not_of_one_file_are_refused(runs: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(SpearError, match="is not a valid name"):
        call(ledger, "add", runs / "expert", "--panel", runs / "small.json", f"--name={name}", "--ledger", tmp_path)


def test_entries_without_weights_and_missing_ones(tmp_path: Path) -> None:
    entry = json.loads((ROOT / "results" / "demo-spear-60.json").read_text())
    path = tmp_path / "demo-spear-60.json"
    path.write_text(json.dumps(entry))
    told = call(ledger, "verify", "--ledger", tmp_path, "--play", code=1)
    assert "does not hold the weights" in told
    del entry["weights"]  # of an earlier version
    path.write_text(json.dumps(entry))
    assert "demo-spear-60: holds" in call(ledger, "verify", "--ledger", tmp_path, "--play")
