"""Panels, rescoring and the ledger, through their commands."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ledger.__main__ import ledger
from spear_agents.cli import evaluate
from spear_agents.comparison.significance import compare
from spear_agents.engines.openai import Server
from spear_agents.evaluation import panels
from spear_agents.evaluation.baselines import Method
from spear_agents.evaluation.panels import (
    OFFICIAL,
    Panel,
    Protocol,
    export_panel,
    find_differences,
    panel,
    read_panel,
    write_panel,
)
from spear_agents.evaluation.rescoring import rescore
from spear_agents.evaluation.settings import EngineKind, EvalSettings, PlayedPanel
from spear_agents.play.trajectory import Layout
from spear_agents.shortcuts import compare as compare_folders
from spear_agents.shortcuts import load
from spear_agents.viewer.runs import Run
from spear_envs.core.errors import SpearError
from spear_envs.data import unpack_archive
from tests.commands import call

ROOT = Path(__file__).resolve().parents[3]
SMALL = Panel(
    "small", "four corridors", "tests.spear_envs.corridor:tests/Corridor-v0", "test", {}, Protocol(2, history=1)
)


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
    text = call(panel, "verify", tmp_path / "w.json")
    assert "100 tasks" in text
    found, written = read_panel(tmp_path / "w.json")
    assert found == OFFICIAL["webshop"] and written["tasks"][0].keys() == {"id", "subtask", "source", "sha256"}
    with pytest.raises(SpearError, match="Did you mean 'webshop'"):
        call(panel, "export", "webshp")


def test_a_panel_that_the_code_does_not_make_is_told(runs: Path, edit: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="changed after it was written"):
        call(panel, "verify", edit("small.json", '"samples": 2', '"samples": 3'))
    for other in ("{}", "[]", '{"format": 2}', "\x00"):
        (tmp_path / "other.json").write_text(other)
        with pytest.raises(SpearError, match="is not a panel"):
            call(panel, "verify", tmp_path / "other.json")
    for old, new, words in (
        ('"sha256": "', '"sha256": "0', "corridor/test/00000 has other content here"),
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


def read_played(run: Path) -> dict[str, Any]:
    """The panel that a run's settings name."""
    return dict(json.loads((run / "settings.json").read_text())["panel"])


def test_a_panel_decides_how_it_is_played(runs: Path) -> None:
    settings = json.loads((runs / "random" / "settings.json").read_text())
    assert (settings["split"], settings["history"], settings["seed"]) == ("test", 1, 0)
    _, written = read_panel(runs / "small.json")
    assert read_played(runs / "random") == {"name": "small", "digest": written["digest"], "overrides": {}}
    with pytest.raises(SpearError, match="leave tests/Corridor-v0 out"):
        call(evaluate, "tests/Corridor-v0", "--panel", runs / "small.json", "--engine", "expert")
    with pytest.raises(SpearError, match="which tasks"):
        call(evaluate, "--engine", "expert")


