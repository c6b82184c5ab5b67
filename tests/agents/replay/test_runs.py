import json
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spear_agents.evaluation.records import PROGRESS, read_last, read_settings
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import StopReason, Trajectory, TrajectoryWriter
from spear_agents.viewer.runs import Run
from spear_envs.core.errors import SpearError
from tests.agents.replay.conftest import HOSTILE
from tests.agents.test_cli import train, write_launch
from tests.agents.test_trajectory import make_trajectory


def write(path: Path, *trajectories: Trajectory) -> None:
    with TrajectoryWriter(path) as writer:
        for trajectory in trajectories:
            writer.write(trajectory)


def test_an_episode_has_prompt_thought_action_and_a_picture_of_each_turn(sokoban_run: Path) -> None:
    run = Run(sokoban_run)
    rows = run.rows()
    assert [row["i"] for row in rows] == list(range(5)) and {row["source"] for row in rows} == {"hostile", "won"}
    assert [row["stop"] for row in rows if row["source"] == "won"] == ["won", "won", "won", "turn_limit"]
    lost = run.read_episode(rows[-1]["i"])
    turn = lost["turns"][3]
    assert lost["notes"] == [] and turn["unit"] == "bytes"
    assert turn["thought"] == "nothing else comes to mind" and "jump" in turn["said"]
    assert turn["observation"] in turn["prompt"] and "Sokoban" in turn["prompt"]
    assert turn["tokens"] is None, "a person has no distribution"
    assert all(turn["image"].startswith("data:image/png;base64,") for turn in lost["turns"])
    assert lost["final_observation"] and lost["final_image"]


def test_texts_and_numbers_of_a_hostile_episode_are_data(sokoban_run: Path) -> None:
    run = Run(sokoban_run)
    body = run.read_episode(next(row["i"] for row in run.rows() if row["source"] == "hostile"))
    json.dumps(body, allow_nan=False)
    assert body["turns"][0]["observation"] == HOSTILE
    assert (body["reward"], body["score"], body["turns"][0]["reward"]) == (None, None, None)
    assert body["turns"][0]["image"] is None, "an unknown environment is not imported to draw"


def test_a_name_with_a_module_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    write(tmp_path / "episodes.jsonl", make_trajectory(env_id="trap:spear/Sokoban-v1"))
    assert Run(tmp_path).read_episode(0)["final_image"] is None


def test_a_torn_line_waits_and_new_episodes_are_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    write(path, make_trajectory(task_id="one"))
    line = make_trajectory(task_id="two").to_json().encode() + b"\n"
    with path.open("ab") as file:
        file.write(line[:40])
    run = Run(tmp_path)
    assert [row["task"] for row in run.rows()] == ["one"]
    with path.open("ab") as file:
        file.write(line[40:])
    run.refresh()
    assert [row["task"] for row in run.rows()] == ["one", "two"]
    assert run.read_episode(1)["task"] == "two"


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    write(tmp_path / "episodes.jsonl", make_trajectory(task_id="one"), make_trajectory(task_id="two"))
    run = Run(tmp_path)
    (tmp_path / "episodes.jsonl").unlink()
    write(tmp_path / "episodes.jsonl", make_trajectory(task_id="three"))
    with pytest.raises(SpearError, match="has changed"):
        run.read_episode(1)
    run.refresh()
    assert [row["task"] for row in run.rows()] == ["three"]


def test_a_run_that_was_removed_goes_and_settings_may_come_late(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "episodes.jsonl", make_trajectory(task_id=name))
    write(tmp_path / "c" / "episodes.jsonl")
    run = Run(tmp_path)
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "c" / "settings.json").write_text('{"model": "late"}')
    write(tmp_path / "c" / "episodes.jsonl", make_trajectory(task_id="c"))
    run.refresh()
    assert [row["task"] for row in run.rows()] == ["b", "c"] and run.read_episode(0)["task"] == "b"
    assert run.search("no such word") == [], "it does not look for the removed file"
    assert run.summarise()["sources"][1]["settings"] == {"model": "late"}


