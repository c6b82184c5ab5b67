"""Evaluations that are killed, that lose their engine, their disk or their company, and go on."""

import errno
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st

from spear_agents.engines.base import EngineFault, EngineFaultKind, Generation, Served
from spear_agents.engines.scripted import ScriptedEngine
from spear_agents.evaluation import records
from spear_agents.evaluation import settings as policies
from spear_agents.evaluation.records import EPISODES, SETTINGS, open_log, read_last
from spear_agents.evaluation.run import FAULTS_IN_A_ROW, SUMMARY, run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import Trajectory, TrajectoryWriter, read_trajectories
from spear_agents.viewer.runs import Run
from spear_envs.core.errors import SpearError
from spear_envs.core.registration import register_env
from tests.agents.test_evaluation import SplitCorridor
from tests.agents.test_trajectory import make_trajectory


@pytest.fixture
def settings(corridor_id: str) -> EvalSettings:
    register_env(corridor_id, SplitCorridor)
    return EvalSettings(corridor_id, EngineKind.EXPERT, episodes_per_task=4)


def eval_command(out: Path) -> list[str]:
    code = "from spear_envs.cli import main; main()"
    options = ["--engine", "random", "--env", "modality=text", "--tasks", "10", "--episodes-per-task", "8"]
    return [sys.executable, "-c", code, "eval", "spear/Sokoban-v1", *options, "--out", str(out), "--concurrency", "4"]


