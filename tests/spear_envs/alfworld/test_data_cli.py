import io
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from spear_envs.alfworld import data_cli
from spear_envs.alfworld.tasks import make_task_set
from tests.spear_envs.alfworld.game_files import write_trial
from tests.spear_envs.data.hub import run, use_data_folder
from tests.spear_envs.data.server import Site, cut, ranged


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "140")
    return use_data_folder(tmp_path / "data", monkeypatch) / "alfworld"


def make_archives(games: Path, top: str = "json_2.1.1") -> dict[str, bytes]:
    """The two published archives, made of a folder of games."""
    archives = {}
    for archive, name in zip(data_cli.ARCHIVES, ("game.tw-pddl", "traj_data.json"), strict=True):
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as zipped:
            for path in sorted(games.rglob(name)):
                zipped.write(path, f"{top}/{path.relative_to(games)}")
        archives[archive.name] = raw.getvalue()
    return archives


@pytest.fixture
def games(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    for number in range(4):
        write_trial(folder / ("train" if number else "valid_seen"), number)
    return folder


class TestGet:
    def test_download_resume_and_unpack(
        self, data: Path, site: Site, games: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        archives = make_archives(games)
        first = archives[data_cli.ARCHIVES[0].name]
        urls = [
            site.put("/0.zip", cut(first, len(first) // 2, ETag='"v1"'), ranged(first)),
            site.put("/1.zip", ranged(archives[data_cli.ARCHIVES[1].name])),
        ]
        served = [replace(one, url=url) for one, url in zip(data_cli.ARCHIVES, urls, strict=True)]
        monkeypatch.setattr(data_cli, "ARCHIVES", tuple(served))
        code, out, err = run(capsys, "get", "alfworld")
        assert (code, err) == (0, ""), err
        assert f"bytes={len(first) // 2}-" in site.ranges()
        lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
        assert "3 (3,553)" in lines["train"] and "1 (140)" in lines["valid_seen"]
        with pytest.warns(UserWarning, match="has 3 games"):
            tasks = make_task_set("official", "train")
        assert len(tasks) == 3 and tasks.source(tasks[0]).read().sentence == tasks[0].instruction  # type: ignore[attr-defined]
        asked = len(site.requests)
        broken = data / "json_2.1.1" / "train" / tasks[0].content["path"]
        broken.write_text("{")
        assert run(capsys, "get", "alfworld")[0] == 0
        assert len(site.requests) == asked  # the archives are there; unpacking mends
        assert broken.read_text() != "{"

    def test_archives_that_unpack_side_by_side(
        self, data: Path, games: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second = data_cli.ARCHIVES
        (tmp_path / first.name).write_bytes(make_archives(games, "json_2.1.2")[first.name])
        (tmp_path / second.name).write_bytes(make_archives(games, "json_2.1.1")[second.name])
        assert run(capsys, "get", "alfworld", "--from", tmp_path)[0] == 0
        with pytest.warns(UserWarning):
            assert len(make_task_set("official", "train")) == 3

    def test_hostile_and_broken_archives(self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        bad = tmp_path / "bad.zip"
        with zipfile.ZipFile(bad, "w") as zipped:
            zipped.writestr("../../escaped", "x")
        code, _, err = run(capsys, "get", "alfworld", "--from", bad)
        assert code == 1 and "would write outside its folder" in err
        assert not (tmp_path / "escaped").exists()
        bad.write_bytes(b"PK\x03\x04 no zip")
        assert run(capsys, "get", "alfworld", "--from", bad)[0] == 1


class TestVerify:
    def test_nothing_there(self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run(capsys, "verify", "alfworld")
        assert code == 3 and "There are no official games" in err and "(the user's cache)" in out
        code, _, err = run(capsys, "verify", "alfworld", "--dir", tmp_path / "absent")
        assert code == 3 and "absent (data_dir) is not a folder" in err

    def test_what_is_missing_and_broken_is_named(
        self, data: Path, games: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_trial(games / "train", 7, solvable=False)
        (games / "train").joinpath("pick_and_place_simple-x", "trial_9").mkdir(parents=True)
        write_trial(games / "train", 8, folder="pick_and_place_simple-broken").joinpath("game.tw-pddl").write_text("{")
        code, out, err = run(capsys, "verify", "alfworld", "--dir", games)
        assert code == 1 and "alfworld: not all of it is as it should be" in err
        assert "train: 4 games of type pick instead of 790" in out
        assert "train: pick_and_place_simple-broken/trial_8/game.tw-pddl: is not JSON" in out
        assert "valid_unseen: There are no official games of the split" in out
        assert "train, left out: 1 × marked as not solvable" in out
        assert out.count("trial_1/game.tw-pddl: its grammar has no rule") == 1  # those of this test are too short

    def test_a_game_that_cannot_be_won(
        self, data: Path, official_games: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = min(official_games.glob("valid_seen/pick_heat*/*"))
        target = tmp_path / "games" / "valid_seen" / source.parent.name / source.name
        shutil.copytree(source, target)
        game = json.loads((target / "game.tw-pddl").read_text())
        game["pddl_problem"] = game["pddl_problem"].replace("(heatable ", "(sliceable ")
        (target / "game.tw-pddl").write_text(json.dumps(game))
        _, out, _ = run(capsys, "verify", "alfworld", "--dir", tmp_path / "games")
        assert "trial" in out and "game.tw-pddl: the expert does not win it" in out
