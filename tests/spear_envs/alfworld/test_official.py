from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest

from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.gamefile import load_game
from spear_envs.alfworld.official import (
    OFFICIAL_COUNTS,
    TaskText,
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

    def test_the_newer_release_wins_if_it_has_games(self, tmp_path: Path) -> None:
        old = write_split(tmp_path / "json_2.1.1" / "train", 0)
        (tmp_path / "json_2.1.2" / "train").mkdir(parents=True)
        assert find_split(tmp_path, "train").path == old
        new = write_split(tmp_path / "json_2.1.2" / "train", 0)
        assert (find_split(tmp_path, "train").path, find_split(tmp_path, "train").elsewhere) == (new, (old,))

    def test_who_says_where(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPEAR_DATA", str(tmp_path / "cache"))
        write_split(tmp_path / "cache" / "alfworld" / "train", 0)
        assert find_split(None, "train").path == tmp_path / "cache" / "alfworld" / "train"
        monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "named"))
        assert find_data_folder(None) == (tmp_path / "named", "$ALFWORLD_DATA")
        assert find_data_folder("x") == (Path("x"), "data_dir")
        monkeypatch.setenv("ALFWORLD_DATA", " ")
        assert find_data_folder(None) == (tmp_path / "cache" / "alfworld", "the user's cache")

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

    def test_equal_arguments_give_the_same_set_until_the_folder_changes(self, tmp_path: Path) -> None:
        write_split(tmp_path / "train", 0)
        first = make_official_set(tmp_path, "train", TaskText.TEMPLATE)
        assert make_official_set(tmp_path, "train", TaskText.TEMPLATE) is first
        write_trial(tmp_path / "train", 1)
        assert len(make_official_set(tmp_path, "train", TaskText.TEMPLATE)) == 2

    def test_a_broken_game_raises_only_when_it_is_played(self, tmp_path: Path) -> None:
        write_split(tmp_path / "train", 0, 1, 2)
        broken = tmp_path / "train" / "pick_and_place_simple-x" / "trial_1" / "game.tw-pddl"
        broken.write_bytes(broken.read_bytes()[:100])
        tasks = make_official_set(tmp_path, "train", TaskText.TEMPLATE)
        assert len(tasks) == 3 and tasks[1].subtask == "pick"
        assert tasks.source(tasks[2]).read().sentence == tasks[2].instruction
        with pytest.raises(GameError, match=r"trial_1/game\.tw-pddl is not JSON .* Unpack the archive again"):
            tasks.source(tasks[1]).read()

    def test_a_file_that_changed_or_vanished(self, tmp_path: Path) -> None:
        write_split(tmp_path / "train", 0, 1)
        tasks = make_official_set(tmp_path, "train", TaskText.TEMPLATE)
        source = tasks.source(tasks[0])
        key = source.key
        assert source.path is not None
        data = json.loads(source.path.read_text())
        source.path.write_text(json.dumps({**data, "walkthrough": []}))
        assert source.key != key
        with pytest.raises(GameError, match="has changed since the task set was made"):
            source.read()
        source.path.unlink()
        with pytest.raises(GameError, match="cannot be read"):
            source.read()
        with pytest.raises(GameError, match="cannot be read"):
            load_game(source)

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


class TestOneFile:
    def test_a_set_of_one_game(self, tmp_path: Path) -> None:
        path = write_trial(tmp_path, 0) / "game.tw-pddl"
        tasks = make_file_set(path)
        (task,) = tasks
        assert task.id == f"alfworld/game/{task.content['sha256'][:16]}"
        assert (task.split, task.subtask, tasks.split) == ("game", "pick", "game")
        assert tasks.source(task).path == path
        assert make_file_set(path) is tasks

    def test_games_that_no_split_would_have(self, tmp_path: Path) -> None:
        trial = write_trial(tmp_path, 0, folder="Sliced-movable", solvable=False, task_type="juggle")
        (task,) = make_file_set(trial / "game.tw-pddl")
        assert task.subtask == "juggle"
        (trial / "traj_data.json").unlink()
        (trial / "game.tw-pddl").rename(trial / "mine.json")
        (task,) = make_file_set(trial / "mine.json")
        assert task.subtask == "unknown"

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
    assert tasks.fingerprint == "f70a7d8b824d0b203da2376b1a2341130caed5e4700dd5219dc8670d30dca95e"
    for task in tasks:
        game = load_game(tasks.source(task))
        assert game.task == task.instruction
    human = make_official_set(official_games, "valid_seen", TaskText.HUMAN)
    assert all(load_game(human.source(task)).task == task.instruction for task in human)


def test_published_counts() -> None:
    assert [sum(counts.values()) for counts in OFFICIAL_COUNTS.values()] == [3_553, 140, 134]


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


def test_a_folder_of_links_alone_is_a_split(tmp_path: Path) -> None:
    plain = write_split(tmp_path / "plain" / "train", 0)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "train").symlink_to(plain)
    assert len(make_official_set(tmp_path / "linked", "train", TaskText.TEMPLATE)) == 1
