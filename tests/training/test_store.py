"""Checkpoints in an object store: over HTTP, killed in the middle, damaged, unreachable."""

import errno
import io
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("fsspec", reason="needs the extra 'store'")
pytest.importorskip("obstore", reason="needs the extra 'store'")
pytest.importorskip("torch", reason="needs the extra 'train'")

from rich.console import Console

from spear_envs.core.errors import SpearError
from spear_training.run import store as store_module
from spear_training.run.checkpoints import (
    BEST,
    MANIFEST,
    check_files,
    finish_checkpoint,
    keep_best,
    list_whole,
    read_best,
    repair_tracker,
)
from spear_training.run.store import CheckpointStore, Uploads, export_policy, fetch_config, fetch_newer, publish
from tests.training.object_store import BUCKET, serve_s3
from tests.training.silent_network import SilentNetwork
from tests.training.trainings import save_small_checkpoint


def trust(folder: Path) -> None:
    """Take any checkpoint."""
    assert (folder / "spear.json").is_file()
    assert not (folder / "data.pt").exists()  # nothing large has been fetched yet


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def start_run(out: Path, *steps: int, large: int = 12_000_000) -> Path:
    """A run with these checkpoints, as a training leaves it; one file of each has ``large`` bytes."""
    (out / "metrics").mkdir(parents=True, exist_ok=True)
    (out / "metrics" / "0001.jsonl").write_text('{"step": 1}\n')  # 0000 was deleted
    (out / "config.yaml").write_text("seed: 0\n")
    for step in steps:
        save_small_checkpoint(out, step)
        # An empty file, a name in a folder, and more than one part of a multipart upload.
        folder = out / "checkpoints" / f"global_step_{step}"
        (folder / "actor" / "huggingface").mkdir()
        (folder / "actor" / "huggingface" / "merges.txt").touch()
        (folder / "actor" / "large.bin").write_bytes(bytes([step]) * large)
        finish_checkpoint(folder)
    return out / "checkpoints"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a run in a folder, and in a bucket."""
    if request.param == "file":
        yield f"file://{tmp_path}/store/run"
        return
    with serve_s3(tmp_path / "server") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/runs/run"


def test_a_run_comes_back_on_an_empty_disk_with_its_best_and_its_metrics(url: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoints = start_run(first, 10, 20, 30)
    store = CheckpointStore(url)
    store.check()
    assert store.list_whole() == [] and fetch_newer(store, second, trust) is None
    for step in (10, 20, 30):
        assert publish(store, first, step, keep=2)
        keep_best(checkpoints / f"global_step_{step}", "success/all", 1.0 / step)
    assert not publish(store, first, 30, keep=2)  # it is there
    assert store.list_whole() == [10, 20, 30]  # the two latest, and the best

    fetch_config(store, second)
    assert (second / "config.yaml").read_text() == (first / "config.yaml").read_text()
    assert fetch_newer(store, second, trust) == 30
    assert fetch_newer(store, second, trust) is None
    assert repair_tracker(second / "checkpoints") == 30
    assert read_files(second / "checkpoints" / "global_step_30") == read_files(checkpoints / "global_step_30")
    assert read_best(second / "checkpoints") == {"step": 10, "metric": "success/all", "value": 0.1}
    assert read_files(second / "checkpoints" / "best") == read_files(checkpoints / "best")
    assert list_whole(second / "checkpoints") == [30]
    assert read_files(second / "metrics") == read_files(first / "metrics")

    third = start_run(tmp_path / "third", 10)  # which has the best one, and loses nothing by what is fetched
    assert fetch_newer(store, tmp_path / "third", trust) == 30
    assert list_whole(third) == [10, 30] and read_best(third) == read_best(checkpoints)

    # The run goes on there; the step that was the best gives way to a better one, and older ones go.
    start_run(second, 40)
    keep_best(second / "checkpoints" / "global_step_40", "success/all", 0.5)
    assert publish(store, second, 40, keep=2) and store.list_whole() == [30, 40]
    assert fetch_newer(store, first, trust) == 40  # and the first machine has fallen behind


UPLOAD = "import sys; from pathlib import Path; from spear_training.run.store import CheckpointStore, publish; "
UPLOAD += "publish(CheckpointStore(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), 1)"


@pytest.mark.slow
def test_a_kill_in_the_middle_of_an_upload_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    checkpoints = start_run(out, 1)
    start_run(out, 2, large=100_000_000)  # which takes so long that a busy machine comes in time
    with serve_s3(tmp_path / "server") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        store = CheckpointStore(f"s3://{BUCKET}/run")
        publish(store, out, 1, keep=1)
        place = tmp_path / "server" / BUCKET / "run" / "global_step_2"
        upload = subprocess.Popen([sys.executable, "-c", UPLOAD, store.url, str(out), "2"])
        try:
            end = time.monotonic() + 60
            while not any(path.is_file() for path in place.rglob("*")):
                assert upload.poll() is None and time.monotonic() < end
        finally:
            upload.kill()
            upload.wait()
        assert not (place / MANIFEST).exists() and any(place.rglob("*"))
        assert store.list_whole() == [1]
        elsewhere = tmp_path / "elsewhere"
        assert fetch_newer(store, elsewhere, trust) == 1
        check_files(elsewhere / "checkpoints" / "global_step_1")
        assert list_whole(checkpoints) == [1, 2]  # nothing is lost here
        assert publish(store, out, 2, keep=1) and store.list_whole() == [2]
        assert fetch_newer(store, elsewhere, trust) == 2


def test_what_is_stored_is_not_trusted(tmp_path: Path) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    start_run(out, 1)
    store = CheckpointStore(f"file://{tmp_path}/store")
    publish(store, out, 1, keep=None)
    place = tmp_path / "store" / "global_step_1"

    def refuse(folder: Path) -> None:
        raise SpearError(f"{folder} is another run")

    with pytest.raises(SpearError, match="another run"):
        fetch_newer(store, other, refuse)
    assert not any(other.rglob("*.bin"))

    manifest = (place / MANIFEST).read_bytes()
    (place / "data.pt").write_bytes(b"torn")
    with pytest.raises(SpearError, match=r"data\.pt is damaged"):
        fetch_newer(store, other, trust)
    (place / "data.pt").write_bytes(bytes(1_000_000))  # it might never end
    with pytest.raises(SpearError, match=r"data\.pt has more"):
        fetch_newer(store, other, trust)
    assert list_whole(other / "checkpoints") == []

    for content, message in (
        (b"{", "cannot be read"),
        (b'{"files": {"a": {"bytes": Infinity}}}', "cannot be read"),
        (json.dumps({"files": {"../../../evil": {"bytes": 1}}}).encode(), "names '../../../evil'"),
        (manifest.replace(b'"bytes": 12000000', b'"bytes": 1200000000000000000'), "free"),
    ):
        (place / MANIFEST).write_bytes(content)
        with pytest.raises(SpearError, match=message):
            fetch_newer(store, tmp_path / "third", trust)


def test_a_store_that_fails_costs_no_checkpoint_and_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    out = tmp_path / "run"
    checkpoints = start_run(out, 1)
    store = CheckpointStore("s3://nowhere/run")
    with pytest.raises(SpearError, match=r"s3://nowhere/run: cannot be .*AWS_ENDPOINT_URL") as caught:
        store.check()
    assert "\n" not in str(caught.value) and "the-secret" not in str(caught.value)
    uploads = Uploads(store, out, 1)
    uploads.begin(1)
    uploads.wait()
    assert "step 1 is saved" in caplog.text and "not in the store" in caplog.text
    assert list_whole(checkpoints) == [1]


@pytest.mark.slow
def test_a_network_that_falls_silent_stops_an_upload_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Packets are dropped, no connection is refused or reset: only a time limit ends the wait."""
    limits = {"timeout": "1s", "connect_timeout": "1s", "allow_http": True}
    monkeypatch.setattr(store_module, "OPTIONS", {**store_module.OPTIONS, "client_options": limits})
    out = tmp_path / "run"
    checkpoints = start_run(out, 1, 2)
    with serve_s3(tmp_path / "server") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        network = SilentNetwork(int(variables["AWS_ENDPOINT_URL"].rpartition(":")[2]))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")
        store = CheckpointStore(f"s3://{BUCKET}/run")
        uploads = Uploads(store, out, None)
        try:
            uploads.begin(1)
            uploads.wait()
            assert store.list_whole() == [1]
            network.fall_silent(after=2_000_000)  # in the middle of a file
            start = time.monotonic()
            uploads.begin(2)
            assert time.monotonic() - start < 0.9, "the training goes on at once"
            assert network.is_silent.wait(20)
            uploads.wait()
            assert time.monotonic() - start < 60
            assert network.silent_calls >= store_module.OPTIONS["retry_config"]["max_retries"]
            (line,) = [record.getMessage() for record in caplog.records if "not in the store" in record.getMessage()]
            assert "step 2 is saved" in line and "cannot be uploaded" in line and "\n" not in line
            assert list_whole(checkpoints) == [1, 2]  # nothing is lost here

            network.recover()
            assert store.list_whole() == [1]  # what came there in part does not count
            uploads.begin(2)
            uploads.wait()
            assert store.list_whole() == [1, 2]
        finally:
            network.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://key:word@bucket/run", "must not hold credentials"),
        ("s3://key:wo/rd@bucket/run", "must not hold credentials"),
        ("runs/store", "not an address"),
        ("github://owner", "cannot be reached"),
        ("ftp://127.0.0.1:9/run", "cannot be reached"),
        ("s3:///", "not an address"),
        ("nosuch://bucket/run", "cannot be reached: Protocol not known"),
    ],
)
def test_addresses_that_mean_nothing(address: str, message: str) -> None:
    with pytest.raises(SpearError, match=message) as caught:
        CheckpointStore(address)
    assert "word" not in str(caught.value)


