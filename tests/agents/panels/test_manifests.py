"""The published panels in ``panels/``: this code makes the same tasks of the same data."""

import json
import lzma
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from spear_agents.evaluation.panels import OFFICIAL, digest_panel, panel, read_panel
from spear_envs.core.errors import SpearError
from spear_envs.data import unpack_archive

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
    if OFFICIAL[path.stem].data:
        folder = request.getfixturevalue("data")
        monkeypatch.setenv("SPEAR_DATA", str(folder))
        monkeypatch.setenv("ALFWORLD_DATA", str(folder / "alfworld" / "alfworld_2.1.2"))
    assert f"{len(json.loads(path.read_text())['tasks'])} tasks" in verify(path)


def test_an_instance_that_differs_is_named(tmp_path: Path) -> None:
    _, written = read_panel(ROOT / "panels" / "sokoban-tiny.json")
    written["tasks"][7]["sha256"] = "0" * 64
    missing = written["tasks"].pop()
    path = tmp_path / "sokoban-tiny.json"
    path.write_text(json.dumps(written))
    with pytest.raises(SpearError, match="changed after it was written"):
        read_panel(path)
    path.write_text(json.dumps(written | {"digest": digest_panel(written)}))
    text = verify(path, code=1)
    assert f"{written['tasks'][7]['id']} has other content" in text and f"{missing['id']} is not in the file" in text


def test_the_page_checks_games_without_our_code(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "panels" / "README.md").read_text("utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    (tmp_path / "panels").symlink_to(ROOT / "panels")
    (tmp_path / "json_2.1.2").symlink_to(data / "alfworld" / "alfworld_2.1.2")
    monkeypatch.chdir(tmp_path)
    exec(found[1], {})
    (tmp_path / "json_2.1.2").unlink()
    games = tmp_path / "json_2.1.2" / "valid_unseen"
    shutil.copytree(data / "alfworld" / "alfworld_2.1.2" / "valid_unseen", games)
    game = sorted(games.rglob("game.tw-pddl"))[0]
    content = json.loads(game.read_text())
    game.write_text(json.dumps(content | {"pddl_problem": content["pddl_problem"] + " "}))
    with pytest.raises(AssertionError, match="differs"):
        exec(found[1], {})