@pytest.fixture(scope="module")
def warm(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the small panel at another temperature."""
    out = tmp_path_factory.mktemp("warm") / "run"
    play = ("--panel", runs / "small.json", "--engine", "expert", "--out", out)
    text = call(evaluate, *play, "--temperature", "0.5")
    assert text.count("temperature=0.5 makes another panel") == 1 and "panel small with temperature=0.5 (" in text
    return out


@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        (("--temperature", "0.5"), {"temperature": 0.5}),
        (("--tasks", "2", "--episodes-per-task", "1"), {"tasks": "2", "episodes_per_task": 1}),
        (("--split", "train", "--seed", "7"), {"split": "train", "seed": 7}),
        (("--env", "max_turns=3"), {"env_kwargs.max_turns": 3}),
        (("--max-prompt-tokens", "9000"), {"max_prompt_tokens": 9000}),
        (("--overlong", "drop-history"), {"overlong": "drop-history"}),
        (("--layout", "conversation", "--max-row-tokens", "9000"), {"layout": "conversation", "max_row_tokens": 9000}),
        (("--temperature", "1", "--history", "1"), {}),
    ],
)
def test_an_override_makes_another_panel(
    runs: Path, tmp_path: Path, options: tuple[str, ...], overrides: dict[str, Any]
) -> None:
    text = call(evaluate, "--panel", runs / "small.json", "--engine", "expert", "--out", tmp_path, *options)
    found, own = read_played(tmp_path), read_played(runs / "expert")
    assert found["overrides"] == overrides and ("makes another panel" in text) is bool(overrides)
    assert (found["digest"] != own["digest"]) is (found["name"] != own["name"]) is bool(overrides)
    settings = json.loads((tmp_path / "settings.json").read_text())
    for name, value in overrides.items():
        place, _, key = name.partition(".")
        assert name in ("tasks", "episodes_per_task") or (settings[place][key] if key else settings[place]) == value
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["settings"]["panel"] == found and load(tmp_path).settings.panel == PlayedPanel.read(settings)


def test_a_method_or_a_program_makes_another_panel(tmp_path: Path) -> None:
    tasks = OFFICIAL["sokoban-tiny"]
    player = EvalSettings(tasks.env_id, EngineKind.HF, model="m", method=Method.REFLEXION, trials=3)
    other, overrides = tasks.override(player, {"method"})
    assert overrides == {"method": "reflexion", "trials": 3, "layout": "conversation"}
    settings = other.make_settings(player)
    assert (settings.layout, settings.trials, settings.template) == (Layout.CONVERSATION, 3, "compact")
    export_panel(other, tmp_path / "reflexion.json")
    assert read_panel(tmp_path / "reflexion.json")[0].protocol.method == "reflexion"
    program = EvalSettings(tasks.env_id, EngineKind.HF, model="m", agent="mine.py:play")
    other, overrides = tasks.override(program, {"agent"})
    assert overrides == {"agent": "mine.py:play", "layout": "conversation"} and other.name != tasks.name


def test_programs_whose_long_paths_differ_late_make_different_panels() -> None:
    tasks = OFFICIAL["sokoban-tiny"]
    made = set()
    for end in ("first", "second"):
        path = f"{'a/rather/long/folder/of/mine' * 2}/{end}.py:play"
        player = EvalSettings(tasks.env_id, EngineKind.HF, model="m", agent=path)
        made.add(write_panel(tasks.override(player, {"agent"})[0])["digest"])
    assert len(made) == 2


def test_a_limit_of_a_player_of_bytes_is_its_own_even_if_it_is_the_panels_number() -> None:
    tasks = OFFICIAL["sokoban-paper"]
    limit = tasks.protocol.max_prompt_tokens
    local = EvalSettings(tasks.env_id, EngineKind.HF, model="m", max_prompt_tokens=limit)
    scripted = EvalSettings(tasks.env_id, EngineKind.RANDOM, max_prompt_tokens=limit)
    assert tasks.override(local, {"max_prompt_tokens"}) == (tasks, {})
    other, overrides = tasks.override(scripted, {"max_prompt_tokens"})
    assert overrides == {"max_prompt_tokens": limit} and other.name != tasks.name
    assert other.make_settings(scripted).max_prompt_tokens == limit


def write_changed(panel_file: Path, out: Path, **changes: Any) -> Path:
    """A copy of a panel's file with other values and a digest that fits them; keys with a dot are of the protocol."""
    written = json.loads(panel_file.read_text())
    for name, value in changes.items():
        node = (
            written["protocol"]
            if name in {"temperature", "top_p", "samples", "seed", "tasks_", "max_tokens"}
            else written
        )
        node[name.rstrip("_")] = value
    out.write_text(json.dumps(written | {"digest": panels.digest_panel(written)}))
    return out


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"), ({"top_p": 7}, "top_p"),
        ({"samples": 4.0}, "samples"), ({"samples": 0}, "samples"), ({"seed": -1}, "seed"),
        ({"max_tokens": "many"}, "max_tokens"), ({"tasks_": 3}, "tasks"), ({"tasks": 5}, "tasks"),
        ({"split": 5}, "split"), ({"env_kwargs": []}, "env_kwargs"),
    ],
)  # fmt: skip
def test_a_panel_of_somebody_else_is_one_clear_error_if_a_value_is_wrong(
    runs: Path, tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    path = write_changed(runs / "small.json", tmp_path / "other.json", **change)
    for command in (
        (panel, "verify", path),
        (evaluate, "--panel", path, "--engine", "expert", "--out", tmp_path / "o"),
    ):
        with pytest.raises(SpearError, match=word):
            call(*command)


def test_a_file_may_not_have_the_name_of_an_official_panel(tmp_path: Path) -> None:
    export_panel(OFFICIAL["sokoban-tiny"], tmp_path / "official.json")
    call(panel, "verify", tmp_path / "official.json")
    path = write_changed(tmp_path / "official.json", tmp_path / "other.json", temperature=0)
    for command in (
        (evaluate, "--panel", path, "--engine", "random", "--out", tmp_path / "run"),
        (ledger, "add", tmp_path, "--panel", path, "--name", "x", "--ledger", tmp_path / "ledger"),
    ):
        with pytest.raises(SpearError, match="name"):
            call(*command)


def test_another_panel_is_not_counted_as_the_panel(runs: Path, warm: Path, tmp_path: Path) -> None:
    file, folder = runs / "small.json", tmp_path / "results"
    with pytest.raises(SpearError, match="holds an evaluation with temperature"):
        call(evaluate, "--panel", file, "--engine", "expert", "--out", warm)
    with pytest.raises(SpearError, match="holds an evaluation with panel"):
        call(evaluate, "--panel", file, "--engine", "expert", "--out", warm, "--temperature", "0.5", "--tasks", "1")
    text = call(compare, runs / "expert", warm)
    assert "not results of one panel: small (" in text and "small with temperature=0.5 (" in text
    for pair in ((), ("--pair", runs / "random", runs / "expert")):
        found = json.loads(call(compare, runs / "expert", warm, *pair, "--json"))
        assert any("not results of one panel" in sentence for sentence in found["sentences"])
    assert "not results of one panel" in repr(compare_folders(runs / "expert", warm))
    assert "not results of one panel" not in call(compare, runs / "expert", runs / "random")
    with pytest.raises(SpearError, match="another panel than small, small with temperature"):
        call(ledger, "add", warm, "--panel", file, "--name", "warm", "--ledger", folder)
    call(ledger, "add", runs / "expert", "--panel", file, "--name", "expert", "--ledger", folder)
    with pytest.raises(SpearError, match="another panel than small"):
        call(ledger, "verify", "expert", "--ledger", folder, "--run", warm)
    assert "panel small with temperature=0.5 (" in call(rescore, warm)
    assert "; max_turns=1 scores it as another" in call(rescore, warm, "--env", "max_turns=1")
    found = json.loads(call(rescore, runs / "expert", "--json"))
    assert found["panel"] == read_played(runs / "expert")
    shown = [source["settings"].get("panel") for source in Run(warm).summarise()["sources"]]
    assert shown == [PlayedPanel(**read_played(warm)).label]


@pytest.mark.parametrize("change", [{"method": "io"}, {"overlong": "drop-history"}, {"max_prompt_tokens": 99},
                                    {"agent": "mine.py:play"}, {"top_k": 5}, {"native_tools": True}])  # fmt: skip
def test_a_run_without_a_panel_s_name_counts_with_all_its_settings(
    runs: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    shutil.copytree(runs / "expert", tmp_path / "run")
    path = tmp_path / "run" / "settings.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if key != "panel"}
    path.write_text(json.dumps(settings))
    add = ("add", tmp_path / "run", "--panel", runs / "small.json", "--ledger", tmp_path / "results")
    call(ledger, *add, "--name", "same")
    path.write_text(json.dumps(settings | change))
    with pytest.raises(SpearError, match=f"was played with {next(iter(change))}="):
        call(ledger, *add, "--name", "other")


@pytest.mark.parametrize("panel_of_run", [5, [], {"name": "small"}, {"name": "a", "digest": "b", "overrides": 3}])
def test_a_broken_panel_in_a_run_is_one_clear_error(runs: Path, tmp_path: Path, panel_of_run: Any) -> None:
    shutil.copytree(runs / "expert", tmp_path / "run")
    path = tmp_path / "run" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"panel": panel_of_run}))
    for command, words in ((rescore, ()), (compare, (runs / "expert",))):
        with pytest.raises(SpearError, match="not the panel of a run"):
            call(command, tmp_path / "run", *words)
    assert Run(tmp_path / "run").summarise()["sources"]