# ---- launches --------------------------------------------------------------------------------------------------------
def test_a_launch_brings_up_what_is_missing_fetches_what_is_lost_and_refuses_another_run(
    tmp_path: Path, model_folder: Path
) -> None:
    pytest.importorskip("verl", reason="needs the extra 'train'")
    from spear_training.run.compose import compose
    from spear_training.run.launch import prepare_run, prepare_training

    out, store = tmp_path / "run", CheckpointStore(f"file://{tmp_path}/store")
    model, text = f"model.path={model_folder}", "env.kwargs.modality=text"

    def launch(*overrides: str) -> tuple[int | None, str]:
        console = Console(file=io.StringIO(), width=400)
        given = (model, text, f"checkpoint.store={store.url}", *overrides)
        step = prepare_run(prepare_training(compose(given), out), out, console)
        return step, console.file.getvalue()  # type: ignore[attr-defined]

    assert launch() == (None, "")
    save_small_checkpoint(out, 3)
    assert launch() == (3, f"uploaded the checkpoint of step 3 to {store.url}\n")
    assert launch() == (3, "") and store.list_whole() == [3]

    config = store.read("config.yaml") or b""
    for torn in (b"- a", b"a: b: c", b"\xff"):
        store.write("config.yaml", torn)
        with pytest.raises(SpearError, match=r"store/config\.yaml"):
            launch()
    store.write("config.yaml", config)

    shutil.rmtree(out)
    with pytest.raises(SpearError, match=r"another configuration: seed was 0, is now 5"):
        launch("seed=5")
    shutil.rmtree(out)
    # Nor may a run that is further on push out the checkpoints of another.
    (out / "config.yaml").parent.mkdir()
    save_small_checkpoint(out, 30)
    with pytest.raises(SpearError, match=r"/store is a run of another configuration: .* checkpoint\.store"):
        launch("seed=5")
    assert store.list_whole() == [3]
    shutil.rmtree(out)
    assert launch() == (3, f"fetched the checkpoint of step 3 from {store.url}\n")
    assert launch("train.steps=7") == (3, "")

    # Before a model is looked for, which might be a download.
    unwritable = "checkpoint.store=file:///proc/nowhere"
    with pytest.raises(SpearError, match="file:///proc/nowhere: cannot be written"):
        prepare_training(compose(("model.path=no/folder/here", text, unwritable)), out)


