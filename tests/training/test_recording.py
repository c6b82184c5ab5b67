from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from spear_agents.engines.base import Finish
from spear_agents.replay.runs import Run
from spear_agents.trajectory import Layout, StopReason, Trajectory, Turn, read_trajectories
from spear_envs.core.errors import SpearError
from spear_training.recording import VALIDATIONS, EpisodeRecorder, RecordSettings

IDENTITY = {"env_id": "env", "env_kwargs": {}, "split": "train", "model": "runs/policy"}


def make_episode(seed: int) -> Trajectory:
    turn = Turn((1, 2), (3,), (-0.5,), "go", "go", "_P_", True, True, "a", 0.0, Finish.STOP)
    return Trajectory("env", "task", "easy", "walk", "f", Layout.PER_TURN, (turn,), {}, 1.0, 1.0, True, 0,
                      StopReason.WON, seed=seed)  # fmt: skip


def read_steps(out: Path) -> list[tuple[int | None, int]]:
    return [(t.step, t.seed) for t in read_trajectories(out / "rollouts" / "episodes.jsonl")]


def test_episodes_are_kept_of_the_first_step_and_every_few_after_it() -> None:
    assert [step for step in range(1, 30) if RecordSettings().count(step)] == [1, 11, 21]
    assert [RecordSettings(every=1, episodes=8).count(step) for step in (1, 2)] == [8, 8]
    assert not any(RecordSettings(episodes=0).count(step) for step in range(1, 30))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"evry": 1}, "spear.record.evry is not a setting; did you mean spear.record.every"),
        ({"every": 0}, "spear.record.every must be at least 1, not 0"),
        ({"episodes": -1}, "spear.record.episodes must be at least 0, not -1"),
        ({"episodes": 2.5}, "must be a whole number"),
        ({"every": True}, "must be a whole number"),
    ],
)
def test_a_setting_that_cannot_be_is_said(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpearError, match=expected):
        RecordSettings.from_mapping(values)


def test_recorded_episodes_stand_on_the_page_with_their_steps(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path, IDENTITY)
    recorder.resume_after(0)
    assert recorder.write(1, []) == 0 and not (tmp_path / "rollouts").exists()
    assert recorder.write(1, [make_episode(0), make_episode(1)]) == 2
    assert recorder.write(3, [make_episode(7)]) == 1
    assert read_steps(tmp_path) == [(1, 0), (1, 1), (3, 7)]
    assert json.loads((tmp_path / "rollouts" / "settings.json").read_text()) == IDENTITY
    rows = Run(tmp_path).rows()
    assert [(row["source"], row["step"], row["counts"]) for row in rows] == [
        ("rollouts", 1, True),
        ("rollouts", 1, True),
        ("rollouts", 3, True),
    ]


def test_episodes_of_validations_stand_beside_them_with_another_source(tmp_path: Path) -> None:
    EpisodeRecorder(tmp_path, IDENTITY).write(1, [make_episode(0)])
    validations = EpisodeRecorder(tmp_path, IDENTITY | {"split": "valid"}, VALIDATIONS)
    for step in (0, 1):  # with the same seeds each time
        validations.write(step, [make_episode(0)])
    assert json.loads((tmp_path / "validations" / "settings.json").read_text())["split"] == "valid"
    rows = Run(tmp_path).rows()
    assert sorted((row["source"], row["step"], row["counts"]) for row in rows) == [
        ("rollouts", 1, True),
        ("validations", 0, True),
        ("validations", 1, True),
    ]


def test_a_resumed_training_holds_no_episode_twice(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path, IDENTITY)
    for step in (1, 2, 3):
        recorder.write(step, [make_episode(step)])
    with (tmp_path / "rollouts" / "episodes.jsonl").open("a") as file:
        file.write('{"step": 1, "torn')
    again = EpisodeRecorder(tmp_path, IDENTITY)
    again.resume_after(2)
    assert read_steps(tmp_path) == [(1, 1), (2, 2)]
    again.write(3, [make_episode(3)])
    assert read_steps(tmp_path) == [(1, 1), (2, 2), (3, 3)]
    before = (tmp_path / "rollouts" / "episodes.jsonl").stat().st_ino
    again.resume_after(3)
    assert (tmp_path / "rollouts" / "episodes.jsonl").stat().st_ino == before, "nothing to forget"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, which is always full")
def test_a_full_disk_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder, path = EpisodeRecorder(tmp_path, IDENTITY), tmp_path / "rollouts" / "episodes.jsonl"
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        assert recorder.write(4, [make_episode(0)]) == 0
    (message,) = caplog.messages
    assert "the episodes of step 4 are not recorded, the training continues" in message and "No space left" in message
    path.unlink()
    assert recorder.write(5, [make_episode(0)]) == 1, "once there is room again"