def test_another_run_under_the_old_name_has_its_own_settings(tmp_path: Path) -> None:
    def begin(model: str) -> None:
        (tmp_path / "run").mkdir()
        write(tmp_path / "run" / "episodes.jsonl", make_trajectory())
        (tmp_path / "run" / "settings.json").write_text(json.dumps({"model": model}))

    begin("a")
    run = Run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "old")
    begin("b")
    run.refresh()
    assert run.summarise()["sources"][0]["settings"]["model"] == "b"


def test_the_last_of_several_records_of_one_sample_counts(tmp_path: Path) -> None:
    lost = make_trajectory(won=False, stop=StopReason.FAILED, reward_terms={})
    again = [lost, make_trajectory(seed=1), make_trajectory(trial=2)]
    write(tmp_path / "a" / "episodes.jsonl", *again)
    write(tmp_path / "b" / "episodes.jsonl", *again)
    (tmp_path / "b" / "settings.json").write_text('{"engine": "person"}')
    counts = [row["counts"] for row in Run(tmp_path).rows()]
    assert counts == [False, True, True, True, True, True], "a person may play a task as often as they like"


def test_a_fault_does_not_replace_what_had_ended(tmp_path: Path) -> None:
    fault = make_trajectory(won=False, stop=StopReason.FAULT, reward_terms={}, fault="gateway_stopped")
    reflected = make_trajectory(won=False, stop=StopReason.FAILED, reward_terms={}, seed=1, reflection="try again")
    write(tmp_path / "a" / "episodes.jsonl", fault, make_trajectory(), fault, reflected, replace(fault, seed=1))
    (tmp_path / "a" / "settings.json").write_text("{}")
    run = Run(tmp_path)
    assert [row["counts"] for row in run.rows()] == [False, True, False, False, True]
    (source,) = run.summarise()["sources"]
    last = read_last(tmp_path / "a" / "episodes.jsonl")
    assert source["parts"][0]["faults"] == sum(each.stop is StopReason.FAULT for each in last) == 1


def test_metrics_become_columns_without_nan(tmp_path: Path) -> None:
    write_launch(
        tmp_path / "train", 0, (0, {"val/success/all": 0.5}), train(1, x=math.nan, y=1.0), train(2, x=math.inf, y=2.0)
    )
    (training,) = Run(tmp_path).read_trainings()
    assert training["name"] == "train" and training["steps"] == [0, 1, 2]
    assert training["metrics"]["y"] == [None, 1.0, 2.0]
    assert training["metrics"]["val/success/all"] == [0.5, None, None]
    assert "x" not in training["metrics"], "nothing finite to draw"
    json.dumps(Run(tmp_path).summarise(), allow_nan=False)


def test_there_must_be_something_to_show(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="does not exist"):
        Run(tmp_path / "nowhere")
    with pytest.raises(SpearError, match="no metrics"):
        Run(tmp_path)


def test_a_file_of_episodes_is_not_called_missing(tmp_path: Path) -> None:
    write(tmp_path / "episodes.jsonl", make_trajectory())
    with pytest.raises(SpearError, match="contain"):
        read_settings(tmp_path / "episodes.jsonl")


def test_an_evaluation_under_way_says_how_far_it_is_and_how_long_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic
    path, progress = tmp_path / "mine" / "episodes.jsonl", tmp_path / "mine" / PROGRESS
    path.parent.mkdir()
    write(path, *(make_trajectory(task_id=f"task{number}") for number in range(6)))
    run = Run(tmp_path)
    assert run.describe_progress() == []
    progress.write_text(json.dumps({"planned": 10, "before": 2}))
    now = time.time()
    os.utime(progress, (now - 600, now - 600))
    os.utime(path, (now, now))
    run.refresh()
    assert run.describe_progress() == ["mine: 6 of 10 episodes, about 10 min left"]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1200)
    assert run.describe_progress() == ["mine: 6 of 10 episodes, none for 20 min"]
    progress.write_text("[")
    assert run.describe_progress() == []