# ---- the paper's protocol --------------------------------------------------------------------------------------------
PAPER = {
    "alfworld-paper": "alfworld",
    "alfworld-unseen-paper": "alfworld",
    "webshop-1k-paper": "webshop",
    "search-seven-paper": "search",
    "sokoban-paper": "sokoban",
    "aime-2024-paper-16k": "math",
    "aime-2024-paper-32k": "math_32k",
    "aime-2025-paper-16k": "math",
    "aime-2025-paper-32k": "math_32k",
}
"""Panels, and the presets of trainings that validate as they say."""
OTHERWISE: dict[str, set[str]] = {
    "alfworld-unseen-paper": {"split"},
    "search-seven-paper": {"dataset"},  # a training validates on one of the seven sets
    "sokoban-paper": {"split"},  # a training chooses its best checkpoint on the other
    **{name: {"split", "dataset"} for name in PAPER if name.startswith("aime")},
}
"""What a panel means to have otherwise."""


@pytest.mark.parametrize("name", PAPER)
def test_a_panel_of_the_paper_is_played_as_its_preset_validates(name: str) -> None:
    compose = pytest.importorskip("spear_training.run.compose", reason="needs spear-training").compose
    config = compose([f"preset={PAPER[name]}"]).config
    rollout, validation, env = config.rollout, config.validation, config.env
    is_conversation = env.layout is Layout.CONVERSATION
    wanted = {
        "samples": validation.samples,
        "temperature": validation.temperature,
        "top_p": validation.top_p,
        "top_k": max(0, validation.top_k),
        "max_tokens": env.max_turn_tokens or rollout.max_response_length,
        "template": env.template,
        "layout": env.layout.value,
        "history": env.history,
        "max_prompt_tokens": rollout.max_prompt_length,
        "max_row_tokens": rollout.max_response_length if is_conversation else None,
        # What the trainer has no setting of.
        "overlong": "end",
        "method": "plain",
        "trials": 1,
        # A validation plays fewer tasks, always the same, and its seeds are the run's.
        "tasks": "all",
        "seed": 0,
        "scoring": Protocol().scoring,
    }
    found = OFFICIAL[name]
    assert asdict(found.protocol) == wanted
    assert found.env_id == env.id
    own = {"split": found.split, **found.env_kwargs}
    preset = {"split": env.valid_split, **env.kwargs}
    preset.pop("anchor", None)  # of training alone
    assert {key for key in own.keys() | preset.keys() if own.get(key) != preset.get(key)} == OTHERWISE.get(name, set())