def go_on(out: Path, launch: str, steps: Sequence[int], last: int, value: float) -> None:
    """What a launch leaves: metrics of ``steps``, a checkpoint of the last one, and a best one."""
    before = read_files(out / "metrics")
    start_run(out, last, large=10)
    (out / "metrics" / "0001.jsonl").unlink()
    for name, content in before.items():
        (out / "metrics" / name).write_bytes(content)
    lines = [json.dumps({"step": step, "data": {"training/global_step": step}}) for step in steps]
    (out / "metrics" / launch).write_text("\n".join(lines) + "\n")
    keep_best(out / "checkpoints" / f"global_step_{last}", "success/all", value)


def test_a_machine_that_fell_behind_erases_neither_the_best_nor_the_metrics(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    store = CheckpointStore(f"file://{tmp_path}/store")
    go_on(first, "0000.jsonl", range(1, 21), 20, 0.4)
    publish(store, first, 20, keep=2)
    fetch_newer(store, second, trust)
    go_on(second, "0001.jsonl", range(21, 41), 40, 0.9)
    publish(store, second, 40, keep=2)

    (first / "metrics" / "0001.jsonl").write_text('{"step": 21, "data": {"training/global_step": 21}}\n')
    assert fetch_newer(store, first, trust) == 40
    assert read_best(first / "checkpoints") == {"step": 40, "metric": "success/all", "value": 0.9}
    assert read_files(first / "metrics") == read_files(second / "metrics")
    go_on(first, "0002.jsonl", range(41, 61), 60, 0.5)
    publish(store, first, 60, keep=1)
    assert store.list_whole() == [40, 60], "the best stays"
    third = tmp_path / "third"
    assert fetch_newer(store, third, trust) == 60
    assert read_files(third / "metrics") == read_files(first / "metrics")
    assert read_best(third / "checkpoints") == {"step": 40, "metric": "success/all", "value": 0.9}


def test_a_launch_that_stops_before_the_metrics_fetches_the_checkpoint_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    store = CheckpointStore(f"file://{tmp_path}/store")
    go_on(first, "0000.jsonl", range(1, 21), 20, 0.4)
    publish(store, first, 20, keep=2)
    whole = CheckpointStore.read

    def fail(self: CheckpointStore, name: str) -> bytes | None:
        if name.startswith("metrics/"):
            raise SpearError("the network is gone")
        return whole(self, name)

    with monkeypatch.context() as patch, pytest.raises(SpearError, match="gone"):
        patch.setattr(CheckpointStore, "read", fail)
        fetch_newer(store, second, trust)
    assert fetch_newer(store, second, trust) == 20
    assert read_files(second / "metrics") == read_files(first / "metrics")


def test_a_launch_that_is_killed_after_the_download_resumes_from_what_it_has(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    store = CheckpointStore(f"file://{tmp_path}/store")
    go_on(first, "0000.jsonl", range(1, 11), 10, 0.4)
    shutil.copytree(first, second)
    go_on(first, "0000.jsonl", range(1, 21), 20, 0.5)
    publish(store, first, 20, keep=2)
    with mock.patch.object(store_module, "keep_best", side_effect=Killed), pytest.raises(Killed):
        fetch_newer(store, second, trust)
    assert fetch_newer(store, second, trust) is None and repair_tracker(second / "checkpoints") == 20


def test_a_better_one_while_the_best_is_uploaded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    store = CheckpointStore(f"file://{tmp_path}/store")
    go_on(out, "0000.jsonl", range(1, 11), 10, 0.4)
    start_run(out, 20, large=10)
    put = store._fs.put_file
    threads: list[threading.Thread] = []

    def put_slowly(source: str, target: str) -> None:
        if f"/{BEST}/" in source and not threads:
            better = (out / "checkpoints" / "global_step_20", "success/all", 0.5)
            threads.append(threading.Thread(target=keep_best, args=better))
            threads[0].start()
            threads[0].join(0.5)
        put(source, target)

    with mock.patch.object(store._fs, "put_file", put_slowly):
        publish(store, out, 20, keep=2)
    threads[0].join()
    stored = tmp_path / "store" / "global_step_10" / "actor" / "large.bin"
    assert stored.read_bytes() == bytes([10]) * 10
    assert read_best(out / "checkpoints") == {"step": 20, "metric": "success/all", "value": 0.5}


def test_a_run_that_lost_its_best_leaves_that_of_the_store(tmp_path: Path) -> None:
    out = tmp_path / "run"
    store = CheckpointStore(f"file://{tmp_path}/store")
    go_on(out, "0000.jsonl", range(1, 11), 10, 0.4)
    publish(store, out, 10, keep=1)
    shutil.rmtree(out / "checkpoints" / BEST)
    start_run(out, 20, large=10)
    publish(store, out, 20, keep=1)
    assert store.list_whole() == [10, 20]


def store_one_of_two(out: Path, folder: Path) -> CheckpointStore:
    """A store with the first of a run's two checkpoints."""
    store = CheckpointStore(f"file://{folder}")
    go_on(out, "0000.jsonl", range(1, 11), 10, 0.4)
    publish(store, out, 10, keep=2)
    go_on(out, "0000.jsonl", range(1, 21), 20, 0.4)
    return store


class Killed(BaseException):
    """The end of a process."""


def test_a_checkpoint_in_the_store_has_the_metrics_of_its_steps(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    store = store_one_of_two(first, tmp_path / "store")
    pipe = store._fs.pipe_file

    def die_after(path: str, content: bytes) -> None:
        pipe(path, content)
        if path.endswith(f"global_step_20/{MANIFEST}"):
            raise Killed

    with mock.patch.object(store._fs, "pipe_file", die_after), pytest.raises(Killed):
        publish(store, first, 20, keep=2)
    assert fetch_newer(store, second, trust) == 20
    assert read_files(second / "metrics") == read_files(first / "metrics")


def test_a_disk_that_was_full_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    store = store_one_of_two(first, tmp_path / "store")
    pipe = store._fs.pipe_file

    def fill_up(path: str, content: bytes) -> None:
        if path.endswith(f"global_step_20/{MANIFEST}"):
            Path(path).touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        pipe(path, content)

    with mock.patch.object(store._fs, "pipe_file", fill_up), pytest.raises(SpearError, match="space"):
        publish(store, first, 20, keep=2)
    assert store.list_whole() == [10] and fetch_newer(store, second, trust) == 10
    assert publish(store, first, 20, keep=2) and store.list_whole() == [10, 20]


def test_an_export_leaves_the_tracker_to_the_training(tmp_path: Path) -> None:
    checkpoints = start_run(tmp_path, 50, 60, large=10)
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text("60")
    (checkpoints / "global_step_60" / MANIFEST).unlink()  # verl names a step before it is finished
    with pytest.raises(SpearError):
        export_policy(tmp_path, tmp_path / "policy")  # these files are no policy
    assert tracker.read_text() == "60"
