"""The supervisor, with a script instead of the training: what it watches, what it reports, and what it ends."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psutil", reason="needs the extra 'train'")

import psutil

from spear_agents.evaluation.records import METRICS_FOLDER
from spear_envs.core.errors import SpearError
from spear_training.run import supervise
from spear_training.run.supervise import (
    LOCK_FILE,
    LOG_FILE,
    MARK,
    Patience,
    build_environment,
    find_error,
    hold_run,
    lock_run,
    supervise_training,
)

StandIn = Callable[[str], None]
OWN = f"test-{os.getpid()}"
"""Mark of the runs of these tests: others may be training on this machine."""


HURRY = Patience(look=0.05, lost=0.3, grace=0.5, end=0.5)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Makes the process that a run starts another one: a script of the given body."""

    def install(body: str) -> None:
        script = tmp_path / "stand_in.py"
        script.write_text(
            f"#!{python}\nimport os, signal, subprocess, sys, time\nout = sys.argv[-1]\n{textwrap.dedent(body)}"
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    python = sys.executable
    monkeypatch.setattr(supervise.uuid, "uuid4", lambda: SimpleNamespace(hex=OWN))
    return install


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run folder."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def ignore(history: list[dict[str, Any]]) -> None:
    """Observe nothing."""


def run(out: Path, observer: Callable[[list[dict[str, Any]]], None] = ignore) -> None:
    supervise_training(out, "cpu", observer, poll_seconds=0.02, patience=HURRY)


def find_marked() -> list[psutil.Process]:
    """Processes of this test's run that are alive."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == OWN and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


CHILD = """
import signal, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(300)
"""


def start_child(kind: str, mark: str) -> subprocess.Popen[str]:
    """A marked process in a session of its own, as Ray's daemons are; up when this returns."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    return child


# ---- a run that ends -------------------------------------------------------------------------------------------------
def test_a_run_is_watched_to_its_end(out: Path, stand_in: StandIn) -> None:
    stand_in(
        """
        with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
            for step in (1, 2):
                file.write('{"step": %d, "data": {"training/global_step": %d}}\\n' % (step, step))
                file.flush()
                time.sleep(0.2)
        print("some line of verl")
        """
    )
    seen: list[int] = []
    run(out, lambda history: seen.append(len(history)))
    assert seen == sorted(seen) and seen[-1] == 2, "the last word is read after the end"
    assert "some line of verl" in (out / LOG_FILE).read_text()


def test_a_later_launch_adds_to_the_log(out: Path, stand_in: StandIn) -> None:
    for number in range(2):
        stand_in(f"print('launch {number}')")
        run(out)
    assert (out / LOG_FILE).read_text() == "launch 0\nlaunch 1\n"


# ---- a run that fails ------------------------------------------------------------------------------------------------
def test_a_failure_is_one_line_with_the_log(out: Path, stand_in: StandIn) -> None:
    stand_in("print('ValueError: an older one', flush=True); sys.exit(1)")
    with pytest.raises(SpearError, match="an older one"):
        run(out)
    stand_in("print('Traceback (most recent call last):\\n  File x\\nRuntimeError: no space', flush=True); sys.exit(1)")
    with pytest.raises(SpearError) as caught:
        run(out)
    assert str(caught.value) == f"the training stopped: RuntimeError: no space (log: {out / LOG_FILE})"


@pytest.mark.parametrize(("acts", "words"), [("sys.exit(0)", "ended"), ("time.sleep(600)", "stopped")])
def test_a_process_that_nobody_misses_ends_the_training(out: Path, stand_in: StandIn, acts: str, words: str) -> None:
    """Such as the queue's storage: those that wait for it would wait for ever."""
    stop = "os.kill(other.pid, signal.SIGSTOP)" if words == "stopped" else ""
    stand_in(
        f"""
        code = "import sys, time\\ntime.sleep(1)\\n{acts}"
        other = subprocess.Popen(["ray::SimpleStorageUnit", "-c", code], executable="{sys.executable}")
        time.sleep(0.2)
        {stop}
        other.wait()
        time.sleep(600)
        """
    )
    started = time.monotonic()
    with pytest.raises(SpearError, match=f"SimpleStorageUnit.*{words}.*resumes"):
        run(out)
    assert time.monotonic() - started < 15
    assert find_marked() == []


def test_a_worker_of_ray_may_end(out: Path, stand_in: StandIn) -> None:
    """Ray starts workers ahead, whose arguments name its raylet, and ends those that it does not need."""
    stand_in(
        f"""
        code = "import time; time.sleep(0.2)"
        subprocess.run(["{sys.executable}", "-c", code, "--raylet-name=/tmp/raylet", "--gcs-address=gcs_server"])
        time.sleep(0.7)
        print("the training ended")
        """
    )
    run(out)
    assert (out / LOG_FILE).read_text() == "the training ended\n"


@pytest.mark.slow
def test_a_real_process_with_a_broken_configuration_fails_with_one_line(out: Path) -> None:
    pytest.importorskip("verl", reason="needs the extra 'train'")
    (out / "config.yaml").write_text("trainer: {device: cpu}\n")
    with pytest.raises(SpearError) as caught:
        run(out)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(f"(log: {out / LOG_FILE})")
    assert "trainer" in message


# ---- a run that is stopped -------------------------------------------------------------------------------------------
def test_what_a_failed_run_started_is_ended_with_it(out: Path, stand_in: StandIn) -> None:
    """A process in a session of its own, as Ray's daemons are, with shared memory that it would leave behind."""
    other = start_child("plain", "another run")
    code = (
        "from multiprocessing import shared_memory, resource_tracker\\nimport time\\n"
        "m = shared_memory.SharedMemory(create=True, size=64)\\n"
        "resource_tracker.unregister(m._name, 'shared_memory')\\n"
        "print(m.name, flush=True)\\ntime.sleep(300)\\n"
    )
    stand_in(
        f"""
        child = subprocess.Popen(["{sys.executable}", "-c", "{code}"], start_new_session=True, stdout=subprocess.PIPE)
        open(out + "/name", "wb").write(child.stdout.readline().strip())
        sys.exit(3)
        """
    )
    try:
        with pytest.raises(SpearError):
            run(out)
        assert find_marked() == [] and other.poll() is None
        if sys.platform == "linux":
            assert not Path("/dev/shm", (out / "name").read_text()).exists()
    finally:
        other.kill()
        other.wait()


def test_an_interrupt_stops_everything_even_what_will_not_listen(out: Path, stand_in: StandIn) -> None:
    stand_in(
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(
            ["{sys.executable}", "-c", {CHILD!r}, "deaf"], start_new_session=True, stdout=subprocess.PIPE
        )
        child.stdout.readline()
        open(out + "/ready", "w").close()
        time.sleep(300)
        """
    )

    def interrupt(history: list[dict[str, Any]]) -> None:
        if (out / "ready").exists():
            assert len(find_marked()) == 2
            raise KeyboardInterrupt

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        run(out, interrupt)
    assert find_marked() == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_termination_is_an_interrupt(out: Path, stand_in: StandIn) -> None:
    stand_in("open(out + '/ready', 'w').close(); time.sleep(300)")

    def terminate(history: list[dict[str, Any]]) -> None:
        if (out / "ready").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run(out, terminate)
    assert find_marked() == []


def test_an_error_of_the_observer_does_not_leave_the_run_alone(out: Path, stand_in: StandIn) -> None:
    stand_in("time.sleep(300)")

    def fail(history: list[dict[str, Any]]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(out, fail)
    assert find_marked() == []


# ---- one run a folder ------------------------------------------------------------------------------------------------
def test_who_is_refused_has_written_nothing(out: Path) -> None:
    folder = out / "run"
    with hold_run(folder):
        (folder / "mine").write_text("x")
        with pytest.raises(SpearError, match="another process"), hold_run(folder):
            (folder / "mine").write_text("y")
        assert {path.name for path in folder.iterdir()} == {"mine", LOCK_FILE}
        assert (folder / "mine").read_text() == "x"
    with pytest.raises(SpearError, match="wrong option"), hold_run(out / "new"):
        raise SpearError("a wrong option")
    assert not (out / "new").exists(), "a folder that stays empty goes"


def test_metrics_of_a_launch_go_after_the_last_there_are(out: Path) -> None:
    metrics = out / METRICS_FOLDER
    metrics.mkdir(parents=True)
    for name in ("0001.jsonl", "0003.jsonl", "mine.jsonl"):
        (metrics / name).touch()
    assert build_environment(out, "cpu")["VERL_FILE_LOGGER_PATH"].endswith("0004.jsonl")


def test_the_lock_goes_with_the_process_that_held_it(out: Path) -> None:
    code = "from pathlib import Path\nfrom spear_training.run.supervise import lock_run\n"
    code += f"with lock_run(Path({str(out)!r})):\n"
    code += "    print('held', flush=True)\n    import time\n    time.sleep(300)\n"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(SpearError), lock_run(out):
            pass
        holder.kill()
        holder.wait()
        with lock_run(out):
            pass
    finally:
        holder.kill()
        holder.wait()


# ---- the environment of the process ----------------------------------------------------------------------------------


def test_a_cpu_run_is_kept_off_gpus_and_networks(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    variables = build_environment(out, "cpu")
    assert variables["VERL_PLATFORM"] == "cpu" and variables["HF_HUB_OFFLINE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in variables, "empty, it makes Ray refuse logical GPUs"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert build_environment(out, "cpu")["OMP_NUM_THREADS"] == "3"


def test_devices_and_clusters_are_those_that_were_given(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    on_gpus = build_environment(out, "cuda")
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "2,3" and not on_gpus.keys() & {"VERL_PLATFORM", "RAY_ADDRESS"}
    assert build_environment(out, "cpu")["RAY_ADDRESS"] == "local"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert build_environment(out, "cpu")["RAY_ADDRESS"] == "10.0.0.1:6379"


# ---- what went wrong -------------------------------------------------------------------------------------------------
RAY = """\
\x1b[36m(TaskRunnerV1 pid=812)\x1b[0m /x/verl/workers/engine/__init__.py:60: UserWarning: no megatron engine
\x1b[36m(TaskRunnerV1 pid=812)\x1b[0m   warnings.warn("ModuleNotFoundError(no megatron)")
Training Progress:   5%|5         | 2/40 [00:10<03:12]\r
Error executing job
Traceback (most recent call last):
  File "/x/training/verl_plugin/process.py", line 44, in main
    run_ppo(config, task_runner_class=TaskRunnerV1)
ray.exceptions.RayTaskError({kind}): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=812, ip=10.0.0.1)
  File "/x/verl/trainer/main_ppo.py", line 1, in run
{cause}
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            RAY.format(kind="ValueError", cause="ValueError: mini-batch of 0 rows\n(continued)"),
            "ValueError: mini-batch of 0 rows",
        ),
        (
            RAY.format(
                kind="SpearError",
                cause="spear_envs.core.errors.SpearError: /r has no spear.json: name another run folder\n"
                "AssertionError: noise of the shutdown",
            ),
            "/r has no spear.json: name another run folder",
        ),
        (
            RAY.format(kind="x", cause="spear_training.algorithms.schema.SettingsError: clip.low must be at least 0"),
            "clip.low must be at least 0",
        ),
        (
            "\x1b[36m(RolloutWorker pid=9, ip=10.0.0.2)\x1b[0m torch.OutOfMemoryError: CUDA out of memory.\n",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        (
            "KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
            "OSError: [Errno 28] No space left on device: '/r'\n",
            "OSError: [Errno 28] No space left on device: '/r'",
        ),
        ("Traceback\n  raise Exception(\nException: The node timed out.\n", "Exception: The node timed out."),
        ("(a note\nValueError: a batch is empty\nof two lines) here\n", "ValueError: a batch is empty"),
        ("[rank1]: ValueError: a batch is empty\n[rank1]: Exception\n", "ValueError: a batch is empty"),
        (
            "[rank0]: spear_envs.core.errors.SpearError: the data is gone\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
            "the data is gone",
        ),
        ('(T pid=8)   File "/x.py", line 1, in f\n(T pid=8)     next(i)\n(T pid=8) StopIteration\n', "StopIteration"),
        ('  File "/x.py", line 1, in f\n    raise Bad(9)\nrewards.Bad: 9 is bad\nbye\n', "rewards.Bad: 9 is bad"),
        ("", "the process was killed; the same command resumes"),
        ("ValueError: " + "x" * 1000, "ValueError: " + "x" * 288),
    ],
)
def test_the_error_is_found_in_the_log(tmp_path: Path, log: str, expected: str) -> None:
    path = tmp_path / LOG_FILE
    before = b"RuntimeError: of an earlier launch\n"
    path.write_bytes(before + log.encode() + b"\xff\xfe")
    assert find_error(path, len(before)) == expected


def test_a_full_disk_is_named(out: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("sys.exit(1)")
    usage = shutil.disk_usage(out)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    with pytest.raises(SpearError, match="full"):
        run(out)
