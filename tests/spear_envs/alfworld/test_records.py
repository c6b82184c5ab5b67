from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from spear_envs.alfworld import records
from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.records import LeftOut, scan_split
from spear_envs.alfworld.task_types import TaskType
from tests.spear_envs.alfworld.game_files import write_trial


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "data"))
    folder = tmp_path / "games" / "valid_seen"
    folder.mkdir(parents=True)
    return folder


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "read_record", None)


class TestScanning:
    def test_games_in_the_order_of_their_paths(self, split: Path) -> None:
        for number in (3, 1, 10, 2):
            write_trial(split, number, folder="pick_and_place_simple-x")
        write_trial(split, 5, kind=TaskType.COOL)
        listing = scan_split(split)
        paths = [record.path for record in listing.games]
        assert paths == sorted(paths) and len(paths) == 5
        assert [Path(path).parent.name for path in paths[:4]] == ["trial_1", "trial_10", "trial_2", "trial_3"]
        assert listing.left_out == {}
        cooled = listing.games[-1]
        assert cooled.task_type == "pick_cool_then_place_in_recep" and cooled.sentence.endswith(".")
        assert cooled.human == "Move it." and not cooled.fault and len(cooled.sha256) == 64

    def test_what_does_not_belong_is_left_out_and_counted(self, split: Path) -> None:
        write_trial(split, 0)
        write_trial(split, 1, folder="pick_and_place_with_movable_recep-Apple-Bowl-Desk-301")
        write_trial(split, 2, folder="pick_and_place_simple-AppleSliced-None-Desk-301")
        write_trial(split, 3, solvable=False)
        write_trial(split, 4, solvable=None)
        write_trial(split, 5, task_type="juggle")
        (write_trial(split, 6) / "game.tw-pddl").unlink()
        (write_trial(split, 7) / "traj_data.json").unlink()
        write_trial(split, 8, solvable="yes")
        listing = scan_split(split)
        assert len(listing.games) == 1
        assert listing.left_out == {
            LeftOut.KIND: 2,
            LeftOut.UNSOLVABLE: 2,
            LeftOut.UNMARKED: 1,
            LeftOut.TYPE: 1,
            LeftOut.NO_GAME: 1,
            LeftOut.NO_TRAJECTORY: 1,
        }

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ('{"pddl_domain": "', "is not JSON"),
            ("[1, 2]", "holds a list instead of an object"),
            ('{"solvable": true}', "has no 'pddl_domain'"),
            ('{"pddl_domain": "", "pddl_problem": "", "grammar": 3}', "not a text in 'grammar'"),
            ('{"pddl_domain": "", "pddl_problem": "", "grammar": "x"}', "no rule that says 'Your task is to"),
            ("\udcff", "is not JSON"),
        ],
    )
    def test_broken_games_keep_their_place(self, split: Path, text: str, fault: str) -> None:
        for number in range(3):
            write_trial(split, number, folder="pick_and_place_simple-x")
        broken = split / "pick_and_place_simple-x" / "trial_1" / "game.tw-pddl"
        broken.write_bytes(text.encode("utf-8", "surrogateescape"))
        games = scan_split(split).games
        assert [bool(record.fault) for record in games] == [False, True, False]
        assert fault in games[1].fault and str(split) not in games[1].fault
        assert games[1].task_type == "pick_and_place_simple" and not games[1].sentence

    @pytest.mark.parametrize(
        "text", ["", "[]", '{"task_type": 3}', "{}", '{"task_type": "x", "turk_annotations": {"anns": [1]}}']
    )
    def test_a_broken_trajectory_is_a_fault_too(self, split: Path, text: str) -> None:
        (write_trial(split, 0) / "traj_data.json").write_text(text)
        (record,) = scan_split(split).games
        assert "traj_data.json is broken" in record.fault
        assert record.task_type == "pick_and_place_simple" and record.sentence and not record.human

    def test_trajectories_of_another_release(self, tmp_path: Path, split: Path) -> None:
        trial = write_trial(split, 0)
        other = tmp_path / "other"
        target = other / trial.relative_to(split) / "traj_data.json"
        target.parent.mkdir(parents=True)
        shutil.move(trial / "traj_data.json", target)
        assert scan_split(split).left_out == {LeftOut.NO_TRAJECTORY: 1}
        assert len(scan_split(split, [tmp_path / "third", other]).games) == 1

    def test_a_folder_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(GameError, match="cannot be read"):
            scan_split(tmp_path / "absent")


class TestMemory:
    def test_files_that_have_not_changed_are_not_read_again(self, split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_trial(split, 0)
        write_trial(split, 1, solvable=False)
        first = scan_split(split)
        forbid_reading(monkeypatch)
        assert scan_split(split) == first

    def test_a_file_that_has_changed_is_read_again(self, split: Path) -> None:
        trial = write_trial(split, 0)
        first = scan_split(split)
        data = json.loads((trial / "game.tw-pddl").read_text())
        (trial / "game.tw-pddl").write_text(json.dumps({**data, "solvable": False}))
        assert scan_split(split).games == () and first.games

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '{"version": 0}', '{"version": 1, "folder": "x", "games": {}}', "null"]
    )
    def test_a_broken_memory_does_not_matter(self, split: Path, text: str) -> None:
        write_trial(split, 0)
        first = scan_split(split)
        (memory,) = (Path(os.environ["SPEAR_DATA"]) / "cache").iterdir()
        memory.write_text(text)
        assert scan_split(split) == first

    def test_broken_entries_do_not_matter(self, split: Path) -> None:
        write_trial(split, 0)
        first = scan_split(split)
        (memory,) = (Path(os.environ["SPEAR_DATA"]) / "cache").iterdir()
        data = json.loads(memory.read_text())
        for entry in ([], None, [[1, 2, 3, 4], "", "", "", "", "no reason", ""]):
            memory.write_text(json.dumps({**data, "games": dict.fromkeys(data["games"], entry)}))
            assert scan_split(split) == first

    def test_a_memory_that_cannot_be_written_does_not_matter(
        self, split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "file"))
        write_trial(split, 0)
        assert len(scan_split(split).games) == 1


def test_official_games_are_listed_quickly(
    official_games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEAR_DATA", str(tmp_path))
    start = time.process_time()
    listing = scan_split(official_games / "valid_train")
    first = time.process_time() - start
    forbid_reading(monkeypatch)
    start = time.process_time()
    assert scan_split(official_games / "valid_train") == listing
    again = time.process_time() - start
    assert len(listing.games) == 200 and not any(record.fault for record in listing.games)
    assert all(record.human for record in listing.games)
    # About 0.5 and 0.04 ms a game; the bounds leave room for a slow disk: 3,553 games in 14 s, then in 2 s.
    assert first / 200 < 0.004 and again / 200 < 0.0006
