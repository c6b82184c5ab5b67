"""What a run says of itself: advice, curves, and recorded episodes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")
pytest.importorskip("matplotlib", reason="needs the extra 'train'")

import numpy as np
from click.testing import CliRunner
from PIL import Image

from spear_agents.engines.base import Finish
from spear_agents.evaluation.records import METRICS_FOLDER, PANELS
from spear_agents.play.trajectory import Layout, StopReason, Trajectory, Turn, read_trajectories
from spear_agents.viewer.runs import Run
from spear_training.algorithms import SpearSettings
from spear_training.run.config import RecordSettings
from spear_training.run.review import WINDOW, advise, review_history
from spear_training.run.training import plot_curves
from spear_training.step.records import EpisodeRecorder
from tests.agents.test_cli import train, write_launch
from tests.training import trainings

QUIET = {
    "entropy/token-mean": 1.0,
    "clip/ppo_fraction": 0.02,
    "groups/equal": 0.3,
    "groups/same_outcome": 0.4,
    "rows/trained": 100.0,
    "mask/void": 0.1,
    "replay/size": 500.0,
    "replay/drawn": 10.0,
    "training/rollout_log_probs_diff_mean": 1e-6,
    "kl/old": 0.02,
    "replay/ess": 0.9,
    "replay/failed": 0.1,
    "spear/mu": 0.5,
}
APART = {"training/rollout_log_probs_diff_mean": 0.2}


def run(count: int = 25, *, without: tuple[str, ...] = (), **changes: float) -> list[dict[str, Any]]:
    """Metrics of ``count`` equal steps, after a record of validation alone."""
    step = {name: value for name, value in QUIET.items() if name not in without}
    step |= {name.replace("__", "/"): value for name, value in changes.items()}
    steps = [{"step": t, "training/global_step": t, **step} for t in range(1, count + 1)]
    return [{"step": 0, "val/success/all": 0.1}, *steps]


@pytest.mark.parametrize(
    ("records", "topic", "mend"),
    [
        (run(groups__equal=0.95), "equal advantages", "rollout.group_size"),
        (run(without=("replay/drawn",)), "empty buffer", "replay.max_age"),
        (run(mask__void=0.6), "masks", "filter.void=turn"),
        (run(mask__overlong=0.9), "masks", "rollout.max_response_length"),
        (run(rows__trained=0.0), "idle steps", "fault/"),
        (run(clip__ppo_fraction=0.5), "large updates", "optimizer.lr"),
        (run(kl__old=0.4), "large updates", "train.mini_batch_size"),
        (run(replay__ess=0.3), "stale replay", "replay.max_age"),
        (run(replay__failed=0.74), "imitated failures", "sil.gamma=success"),
        (run(**APART), "rollout engine", "rollout.dtype"),
        ([*run(6), *run(9, **{"entropy/token-mean": 0.05})], "entropy", "sil.warmup_steps"),
        ([*run(6), *run(9, **{"entropy/token-mean": 3.0})], "entropy", "learning rate"),
        (run(groups__same_outcome=0.9, spear__mu=0.0), "petty differences", "reward.format=none"),
    ],
)
def test_a_run_that_goes_wrong_is_reported(records: list[dict[str, Any]], topic: str, mend: str) -> None:
    settings = SpearSettings.from_mapping({"advantage": {"normalize_std": True}})
    ((found, sentence),) = review_history(records, settings).items()
    assert found == topic and mend in sentence


@pytest.mark.parametrize(
    ("records", "nodes"),
    [
        (run(), {}),
        ([], {}),
        (run(groups__equal=1.0), {"advantage": {"estimator": "gae"}}),
        (run(without=("replay/drawn",)), {"sil": {"enabled": False}}),
        (run(8, without=("replay/drawn",)), {}),
        (run(groups__same_outcome=0.9, spear__mu=0.0), {"advantage": {"normalize_std": False}}),
        (run(WINDOW - 1, groups__equal=1.0, rows__trained=0.0, replay__failed=1.0, kl__old=1.0), {}),
        (run(clip__ppo_fraction=0.5), {"loss": {"policy": "gspo"}}),
        ([*run(20), *run(2, kl__old=0.9)], {}),
        (run(**APART, staleness__mean=0.9), {}),
        (run(clip__ppo_fraction=float("nan")), {}),
        (run(clip__ppo_fraction=10**400, entropy__token_mean="high", kl__old=[1]), {}),
    ],
)
def test_a_healthy_or_young_run_is_not_reported(records: list[dict[str, Any]], nodes: dict[str, Any]) -> None:
    assert review_history(records, SpearSettings.from_mapping(nodes)) == {}


def test_a_run_is_reviewed_by_its_folder(tmp_path: Path, model_folder: Path) -> None:
    assert "folder of a training" in str(CliRunner().invoke(advise, [str(tmp_path)]).exception)
    trainings.write_run(tmp_path, "preset=demo", f"model.path={model_folder}")
    assert CliRunner().invoke(advise, [str(tmp_path)]).output == "nothing stands out\n"
    (tmp_path / METRICS_FOLDER).mkdir()
    lines = [json.dumps({"step": record["step"], "data": record}) + "\n" for record in run(mask__void=0.9)[1:]]
    (tmp_path / METRICS_FOLDER / "0000.jsonl").write_text("".join(lines))
    assert "filter.void=turn" in CliRunner().invoke(advise, [str(tmp_path)]).output
    for value in ("x", [1], {}, 10**400):  # written by something else
        lines += [json.dumps({"step": 99, "data": {"mask/void": value, "training/global_step": 99}}) + "\n"]
        (tmp_path / METRICS_FOLDER / "0000.jsonl").write_text("".join(lines))
        assert "filter.void=turn" in CliRunner().invoke(advise, [str(tmp_path)]).output


def write_run(out: Path, steps: int = 12) -> None:
    """A run whose every curve has something to show, not at every step."""
    random = np.random.default_rng(0)
    keys = [key for _, series in PANELS for key, _ in series if not key.startswith("val/")]
    records: list[tuple[int, dict[str, Any]]] = [(0, {"val/success/all": 0.1})]
    for step in range(1, steps + 1):
        data: dict[str, Any] = {key: float(random.random()) for key in keys}
        if step % 4:
            data.pop("replay/drawn")
        else:
            data["val/success/all"] = step / steps
        records.append(train(step, **data))
    write_launch(out, 0, *records)


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_a_picture_of_all_curves(tmp_path: Path, suffix: str) -> None:
    write_run(tmp_path)
    path = plot_curves(tmp_path, tmp_path / f"curves.{suffix}", title="a run: spear/Sokoban-v1")
    assert path == tmp_path / f"curves.{suffix}"
    if suffix == "png":
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.width > 1000
            colours = picture.convert("RGB").getcolors(2**24)
            assert colours is not None and len(colours) > 50, "not an empty sheet"
    else:
        assert path.read_bytes().startswith(b"%PDF")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["metrics", path.name]), "no temporary file stays"


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


def test_a_resumed_training_holds_no_episode_twice(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path, IDENTITY)
    for step in (1, 2, 3):
        recorder.write(step, [make_episode(step)])
    with (tmp_path / "rollouts" / "episodes.jsonl").open("a") as file:
        file.write(f'{{"step": {10**400}}}\n{{"step": 1, "torn')
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


def test_a_file_that_is_not_ours_to_read_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder, path = EpisodeRecorder(tmp_path, IDENTITY), tmp_path / "rollouts" / "episodes.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"\xff\n")
    with caplog.at_level(logging.WARNING):
        recorder.resume_after(1)
    assert path.read_bytes() == b"\xff\n" and "stay in" in caplog.messages[0]


def test_draws_that_are_too_small_are_not_an_empty_buffer() -> None:
    settings = SpearSettings.from_mapping({"sil": {"min_rows": 128}})
    history = [{"training/global_step": t, "replay/discarded": 2048.0} for t in range(1, 13)]
    found = review_history(history, settings)
    assert "sil.min_rows" in found["small draws"] and "empty buffer" not in found
