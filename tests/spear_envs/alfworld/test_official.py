"""The official games: where they lie, what belongs to a split, and the memory of a scan."""

import hashlib
import json
import os
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest

from spear_envs.alfworld import gamefile as records
from spear_envs.alfworld.gamefile import LeftOut, TaskText, TaskType, load_game, scan_split
from spear_envs.alfworld.pddl import GameError
from spear_envs.alfworld.tasks import (
    OFFICIAL_COUNTS,
    find_data_folder,
    find_split,
    make_file_set,
    make_official_set,
)
from spear_envs.core.errors import SpearError
from tests.spear_envs.alfworld.game_files import write_trial


def write_split(folder: Path, *numbers: int) -> Path:
    for number in numbers:
        write_trial(folder, number, folder="pick_and_place_simple-x")
    return folder


class TestFinding:
    @pytest.mark.parametrize("place", ["json_2.1.2", "json_2.1.1", "", "unpacked"])
    def test_where_a_split_may_lie(self, tmp_path: Path, place: str) -> None:
        write_split(tmp_path / place / "train", 0)
        found = find_split(tmp_path, "train")
        assert found.path == tmp_path / place / "train"
        assert found.published == place.startswith("json")

    def test_who_says_where(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "cache"))
        write_split(tmp_path / "cache" / "alfworld" / "train", 0)
        assert find_split(None, "train").path == tmp_path / "cache" / "alfworld" / "train"
        monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "named"))
        assert find_data_folder(None) == (tmp_path / "named", "$ALFWORLD_DATA")
        assert find_data_folder("x") == (Path.cwd() / "x", "data_dir")
        monkeypatch.setenv("ALFWORLD_DATA", " ")
        assert find_data_folder(None) == (tmp_path / "cache" / "alfworld", "the user's cache")

    def test_the_newer_release_wins_if_it_has_games(self, tmp_path: Path) -> None:
        old = write_split(tmp_path / "json_2.1.1" / "train", 0)
        (tmp_path / "json_2.1.2" / "train").mkdir(parents=True)
        assert find_split(tmp_path, "train").path == old
        new = write_split(tmp_path / "json_2.1.2" / "train", 0)
        assert (find_split(tmp_path, "train").path, find_split(tmp_path, "train").elsewhere) == (new, (old,))

    def test_no_game(self, tmp_path: Path) -> None:
        (tmp_path / "json_2.1.2" / "train" / "x").mkdir(parents=True)
        with pytest.raises(SpearError, match=r"no game.tw-pddl below .*train. Fetch the games"):
            find_split(tmp_path, "train")