def test_a_killed_evaluation_goes_on_by_the_same_command_and_plays_nothing_twice(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    episodes = out / EPISODES
    for end_by, text in ((signal.SIGINT, f"kept in {out}; the same command resumes"), (signal.SIGKILL, "")):
        before = episodes.read_bytes().count(b"\n") if episodes.exists() else 0
        process = subprocess.Popen(eval_command(out), cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None:
            if episodes.exists() and episodes.read_bytes().count(b"\n") > before + 10:
                break
            time.sleep(0.01)
        process.send_signal(end_by)
        said = process.communicate()[1].decode()
        assert process.returncode == (130 if text else -signal.SIGKILL) and text in said
        assert not (out / SUMMARY).exists()
    with episodes.open("ab") as file:
        file.write(b'{"env_id": "torn')  # a kill within a write
    subprocess.run(eval_command(out), cwd=root, check=True, capture_output=True)
    played = list(read_trajectories(episodes))
    assert Counter((t.task_id, t.seed) for t in played).most_common(1)[0][1] == 1
    assert len(played) == 10 * 8
    whole = EvalSettings(
        "spear/Sokoban-v1", EngineKind.RANDOM, env_kwargs={"modality": "text"}, tasks="10", episodes_per_task=8
    )
    assert run_evaluation(whole).overall.to_json() == json.loads((out / SUMMARY).read_text())["overall"]


@hypothesis.settings(
    max_examples=15, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(share=st.floats(0, 1), order=st.randoms(use_true_random=False), concurrency=st.integers(1, 12))
def test_whatever_is_left_of_the_file_the_rest_is_played_once_and_the_figures_are_the_same(
    settings: EvalSettings, tmp_path_factory: pytest.TempPathFactory, share: float, order: Any, concurrency: int
) -> None:
    out = tmp_path_factory.mktemp("resume")
    whole = run_evaluation(settings, out)
    lines = (out / EPISODES).read_bytes().splitlines(keepends=True)
    order.shuffle(lines)
    data = b"".join(lines)
    left = data[: round(share * len(data))]
    (out / EPISODES).write_bytes(left)
    (out / SUMMARY).unlink()
    seen: list[int] = []
    resumed = run_evaluation(
        settings, out, concurrency=concurrency, observer=lambda done, total, trajectory: seen.append(done)
    )
    assert seen == list(range(left.count(b"\n"), 13))
    assert resumed.trajectories == whole.trajectories and resumed.overall == whole.overall
    assert len(list(read_trajectories(out / EPISODES))) == 12


class Flaky:
    """An engine that breaks at some of its calls."""

    def __init__(self, engine: ScriptedEngine, broken: Any) -> None:
        self.engine, self.broken = engine, broken

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        self.broken.calls += 1
        if self.broken.calls in self.broken.at:
            raise EngineFault(EngineFaultKind.TIMEOUT, "no answer")
        return await self.engine.generate(*args, **kwargs)


class Broken:
    def __init__(self, at: Any) -> None:
        self.calls, self.at = 0, at

    def wrap(self, policy: Any, codec: Any) -> Flaky:
        return Flaky(ScriptedEngine(policy, codec), self)


def test_an_episode_that_lost_its_engine_is_a_fault_and_is_played_again(settings: EvalSettings, tmp_path: Path) -> None:
    with mock.patch.object(policies, "ScriptedEngine", Broken({2, 9}).wrap):
        first = run_evaluation(settings, tmp_path, concurrency=1)
    assert (first.overall.episodes, first.overall.faults) == (10, 2)
    assert first.overall.success is not None and first.overall.success.mean == 1.0
    seen: list[int] = []
    second = run_evaluation(settings, tmp_path, observer=lambda done, total, trajectory: seen.append(done))
    assert seen == [10, 11, 12]
    assert (second.overall.episodes, second.overall.faults) == (12, 0)
    assert second.trajectories == run_evaluation(settings).trajectories
    assert len(list(read_trajectories(tmp_path / EPISODES))) == 14
    assert len(read_last(tmp_path / EPISODES)) == 12


def test_an_engine_that_is_gone_stops_the_run_and_leaves_what_was_played(
    settings: EvalSettings, tmp_path: Path
) -> None:
    with (
        mock.patch.object(policies, "ScriptedEngine", Broken(range(12, 1000)).wrap),
        pytest.raises(SpearError, match=r"failed 5 episodes in a row \(engine_timeout.*same command resumes"),
    ):
        run_evaluation(settings, tmp_path, concurrency=1)
    played = list(read_trajectories(tmp_path / EPISODES))
    won = sum(t.won for t in played)
    assert won >= 3 and len(played) == won + FAULTS_IN_A_ROW
    seen: list[int] = []
    run_evaluation(settings, tmp_path, observer=lambda done, total, trajectory: seen.append(done))
    assert seen[0] == won and seen[-1] == 12


def test_two_processes_do_not_play_into_one_folder(settings: EvalSettings, tmp_path: Path) -> None:
    with open_log(tmp_path / EPISODES, "", ""), pytest.raises(SpearError, match="another process writes"):
        run_evaluation(settings, _with_settings(settings, tmp_path))


def _with_settings(settings: EvalSettings, out: Path) -> Path:
    other = out / "other"
    run_evaluation(settings, other)
    (out / SETTINGS).write_text((other / SETTINGS).read_text())
    return out


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_settings_that_cannot_be_read_are_one_clear_error(settings: EvalSettings, tmp_path: Path, text: str) -> None:
    run_evaluation(settings, tmp_path)
    (tmp_path / SETTINGS).write_text(text)
    with pytest.raises(SpearError, match=r"settings\.json cannot be read"):
        run_evaluation(settings, tmp_path)


def test_lines_of_other_tasks_are_refused_and_the_last_of_a_job_counts(settings: EvalSettings, tmp_path: Path) -> None:
    """By the evaluation that goes on as by whoever reads its records."""
    run_evaluation(settings, tmp_path)
    path = tmp_path / EPISODES
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    again = json.dumps(first | {"won": False, "stop": "failed", "reward_terms": {"outcome": -1.0}})
    path.write_text("\n".join([*lines, again]) + "\n")
    resumed = {(one.task_id, one.seed): one.won for one in run_evaluation(settings, tmp_path).trajectories}
    assert resumed == {(one.task_id, one.seed): one.won for one in read_last(path)}
    assert resumed[first["task_id"], first["seed"]] is not first["won"]
    foreign: list[dict[str, Any]] = [{"env_id": "other/Env-v0"}, {"fingerprint": "0" * 64}]
    forged = [{"won": False}, {"stop": "turn_limit"}, {"reward_terms": {"outcome": -1.0}}]
    forged += [{"stop": "quit"}, {"won": False, "stop": "failed"}]
    for change in foreign + forged:
        path.write_text("\n".join([*lines, json.dumps(first | change)]) + "\n")
        for read in (lambda: run_evaluation(settings, tmp_path), lambda: read_last(path)):
            with pytest.raises(SpearError, match=f"line {len(lines) + 1}"):
                read()
        if change in forged:
            with pytest.raises(SpearError, match="contradicts"):
                Run(tmp_path)
        else:
            own, other = Run(tmp_path).summarise()["sources"]
            assert own["parts"][0]["episodes"] == 12 and "another evaluation" in other["name"]


def test_a_server_that_answers_as_another_model_stops_the_run_except_by_choice(
    settings: EvalSettings, tmp_path: Path
) -> None:
    """In one run, and when it goes on."""
    played = run_evaluation(settings).trajectories[0]
    one, other = (
        replace(played, turns=(replace(played.turns[0], served=Served(model=model)), *played.turns[1:]))
        for model in ("a-model", "b-model")
    )
    path, about = tmp_path / EPISODES, (played.env_id, played.fingerprint)
    with open_log(path, *about) as log, pytest.raises(SpearError, match=r"'b-model'.*'a-model'.*--mixed-models"):
        log.write(one)
        log.write(other)
    with open_log(path, *about) as log, pytest.raises(SpearError, match="'b-model'"):
        log.write(other)
    with open_log(path, *about, mixed_models=True) as log:
        log.write(other)
    assert list(read_trajectories(path)) == [one, other]
    with pytest.raises(SpearError, match="--mixed-models"), open_log(path, *about):
        pass


@pytest.mark.parametrize("left_out", ["lora", "native_tools", "reasoning_effort"])
def test_an_option_that_is_left_out_is_another_evaluation(
    settings: EvalSettings, tmp_path: Path, left_out: str
) -> None:
    run_evaluation(settings, tmp_path)
    written = json.loads((tmp_path / SETTINGS).read_text())
    (tmp_path / SETTINGS).write_text(json.dumps(written | {left_out: "was given"}))
    with pytest.raises(SpearError, match=f"{left_out}='was given', not None"):
        run_evaluation(settings, tmp_path)


def test_a_job_whose_later_trial_was_cut_short_by_a_fault_is_not_lost(settings: EvalSettings, tmp_path: Path) -> None:
    run_evaluation(settings, tmp_path)
    path = tmp_path / EPISODES
    first = path.read_text().splitlines()[0]
    lost = json.loads(first) | {"won": False, "stop": "failed", "reward_terms": {"outcome": -1.0}}
    fault = lost | {"stop": "fault", "fault": "engine_timeout", "trial": 2}
    path.write_text("\n".join(map(json.dumps, (lost | {"reflection": "look first"}, fault))) + "\n")
    assert [one.stop.value for one in read_last(path)] == ["fault"]
    path.write_text("\n".join(map(json.dumps, (lost, fault))) + "\n")  # played to its end, then again
    assert [one.stop.value for one in read_last(path)] == ["failed"]


def test_an_engine_out_of_memory_stops_the_run_and_leaves_what_was_played(
    settings: EvalSettings, tmp_path: Path
) -> None:
    calls = 0

    class Full(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            nonlocal calls
            calls += 1
            if calls > 12:
                raise MemoryError("out of memory")
            return await super().generate(*args, **kwargs)

    with mock.patch.object(policies, "ScriptedEngine", Full), pytest.raises(SpearError, match="out of memory"):
        run_evaluation(settings, tmp_path, concurrency=1)
    assert len(list(read_trajectories(tmp_path / EPISODES))) == 4
    assert run_evaluation(settings, tmp_path).overall.episodes == 12


def test_a_full_disk_stops_the_run_and_leaves_what_was_played(settings: EvalSettings, tmp_path: Path) -> None:
    written = 0
    write = TrajectoryWriter.write

    def fill_up(self: TrajectoryWriter, trajectory: Trajectory) -> None:
        nonlocal written
        written += 1
        if written > 4:
            assert self._file is not None
            self._file.write(b'{"half": ')
            raise SpearError(f"{self.path} cannot be written ({errno.ENOSPC})")
        write(self, trajectory)

    with mock.patch.object(TrajectoryWriter, "write", fill_up), pytest.raises(SpearError, match="cannot be written"):
        run_evaluation(settings, tmp_path, concurrency=3)
    seen: list[int] = []
    run_evaluation(settings, tmp_path, observer=lambda done, total, trajectory: seen.append(done))
    assert seen == list(range(4, 13))


class Filling:
    """A file on a disk that has room for so many more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written: int = self.file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_an_episode_that_does_not_fit_takes_no_later_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(make_trajectory(seed=1))
        whole: Any = writer._file
        writer._file = Filling(whole, 100)  # type: ignore[assignment]
        with pytest.raises(SpearError, match="cannot be written"):
            writer.write(make_trajectory(seed=2))
        writer._file = whole  # the disk was freed
        writer.write(make_trajectory(seed=3))
    assert [each.seed for each in read_trajectories(path)] == [1, 3]


def test_of_two_evaluations_that_begin_at_once_one_has_the_folder(settings: EvalSettings, tmp_path: Path) -> None:
    looked, write = threading.Barrier(2), records.write_json

    def write_late(path: Path, value: Any) -> None:
        if path.name == SETTINGS:
            with suppress(threading.BrokenBarrierError):
                looked.wait(1.0)  # until both have found none
        write(path, value)

    def play(engine: EngineKind) -> str:
        try:
            run_evaluation(replace(settings, engine=engine), tmp_path, concurrency=1)
        except SpearError as error:
            return str(error)
        return ""

    engines = (EngineKind.EXPERT, EngineKind.RANDOM)
    with mock.patch.object(records, "write_json", write_late), ThreadPoolExecutor(2) as threads:
        refused = dict(zip(engines, threads.map(play, engines), strict=True))
    (winner,) = (engine for engine, message in refused.items() if not message)
    assert json.loads((tmp_path / SETTINGS).read_text())["engine"] == winner.value


def test_a_start_that_was_killed_before_its_settings_is_no_obstacle(settings: EvalSettings, tmp_path: Path) -> None:
    (tmp_path / EPISODES).touch()  # what is locked
    run_evaluation(settings, tmp_path, concurrency=1)
    assert (tmp_path / SETTINGS).is_file()


def test_the_hash_is_of_everything_that_figures_depend_on(settings: EvalSettings, tmp_path: Path) -> None:
    def read_hash(changed: EvalSettings, name: str) -> str:
        run_evaluation(changed, tmp_path / name)
        return str(json.loads((tmp_path / name / SUMMARY).read_text())["settings_hash"])

    first = read_hash(settings, "a")
    assert read_hash(replace(settings, tasks="2"), "b") == first
    assert read_hash(replace(settings, env_kwargs={"max_turns": 7}), "c") != first
    assert read_hash(replace(settings, seed=1), "d") != first
