from __future__ import annotations

from pathlib import Path

import pytest

from spear_envs.alfworld.tasks import make_task_set
from spear_envs.core.errors import SpearError
from tests.spear_envs.alfworld.game_files import write_trial


def test_the_default() -> None:
    tasks = make_task_set()
    assert repr(tasks) == "<EmbeddedTaskSet alfworld/embedded/train: 600 tasks>"
    assert make_task_set("embedded", "train", rooms="standard") is tasks
    assert len(make_task_set(split="valid_unseen", rooms="small")) == 240


def test_official_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trial(tmp_path / "valid_unseen", 0)
    tasks = make_task_set("official", "valid_unseen", data_dir=tmp_path)
    assert tasks[0].id == "alfworld/official/valid_unseen/00000"
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert make_task_set("official", "valid_unseen") is tasks
    assert make_task_set("official", "valid_unseen", task_text="human")[0].instruction == "Move it."


def test_one_game(tmp_path: Path) -> None:
    path = write_trial(tmp_path, 0) / "game.tw-pddl"
    for split in ("train", "valid_seen", "game"):
        assert len(make_task_set(split=split, game=str(path))) == 1


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dataset": "alfred"}, "dataset='alfred' is not valid: choose one of 'embedded', 'official'"),
        ({"split": "valid"}, "split='valid' is not valid: choose one of 'train', 'valid_seen', 'valid_unseen'"),
        ({"split": "game"}, "split='game' is not valid"),
        ({"rooms": "tiny"}, "rooms='tiny' is not valid: choose one of 'standard', 'small'"),
        ({"dataset": "official", "rooms": "small"}, "rooms='small' is for dataset='embedded'"),
        ({"data_dir": "x"}, "data_dir is for dataset='official'"),
        ({"task_text": "human"}, "task_text='human' is for dataset='official'"),
        ({"task_text": "mine"}, "task_text='mine' is not valid"),
        ({"game": "absent.tw-pddl"}, "absent.tw-pddl cannot be read"),
        ({"game": "absent.tw-pddl", "split": "test"}, "split='test' is not valid"),
    ],
)
def test_keywords_that_do_not_fit(keywords: dict[str, str], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        make_task_set(**keywords)  # type: ignore[arg-type]