class TestTaskSets:
    def test_ids_and_content(self, tmp_path: Path) -> None:
        write_split(tmp_path / "valid_seen", 2, 0, 1)
        tasks = make_official_set(tmp_path, "valid_seen", TaskText.TEMPLATE)
        assert [task.id for task in tasks] == [f"alfworld/official/valid_seen/{i:05d}" for i in range(3)]
        task = tasks[1]
        assert task.content["path"] == "pick_and_place_simple-x/trial_1/game.tw-pddl"
        assert task.subtask == "pick" and task.instruction.startswith("put ")
        source = tasks.source(task)
        assert source.path == tmp_path / "valid_seen" / task.content["path"]
        assert source.read().task_type == "pick_and_place_simple"

    def test_the_fingerprint_hangs_on_the_files_and_not_on_their_place(self, tmp_path: Path) -> None:
        one, two = (make_official_set(write_split(tmp_path / name / "train", 0, 1).parent, "train", TaskText.TEMPLATE)
                    for name in ("a", "b"))  # fmt: skip
        assert one.fingerprint == two.fingerprint
        human = make_official_set(tmp_path / "a", "train", TaskText.HUMAN)
        other = make_official_set(write_split(tmp_path / "c" / "train", 0, 2).parent, "train", TaskText.TEMPLATE)
        assert len({one.fingerprint, human.fingerprint, other.fingerprint}) == 3

    def test_a_broken_game_raises_only_when_it_is_played(self, tmp_path: Path) -> None:
        write_split(tmp_path / "train", 0, 1, 2)
        broken = tmp_path / "train" / "pick_and_place_simple-x" / "trial_1" / "game.tw-pddl"
        broken.write_bytes(broken.read_bytes()[:100])
        tasks = make_official_set(tmp_path, "train", TaskText.TEMPLATE)
        assert len(tasks) == 3 and tasks[1].subtask == "pick"
        assert tasks.source(tasks[2]).read().sentence == tasks[2].instruction
        with pytest.raises(GameError, match=r"trial_1/game\.tw-pddl is not JSON .* Unpack the archive again"):
            tasks.source(tasks[1]).read()

    def test_what_changes_beside_a_task_set_is_noticed(self, tmp_path: Path) -> None:
        write_split(tmp_path / "train", 0)
        first = make_official_set(tmp_path, "train", TaskText.TEMPLATE)
        assert make_official_set(tmp_path, "train", TaskText.TEMPLATE) is first
        write_trial(tmp_path / "train", 1)
        assert len(make_official_set(tmp_path, "train", TaskText.TEMPLATE)) == 2
        source = first.source(first[0])
        key, path = source.key, source.path
        assert path is not None
        path.write_text(json.dumps({**json.loads(path.read_text()), "walkthrough": []}))
        assert source.key != key
        with pytest.raises(GameError, match="has changed since the task set was made"):
            source.read()
        path.unlink()
        for read in (source.read, lambda: load_game(source)):
            with pytest.raises(GameError, match="cannot be read"):
                read()

    def test_human_sentences(self, tmp_path: Path) -> None:
        write_trial(tmp_path / "train", 0, human=("", '  Put the "thing" in.\n'), folder="a")
        write_trial(tmp_path / "train", 1, human=(), folder="b")
        tasks = make_official_set(tmp_path, "train", TaskText.HUMAN)
        text = tasks.source(tasks[0]).read()
        assert text.sentence == tasks[0].instruction == 'Put the "thing" in.'
        assert text.grammar is not None and 'Your task is to: Put the \\"thing\\" in."' in text.grammar
        with pytest.raises(GameError, match=r"no human task text \(nobody wrote .*use task_text='template'"):
            tasks.source(tasks[1]).read()

    def test_a_published_split_that_is_not_whole_is_named(self, tmp_path: Path) -> None:
        write_split(tmp_path / "json_2.1.2" / "valid_seen", 0)
        with pytest.warns(UserWarning, match="has 1 games, and the published split 'valid_seen' has 140"):
            make_official_set(tmp_path, "valid_seen", TaskText.TEMPLATE)
        write_split(tmp_path / "mine" / "valid_seen", 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make_official_set(tmp_path / "mine", "valid_seen", TaskText.TEMPLATE)


def test_fingerprints_are_of_problems_and_rules_not_of_files(tmp_path: Path) -> None:
    sets = []
    for name in ("plain", "spaced", "ruled"):
        split = write_split(tmp_path / name / "json_2.1.2" / "valid_seen", 0)
        (path,) = split.rglob("game.tw-pddl")
        content = json.loads(path.read_text())
        content["pddl_domain"] += "; changed" if name == "ruled" else ""
        path.write_text(json.dumps(content, indent=None if name == "plain" else 1))
        sets.append(make_official_set(tmp_path / name, "valid_seen", TaskText.TEMPLATE))
    plain, spaced, ruled = sets
    assert plain[0].content == spaced[0].content == ruled[0].content
    assert plain.fingerprint == spaced.fingerprint != ruled.fingerprint


class TestOneFile:
    def test_a_set_of_one_game(self, tmp_path: Path) -> None:
        path = write_trial(tmp_path, 0) / "game.tw-pddl"
        tasks = make_file_set(path)
        (task,) = tasks
        assert task.id == f"alfworld/game/{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        assert (task.split, task.subtask, tasks.split) == ("game", "pick", "game")
        assert tasks.source(task).path == path
        assert make_file_set(path) is tasks
        path.write_text(json.dumps({**json.loads(path.read_text()), "walkthrough": []}))
        assert make_file_set(path)[0].id != task.id

    def test_what_is_no_game(self, tmp_path: Path) -> None:
        with pytest.raises(SpearError, match=r"is a folder: name the game\.tw-pddl in it"):
            make_file_set(tmp_path)
        with pytest.raises(SpearError, match="cannot be read"):
            make_file_set(tmp_path / "absent.tw-pddl")
        (tmp_path / "game.tw-pddl").write_text("{}")
        with pytest.raises(SpearError, match="has no 'pddl_domain'"):
            make_file_set(tmp_path / "game.tw-pddl")


def test_the_whole_official_split(official_games: Path) -> None:
    tasks = make_official_set(official_games, "valid_seen", TaskText.TEMPLATE)
    assert Counter(task.subtask for task in tasks) == OFFICIAL_COUNTS["valid_seen"]
    assert tasks.fingerprint == "431fbd9daa861eecef75f2cb26714b0e15f78808f753b7026dbec5d9889f8bd6"
    for task in tasks:
        game = load_game(tasks.source(task))
        assert game.task == task.instruction
    human = make_official_set(official_games, "valid_seen", TaskText.HUMAN)
    assert all(load_game(human.source(task)).task == task.instruction for task in human)


def test_linked_folders_are_games_like_others(tmp_path: Path) -> None:
    """Their numbers do not depend on whether a folder is a link, and a link back into the tree adds nothing."""
    plain = write_split(tmp_path / "plain" / "train", 0, 1, 2)
    linked = tmp_path / "linked" / "train"
    linked.mkdir(parents=True)
    for number, folder in enumerate(sorted(plain.iterdir())):
        if number:
            (linked / folder.name).symlink_to(folder)
        else:
            shutil.copytree(folder, linked / folder.name)
    (linked / "all").symlink_to(linked)
    one, two = (make_official_set(folder.parent, "train", TaskText.TEMPLATE) for folder in (plain, linked))
    assert len(two) == 3 and two.fingerprint == one.fingerprint


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
            ("[" * 100_000, "is not JSON"),
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

    def test_odd_names_and_folders_above(self, tmp_path: Path) -> None:
        folder = tmp_path / "movable" / "Sliced"  # words that leave a game out count below the split alone
        folder.mkdir(parents=True)
        write_trial(folder, 0, folder="pick_and_place_simple-Äpfel 🍏 & Ähnliches")
        write_trial(folder, 1, folder=os.fsdecode(b"pick_and_place_simple-\xff"))
        assert scan_split(folder) == scan_split(folder) and len(scan_split(folder).games) == 2

    def test_trajectories_of_another_release(self, tmp_path: Path, split: Path) -> None:
        trial = write_trial(split, 0)
        other = tmp_path / "other"
        target = other / trial.relative_to(split) / "traj_data.json"
        target.parent.mkdir(parents=True)
        shutil.move(trial / "traj_data.json", target)
        assert scan_split(split).left_out == {LeftOut.NO_TRAJECTORY: 1}
        assert len(scan_split(split, [tmp_path / "third", other]).games) == 1


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
        write_trial(split, 1)
        assert len(scan_split(split).games) == 1
        shutil.rmtree(trial)
        assert len(scan_split(split).games) == 1 and not scan_split(split).left_out

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '{"version": 0}', '{"version": 1, "folder": "x", "games": {}}', "null"]
    )
    def test_a_broken_memory_does_not_matter(self, split: Path, text: str) -> None:
        write_trial(split, 0)
        first = scan_split(split)
        (memory,) = (Path(os.environ["SPEAR_DATA"]) / "cache").iterdir()
        memory.write_text(text)
        assert scan_split(split) == first
        for entry in ([], None, [[1, 2, 3, 4], "", "", "", "", "no reason", ""]):
            scan_split(split)
            data = json.loads(memory.read_text())
            memory.write_text(json.dumps({**data, "games": dict.fromkeys(data["games"], entry)}))
            assert scan_split(split) == first

    def test_a_memory_that_cannot_be_written_does_not_matter(
        self, split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "file"))
        write_trial(split, 0)
        assert len(scan_split(split).games) == 1
