"""The published panels in ``panels/``: this code makes the same tasks of the same data."""

import hashlib
import json
import lzma
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spear_agents.evaluation.panels import OFFICIAL, digest_panel, panel, read_panel
from spear_envs.core.errors import SpearError
from spear_envs.data import data_folder, unpack_archive
from spear_envs.search.tasks import DATASETS

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "panels").glob("*.json"))
GAMES = ("games_2.1.2_valid_seen_valid_train.tar.xz", "games_2.1.2_valid_unseen.tar.xz")
PRODUCTS = ("items_shuffle_1000.json", "items_ins_v2_1000.json")


@pytest.fixture(scope="module")
def data(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with ALFWorld's games and WebShop's 1,000 products."""
    folder = tmp_path_factory.mktemp("data")
    for name in GAMES:
        unpack_archive(shared / "data" / "alfworld" / name, folder / "alfworld")
    raw = folder / "webshop" / "small" / "raw"
    raw.mkdir(parents=True)
    for name in PRODUCTS:
        with lzma.open(shared / "data" / "webshop" / f"{name}.xz") as source, (raw / name).open("wb") as target:
            shutil.copyfileobj(source, target)
    return folder


def verify(path: Path, code: int = 0) -> str:
    done = CliRunner().invoke(panel, ["verify", str(path)])
    assert done.exit_code == code, f"{done.output}{done.exception}"
    return done.output


def test_every_panel_that_needs_no_download_is_published() -> None:
    embedded = {name for name, each in OFFICIAL.items() if not each.data and name != "search-seven-paper"}
    assert embedded <= {path.stem for path in FILES} <= set(OFFICIAL)
    assert (ROOT / "panels" / "README.md").read_text("utf-8").count("`") > 2 * len(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_panel_is_what_the_code_makes(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"aime": f"code/{path.stem[:9]}", "search-": "search/deepresearcher"}
    if needed := next((folder for begin, folder in own.items() if path.stem.startswith(begin)), None):
        if not (data_folder() / needed).is_dir():
            pytest.skip(f"needs the published problems: {OFFICIAL[path.stem].data}")
    elif OFFICIAL[path.stem].data:
        folder = request.getfixturevalue("data")
        monkeypatch.setenv("SPEAR_DATA", str(folder))
        monkeypatch.setenv("ALFWORLD_DATA", str(folder / "alfworld" / "alfworld_2.1.2"))
    assert f"{len(json.loads(path.read_text())['tasks'])} tasks" in verify(path)


def test_protocols_of_one_year_of_aime_have_the_same_problems() -> None:
    written = {name: read_panel(ROOT / "panels" / f"{name}.json")[1] for name in OFFICIAL if name.startswith("aime")}
    problems = {name: tuple(task["sha256"] for task in each["tasks"]) for name, each in written.items()}
    assert len(problems) == 6 and len(set(problems.values())) == 2
    assert all(problems[name] == problems[name[:9]] and len(set(problems[name])) == 30 for name in problems)


def test_questions_of_the_seven_sets_are_those_of_another_copy(shared: Path) -> None:
    listed = read_panel(ROOT / "panels" / "search-deepresearcher.json")[1]["tasks"]
    known = {(task["subtask"], task["sha256"]) for task in listed}
    with lzma.open(shared / "data" / "qa" / "seven_benchmarks.jsonl.xz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 960 and len(listed) == 3_197
    for row in rows:
        content = {"golden_answers": row["golden_answers"], "question": row["question"]}
        digest = hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
        assert (row["metadata"]["benchmark"], digest) in known, row["id"]


@pytest.mark.parametrize("name", ["search-seven", "search-deepresearcher"])
def test_a_panel_over_a_retrieval_service_is_exported_and_verified(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    row = {"question": "Who?", "golden_answers": ["Ann"]}
    for place in [place for files in DATASETS[OFFICIAL[name].env_kwargs["dataset"]].values() for place in files]:
        path = tmp_path / "search" / place
        path.parent.mkdir(parents=True)
        if path.suffix == ".parquet":
            pandas.DataFrame([row | {"data_source": "tq"}]).to_parquet(path)
        else:
            path.write_text(json.dumps(row) + "\n")
    path = tmp_path / "panel.json"
    assert CliRunner().invoke(panel, ["export", name, "--out", str(path)]).exit_code == 0
    written = json.loads(path.read_text())
    assert written["env_kwargs"]["retriever"] and len(written["tasks"]) == (7 if name == "search-seven" else 1)
    assert "triviaqa" in {task["subtask"] for task in written["tasks"]}
    verify(path)
    elsewhere = written | {"name": "mine", "env_kwargs": written["env_kwargs"] | {"retriever": "http://10.0.0.1:80"}}
    path.write_text(json.dumps(elsewhere | {"digest": digest_panel(elsewhere)}))
    with pytest.raises(SpearError, match="retriever"):
        read_panel(path)


@pytest.fixture
def change(tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """A function that writes the panel ``sokoban-tiny`` with something changed, and a digest that fits."""

    def write(edit: Callable[[dict[str, Any]], object]) -> Path:
        written = json.loads((ROOT / "panels" / "sokoban-tiny.json").read_text())
        edit(written)
        path = tmp_path / "sokoban-tiny.json"
        path.write_text(json.dumps(written | {"digest": digest_panel(written)}))
        return path

    return write


Change = Callable[[Callable[[dict[str, Any]], object]], Path]
LEVEL = "sokoban-v1/6x6-1/test/{:08d}"


def test_an_instance_that_differs_is_named(change: Change) -> None:
    path = change(lambda written: written["tasks"][7].update(sha256="0" * 64))
    assert verify(path, code=1).splitlines() == [f"{LEVEL.format(7)} has other content here"]
    path = change(lambda written: written["tasks"].pop(9))
    assert verify(path, code=1).splitlines() == [f"{LEVEL.format(9)} is not in the file"]
    path = change(lambda written: [written["tasks"][place].update(sha256="0" * 64) for place in range(20)])
    assert all(LEVEL.format(place) in verify(path, code=1) for place in range(20))


def test_an_edited_manifest_is_refused(change: Change, tmp_path: Path) -> None:
    path = change(lambda written: None)
    text = path.read_text()
    verify(path)
    for old, new, word in (
        ('"samples": 4', '"samples": 5', "changed after it was written"),
        (text[-1000:], "", "is not a panel"),
        ('"temperature": 1.0', '"temperature": 1e400', "is not a panel"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(SpearError, match=word):
            read_panel(path)
    with pytest.raises(SpearError, match="stands twice"):
        read_panel(change(lambda written: written["tasks"].append(written["tasks"][3])))
    with pytest.raises(SpearError, match="temperature is"):
        read_panel(change(lambda written: written["protocol"].update(temperature=0.4)))


def test_other_places_and_copies_are_named(change: Change) -> None:
    def swap(written: dict[str, Any]) -> None:
        tasks = written["tasks"]
        tasks[3], tasks[5] = tasks[5], tasks[3]

    lines = verify(change(swap), code=1).splitlines()
    assert lines == [f"{LEVEL.format(place)} has another place or id here" for place in (5, 3)]
    path = change(lambda written: written["tasks"].append({**written["tasks"][3], "id": "copy"}))
    assert verify(path, code=1).splitlines() == ["copy is missing here"]


def test_one_missing_game_is_the_only_one_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    games = tmp_path / "valid_unseen"
    shutil.copytree(data / "alfworld" / "alfworld_2.1.2" / "valid_unseen", games)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    path = ROOT / "panels" / "alfworld-unseen.json"
    missing = json.loads(path.read_text())["tasks"][49]["source"]
    shutil.rmtree((games / missing).parent)
    first, *lines = verify(path, code=1).splitlines()
    assert first.startswith("fingerprint is")
    assert lines == [f"alfworld/official/valid_unseen/00049 ({missing}) is missing here"]


def test_the_page_checks_games_without_our_code(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "panels" / "README.md").read_text("utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    (tmp_path / "panels").symlink_to(ROOT / "panels")
    (tmp_path / "json_2.1.2").symlink_to(data / "alfworld" / "alfworld_2.1.2")
    monkeypatch.chdir(tmp_path)
    exec(found[1], {})
    (tmp_path / "json_2.1.2").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        exec(found[1], {})
    (tmp_path / "elsewhere").rename(tmp_path / "json_2.1.2")
    (tmp_path / "json_2.1.2").unlink()
    games = tmp_path / "json_2.1.2" / "valid_unseen"
    shutil.copytree(data / "alfworld" / "alfworld_2.1.2" / "valid_unseen", games)
    game = sorted(games.rglob("game.tw-pddl"))[0]
    content = json.loads(game.read_text())
    game.write_text(json.dumps(content | {"pddl_problem": content["pddl_problem"] + " "}))
    with pytest.raises(AssertionError, match="differs"):
        exec(found[1], {})