def test_the_count_goes_when_the_evaluation_ends(tmp_path: Path) -> None:
    seen: list[object] = []

    def look(played: int, total: int, episode: Trajectory | None) -> None:
        if episode is not None:
            seen.append(json.loads((tmp_path / PROGRESS).read_text("utf-8")))

    kwargs = {"modality": "text"}
    settings = EvalSettings(env_id="spear/Sokoban-v1", engine=EngineKind.RANDOM, env_kwargs=kwargs, tasks="3")
    run_evaluation(settings, tmp_path, observer=look)
    assert seen == [{"planned": 3, "before": 0}] * 3 and not (tmp_path / PROGRESS).exists()


HUGE = 10**400
SERVED = {"model": "m", "prompt_tokens": 1, "completion_tokens": 1, "tries": 1}


def write_lines(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="ascii")


@pytest.mark.parametrize("number", [HUGE, 1e308, math.nan, math.inf])
def test_numbers_that_json_or_a_sum_cannot_hold_are_left_out(tmp_path: Path, number: float) -> None:
    plain = json.loads(make_trajectory().to_json())
    turn = plain["turns"][0] | {"served": SERVED | {"cost": number}}
    odd = {"reward": number, "score": number, "seconds": number, "turns": [turn]}
    write_lines(tmp_path / "a" / "episodes.jsonl", plain | odd, plain | odd | {"task_id": "t/1"})
    write_lines(tmp_path / "b" / "metrics" / "0.jsonl", {"step": 1, "data": {"x": number, "y": 1}})
    run = Run(tmp_path)
    summary = run.summarise()
    json.dumps([summary, run.read_episode(0)], allow_nan=False)
    (source,) = summary["sources"]
    assert (source["cost"], source["seconds"], source["parts"][0]["reward"]) == (None, None, None)
    assert source["parts"][0]["success"]["mean"] == 1.0
    assert summary["trainings"][0]["metrics"]["y"] == [1.0]


def test_odd_values_beside_the_episodes_are_left_out(tmp_path: Path) -> None:
    line = json.loads(make_trajectory().to_json())
    write_lines(tmp_path / "a" / "episodes.jsonl", line)
    (tmp_path / "a" / "settings.json").write_text(json.dumps({"model": "x" * 5000, "env_kwargs": [1]}))
    (tmp_path / "a" / PROGRESS).write_text(json.dumps({"planned": HUGE, "before": 0}))
    pairs = {"step": 1, "data": [[1, 2], ["y", 3]]}
    write_lines(tmp_path / "b" / "metrics" / "0.jsonl", pairs, {"step": 2, "data": {"y": 4}})
    run = Run(tmp_path)
    assert "tokenizer.json" in run.read_episode(0)["notes"][0]
    assert run.describe_progress() == []
    assert [one["metrics"] for one in run.read_trainings()] == [{"y": [4.0]}]
    write_lines(tmp_path / "c" / "episodes.jsonl", line | {"memory": [math.nan]})
    with pytest.raises(SpearError, match="not a trajectory"):
        Run(tmp_path / "c")


def test_a_large_seed_keeps_its_digits(tmp_path: Path) -> None:
    seeds = [20_261_128_000_000_000 + number for number in (0, 1)]
    write(tmp_path / "episodes.jsonl", *(make_trajectory(seed=seed) for seed in seeds))
    assert [row["seed"] for row in Run(tmp_path).rows()] == list(map(str, seeds)), "a browser would round them"


def test_a_folder_named_as_the_run_is_a_source_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "a" / "episodes.jsonl", make_trajectory())
    write(tmp_path / "a" / "a" / "episodes.jsonl", make_trajectory())
    write(tmp_path / "a" / "b" / "episodes.jsonl", make_trajectory())
    assert [row["source"] for row in Run(tmp_path / "a").rows()] == ["a", "./a", "b"]


def test_episodes_before_a_malformed_line_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    write(path, make_trajectory(task_id="one"))
    run = Run(tmp_path)
    good = [make_trajectory(task_id=name).to_json() + "\n" for name in ("two", "three")]
    with path.open("r+", encoding="ascii") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
        file.write(good[0] + "{}\n")
        file.flush()
        with pytest.raises(SpearError, match="not a trajectory"):
            run.refresh()
        file.seek(end)
        file.write("".join(good))
    run.refresh()
    assert [row["task"] for row in run.rows()] == ["one", "two", "three"]