@pytest.mark.slow
def test_sokoban_is_played_in_pictures(tmp_path: Path) -> None:
    call(evaluate, "--panel", "sokoban-paper", "--engine", "expert", "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["overall"]["episodes"], summary["overall"]["success"]["mean"]) == (256, 1.0)
    assert summary["settings"]["panel"]["overrides"] == {}
    assert summary["settings"]["env_kwargs"]["preset"] == "paper" and summary["settings"]["temperature"] == 0.4


@pytest.mark.slow
def test_the_games_of_the_paper_are_played_where_they_are(shared: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    archives = sorted((shared / "data" / "alfworld").glob("games_*.tar.xz"))
    if not archives:
        pytest.skip("the official games of ALFWorld are not beside the checkout")
    for archive in archives:
        unpack_archive(archive, tmp_path / "games")
    seen = next((tmp_path / "games").glob("*/valid_seen"))
    monkeypatch.setenv("ALFWORLD_DATA", str(seen.parent))
    written = write_panel(OFFICIAL["alfworld-paper"])
    assert len(written["tasks"]) == 140 and written["max_turns"] == 50
    call(evaluate, "--panel", "alfworld-paper", "--tasks", "6", "--engine", "expert", "--out", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["overall"]["success"]["mean"] == 1.0 and len(summary["subtasks"]) == 6


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


@pytest.mark.parametrize(
    ("field", "value"), [("reward", 99.0), ("reward", math.nan), ("score", math.nan), ("score", 10**400)]
)
def test_an_edited_value_of_an_episode_is_named(runs: Path, tmp_path: Path, field: str, value: Any) -> None:
    shutil.copytree(runs / "expert", tmp_path / "run")
    episodes = tmp_path / "run" / "episodes.jsonl"
    first, *rest = episodes.read_text().splitlines()
    episodes.write_text("\n".join([json.dumps(json.loads(first) | {field: value}), *rest]) + "\n")
    assert f"{field} is" in call(rescore, tmp_path / "run", code=1)


def test_a_term_that_was_taken_out_is_named(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "expert", tmp_path / "run")
    episodes = tmp_path / "run" / "episodes.jsonl"
    first, *rest = episodes.read_text().splitlines()
    episode = json.loads(first)
    del episode["reward_terms"]["format"]
    episodes.write_text("\n".join([json.dumps(episode), *rest]) + "\n")
    assert "the term format" in call(rescore, tmp_path / "run", code=1)


def test_a_ledger_is_computed_anew(runs: Path, tmp_path: Path) -> None:
    file, folder = runs / "small.json", tmp_path / "results"
    for engine in ("random", "expert"):
        call(ledger, "add", runs / engine, "--panel", file, "--name", engine, "--ledger", folder)
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
    with pytest.raises(SpearError, match="another panel than sokoban"):
        call(ledger, "add", runs / "random", "--panel", "sokoban", "--name", "x", "--ledger", folder)
    entry = json.loads((folder / "expert.json").read_text())
    task, wins = next(iter(entry["outcomes"].items()))
    left = {name: {key: each for key, each in entry[name].items() if key != task} for name in ("outcomes", "scores")}
    for edited, word in (
        (left, f"1 of its tasks are not those of panel {file}, such as {task}"),
        ({"outcomes": entry["outcomes"] | {task: wins[:1]}}, f"{task} has the outcomes [1.0]"),
        ({"outcomes": entry["outcomes"] | {task: [0.5, 0.5]}}, f"{task} has the outcomes [0.5, 0.5]"),
    ):
        (folder / "expert.json").write_text(json.dumps(entry | edited))
        assert word in call(ledger, "verify", "--ledger", folder, code=1)
    entry["success"]["mean"] = 0.99
    (folder / "expert.json").write_text(json.dumps(entry))
    assert "unlike its figures" in call(ledger, "verify", "--ledger", folder, code=1)
    entry["outcomes"][next(iter(entry["outcomes"]))] = [0.0, 0.0]
    (folder / "expert.json").write_text(json.dumps(entry))
    assert "the digest does not match" in call(ledger, "verify", "--ledger", folder, code=1)
    (folder / "expert.json").write_text(json.dumps(entry | {"panel": "gone.json"}))
    shown = call(ledger, "verify", "--ledger", folder, code=1)
    assert "no panel 'gone.json'" in shown and "random: holds" in shown


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
    assert "tiny: holds" in (text := call(ledger, *verify)) and "(played again: " in text
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
        {"weights": "../.."}, {"weights": "/policies/demo-spear-60"}, {"weights": 5}, {"engine": "openai"},
        {"engine": "other"}, {"outcomes": {}}, {"outcomes": {"a": ["1"]}}, {"success": None}, {"panel": 5},
    ],
)  # fmt: skip
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
    for old, new, text in (
        ("<!-- ledger: demo-warmstart", "<!-- ledger: demo-cold", "'demo-cold' is not in the ledger"),
        ("sokoban-random sokoban-expert", "webshop-random", "webshop-random is on other tasks"),
        ("<!-- end -->", "", "does not mark a table"),
    ):
        page.write_text(written.replace(old, new), "utf-8")
        with pytest.raises(SpearError, match=text):
            call(ledger, *fill)
        assert page.read_text("utf-8") == written.replace(old, new)


@pytest.mark.parametrize("name", ["../x", "-x", "n" * 101])
def test_names_that_are_not_of_one_file_are_refused(runs: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(SpearError, match="is not a valid name"):
        call(ledger, "add", runs / "expert", "--panel", runs / "small.json", f"--name={name}", "--ledger", tmp_path)


def test_entries_without_weights_and_missing_ones(tmp_path: Path) -> None:
    entry = json.loads((ROOT / "results" / "demo-spear-60.json").read_text())
    path = tmp_path / "demo-spear-60.json"
    path.write_text(json.dumps(entry))
    text = call(ledger, "verify", "--ledger", tmp_path, "--play", code=1)
    assert "does not hold the weights" in text
    del entry["weights"]  # of an earlier version
    path.write_text(json.dumps(entry))
    assert "demo-spear-60: holds" in call(ledger, "verify", "--ledger", tmp_path, "--play")


def test_native_tools_make_another_panel() -> None:
    pytest.importorskip("openai", reason="needs the extra 'api'")
    server = Server("http://127.0.0.1:9/v1", "m")
    plain, tools = (
        SMALL.settle(EvalSettings(SMALL.env_id, EngineKind.OPENAI, model="m", server=replace(server, tools=tools)), ())
        for tools in (False, True)
    )
    assert plain.panel is not None and tools.panel is not None
    assert plain.panel.name == "small" and "native_tools" in tools.panel.name
    assert plain.panel.digest != tools.panel.digest
