"""Checkpoints of a run in an object store, through fsspec: a folder for each run.

``STORE/global_step_N/`` has the files of a checkpoint, whose manifest comes last: without it the checkpoint does not
count. The folder also has ``config.yaml``, the metrics, and the best step. A training reads and writes the run's own
folder; nothing here removes a local checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from spear_agents.evaluation.records import METRICS_FOLDER
from spear_envs.core.errors import SpearError, first_line
from spear_envs.core.machine import make_command
from spear_envs.data.files import draft_folder, explain_unwritable, put_folder, write_json, write_text
from spear_training.run.checkpoints import (
    BEST,
    BEST_LOCK,
    MANIFEST,
    STATE,
    TENSORS,
    check_files,
    is_better,
    is_step,
    keep_best,
    list_whole,
    parse_best,
    read_best,
    write_tracker,
)
from spear_training.run.compose import read_config

_log = logging.getLogger(__name__)
EXTRA = "pip install 'spear-training[store]'"
THROUGH_OBSTORE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
CONFIG, BEST_STEP = "config.yaml", "best.json"
PREFIX = "global_step_"
CHUNK = 2**24
OPTIONS: dict[str, Any] = {
    # A local service, named by AWS_ENDPOINT_URL, may lack a certificate.
    "client_options": {"connect_timeout": "5s", "timeout": "120s", "allow_http": True},
    "retry_config": {"max_retries": 3},
}
"""Options of obstore: an unreachable address fails within half a minute."""


class CheckpointStore:
    """The folder of one run in an object store: ``url`` of any file system of fsspec, such as ``s3://BUCKET/RUN``.

    Credentials come from the environment. Raises SpearError if the address is invalid, contains a password, or its file
    system is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, _, place = self.url.partition("://")
        name, at, _ = place.rpartition("@")
        if at and (":" in name or "/" not in name):  # a key may hold slashes
            raise SpearError("checkpoint.store must not hold credentials: leave them in the environment")
        if not scheme or not place.strip("/"):
            raise SpearError(f"checkpoint.store={url} is not an address such as s3://BUCKET/RUN")
        self._fs, self._root = _connect(self.url, scheme)

    # ---- content -----------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise SpearError unless a small file can be written, read and removed."""
        name, content = f".write-test-{uuid.uuid4().hex}", b"x"
        with self._explain("cannot be written"):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._at(name), content)
            if self._fs.cat_file(self._at(name)) != content:
                raise OSError("a file was read back with other content")
            self._fs.rm_file(self._at(name))

    def list_whole(self) -> list[int]:
        """Return steps with complete checkpoints, in ascending order."""
        return sorted(step for step, sizes in self._list_steps().items() if sizes.get(MANIFEST))

    def list_names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; none if it does not exist."""
        with self._explain(f"{folder} cannot be listed"), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            return sorted(PurePosixPath(path).name for path in self._fs.find(self._at(folder)))
        return []

    def read(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        with self._explain(f"{name} cannot be read"), suppress(FileNotFoundError):
            return self._fs.cat_file(self._at(name))
        return None

    # ---- up ----------------------------------------------------------------------------------------------------------
    def upload(self, folder: Path, step: int) -> bool:
        """Upload a finished checkpoint, its manifest last; return False if it is already here."""
        place, manifest = f"{PREFIX}{step}", (folder / MANIFEST).read_bytes()
        before = self.read(f"{place}/{MANIFEST}")
        if before == manifest:
            return False
        with self._explain(f"step {step} cannot be uploaded"):
            if before is not None:  # of an earlier run of this step: incomplete until all files are new
                self._fs.rm_file(self._at(place, MANIFEST))
            for name in _list_files(manifest, self.url):
                self._fs.makedirs(self._at(place, PurePosixPath(name).parent.as_posix()), exist_ok=True)
                self._fs.put_file(str(folder / name), self._at(place, name))
            self._fs.pipe_file(self._at(place, MANIFEST), manifest)
        return True

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self._explain(f"{name} cannot be written"):
            self._fs.makedirs(self._at(PurePosixPath(name).parent.as_posix()), exist_ok=True)
            self._fs.pipe_file(self._at(name), content)

    def prune(self, keep: int | None, spare: int | None) -> None:
        """Remove unfinished checkpoints, and all but the latest ``keep`` (None or 0: all) and step ``spare``'s."""
        steps = self._list_steps()
        whole = sorted(step for step, sizes in steps.items() if sizes.get(MANIFEST))
        kept = {*(whole[-keep:] if keep else whole), spare}
        with self._explain("old checkpoints cannot be removed"):
            for step, names in steps.items():
                if step in kept or not whole or step > whole[-1]:
                    continue
                for name in sorted(names, key=lambda name: name != MANIFEST):  # it counts no longer
                    self._fs.rm_file(self._at(f"{PREFIX}{step}", name))

    # ---- down --------------------------------------------------------------------------------------------------------
    def download(self, step: int, checkpoints: Path, verify: Callable[[Path], None] | None = None) -> Path:
        """Download a checkpoint into ``checkpoints``, atomically; files of an interrupted download are kept.

        ``verify`` may refuse a folder with our own small files, before the large ones are fetched. Raises SpearError if
        the checkpoint has changed since it was written, or does not fit on the disk.
        """
        place, draft = f"{PREFIX}{step}", checkpoints / f".{PREFIX}{step}.part"
        manifest = self.read(f"{place}/{MANIFEST}")
        if manifest is None:
            raise SpearError(f"{self.url} no longer has step {step}: run the command again")
        files = _list_files(manifest, self.url)
        try:
            draft.mkdir(parents=True, exist_ok=True)
            missing = sum(size for name, size in files.items() if not (draft / name).is_file())
            free = shutil.disk_usage(draft).free
            if missing > free:
                raise SpearError(f"step {step} of {self.url} takes {missing:,} bytes, and {draft} has {free:,} free")
            for name in sorted(files, key=lambda name: name not in (STATE, TENSORS)):
                if verify is not None and name not in (STATE, TENSORS):
                    verify(draft)
                    verify = None
                self._fetch(f"{place}/{name}", draft / name, files[name])
            (draft / MANIFEST).write_bytes(manifest)
            try:
                check_files(draft)
            except SpearError:
                shutil.rmtree(draft)
                raise
            target = checkpoints / place
            shutil.rmtree(target, ignore_errors=True)  # unfinished
            put_folder(draft, target)
        except OSError as error:
            raise explain_unwritable(draft, error) from error
        return target

    def _fetch(self, name: str, target: Path, size: int) -> None:
        """Download a file as a stream: shards are larger than memory. Raises SpearError beyond ``size`` bytes."""
        if target.is_file():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.tmp")
        with self._explain(f"{name} cannot be fetched"):
            source = self._fs.open(self._at(name), "rb")
        with source, part.open("wb") as file:
            while True:
                with self._explain(f"{name} cannot be fetched"):
                    chunk = source.read(CHUNK)
                if not chunk:
                    break
                file.write(chunk)
                if file.tell() > size:
                    raise SpearError(f"{self.url}: {name} has more than the {size:,} bytes of its manifest")
        part.replace(target)

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _at(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _list_steps(self) -> dict[int, dict[str, int]]:
        """Return the sizes of the files of each step by their names, complete or not: a full disk leaves empty ones."""
        with self._explain("cannot be listed"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        steps: dict[int, dict[str, int]] = {}
        for path, facts in found.items():
            place, _, name = str(path)[len(self._root) :].lstrip("/").partition("/")
            number = place.removeprefix(PREFIX)
            if place.startswith(PREFIX) and is_step(number) and name:
                steps.setdefault(int(number), {})[name] = 1 if facts.get("size") is None else int(facts["size"])
        return steps

    @contextmanager
    def _explain(self, what: str) -> Iterator[None]:
        """Convert errors of file systems, which lack a common class, to ours."""
        try:
            yield
        except SpearError:
            raise
        except Exception as error:
            raise SpearError(f"{self.url}: {what}: {first_line(error)} (AWS_ENDPOINT_URL and credentials)") from error


def _connect(url: str, scheme: str) -> tuple[Any, str]:
    """Open the file system and path of an address."""
    if find_spec("fsspec") is None or (scheme in THROUGH_OBSTORE and find_spec("obstore") is None):
        raise SpearError(f"checkpoint.store={url} needs fsspec and obstore: {EXTRA}")
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in THROUGH_OBSTORE:
        from obstore.fsspec import register

        register(scheme)
        options = OPTIONS
    try:
        fs, root = url_to_fs(url, **options)
    except Exception as error:  # file systems of fsspec lack a common class of errors, and some connect here
        raise SpearError(f"checkpoint.store={url} cannot be reached: {first_line(error)}") from error
    return fs, str(root).rstrip("/")


def _list_files(manifest: bytes, where: str) -> dict[str, int]:
    """Return the names and sizes of a checkpoint's files. The store is not trusted: names must not leave its folder."""
    try:
        files = {str(name): int(about["bytes"]) for name, about in json.loads(manifest)["files"].items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise SpearError(f"the manifest of {where} cannot be read: name another checkpoint.store") from error
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
            raise SpearError(f"the manifest of {where} names {name!r}: it is not one of ours")
    return files


# ---- a run and its store ---------------------------------------------------------------------------------------------
def publish(store: CheckpointStore, out: Path, step: int, keep: int | None) -> bool:
    """Upload a finished checkpoint, configuration and metrics of the run in ``out``; return False if it was there."""
    checkpoints = out / "checkpoints"
    # Read before the best step, which must not be older than the metrics.
    metrics = {path.name: path.read_bytes() for path in sorted((out / METRICS_FOLDER).glob("*.jsonl"))}
    for name, content in metrics.items():  # first: a machine that fetches the checkpoint has no others of its steps
        store.write(f"{METRICS_FOLDER}/{name}", content)
    sent = store.upload(checkpoints / f"{PREFIX}{step}", step)
    with BEST_LOCK:
        best = read_best(checkpoints)
        if best is not None:
            store.upload(checkpoints / BEST, best["step"])
            store.write(BEST_STEP, json.dumps(best).encode())
    store.write(CONFIG, (out / CONFIG).read_bytes())
    spared = best or parse_best(store.read(BEST_STEP) or b"")  # a run may have lost its own
    store.prune(keep, spared["step"] if spared is not None else None)
    return sent


def fetch_config(store: CheckpointStore, out: Path) -> None:
    """Fetch the configuration of the stored run if the folder lacks one, so that its choices are kept."""
    if (out / CONFIG).is_file():
        return
    content = store.read(CONFIG)
    if content is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / CONFIG, content.decode("utf-8", "replace"))
    except OSError as error:
        raise explain_unwritable(out, error) from error


def fetch_newer(store: CheckpointStore, out: Path, verify: Callable[[Path], None]) -> int | None:
    """Fetch the newest checkpoint of the store, with the best and the metrics, if the run folder's is older.

    ``verify`` refuses a checkpoint of another run, from its small files. Returns its step; None without a download.
    """
    checkpoints = out / "checkpoints"
    stored, own = store.list_whole(), list_whole(checkpoints)
    if not stored or (own and own[-1] >= stored[-1]):
        return None
    newest = stored[-1]
    best = parse_best(store.read(BEST_STEP) or b"")
    if best is not None and best["step"] in stored[:-1]:
        _fetch_best(store, checkpoints, best, verify)

    def accept(folder: Path) -> None:
        verify(folder)
        # Before the checkpoint is whole, after which nothing is fetched and the tracker names what is resumed.
        _fetch_metrics(store, out / METRICS_FOLDER)
        write_tracker(checkpoints, newest)

    folder = store.download(newest, checkpoints, accept)
    if best is not None and best["step"] == newest:
        keep_best(folder, best["metric"], best["value"])
    return newest


def _fetch_metrics(store: CheckpointStore, metrics: Path) -> None:
    """Fetch the metrics of all launches. Those of this machine alone end at an older checkpoint, and go."""
    names = [name for name in store.list_names(METRICS_FOLDER) if name.endswith(".jsonl")]
    contents = {name: content for name in names if (content := store.read(f"{METRICS_FOLDER}/{name}")) is not None}
    metrics.mkdir(parents=True, exist_ok=True)
    for path in metrics.glob("*.jsonl"):
        if contents and path.name > min(contents):  # a user may have deleted the first ones of the store
            path.unlink()
    for name, content in contents.items():
        (metrics / name).write_bytes(content)


def _fetch_best(
    store: CheckpointStore, checkpoints: Path, best: dict[str, Any], verify: Callable[[Path], None]
) -> None:
    """Fetch the best checkpoint before the newest, so that a launch killed between them repeats both."""
    if not is_better(checkpoints, best["metric"], best["value"]):
        return
    if best["step"] in list_whole(checkpoints):
        keep_best(checkpoints / f"{PREFIX}{best['step']}", best["metric"], best["value"])
        return
    folder = store.download(best["step"], checkpoints, verify)
    keep_best(folder, best["metric"], best["value"])
    shutil.rmtree(folder)


class Uploads:
    """Uploads checkpoints to a store, if there is one, during the training, one at a time; ``keep`` of them stay.

    Failures do not stop the training: the checkpoint is on the disk, the log says so, and the launcher tries again.
    """

    def __init__(self, store: CheckpointStore | None, out: Path, keep: int | None) -> None:
        self._store, self._out, self._keep = store, out, keep
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Start the upload of the checkpoint of ``step``, after the previous one."""
        self.wait()
        if self._store is not None:
            self._thread = threading.Thread(target=self._publish, args=(self._store, step), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for the upload, before old checkpoints are removed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _publish(self, store: CheckpointStore, step: int) -> None:
        try:
            publish(store, self._out, step, self._keep)
        except (SpearError, OSError) as error:
            _log.warning("step %d is saved in %s but not in the store: %s", step, self._out, error)


WEIGHTS = "*.safetensors"
_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Export:
    """An exported policy: its step, parameters, types of its weights, and the type that it is to compute in."""

    folder: Path
    step: int
    parameters: int
    dtypes: tuple[str, ...]
    dtype: str | None


def export_policy(run: Path, out: Path, *, step: int | None = None, best: bool = False) -> Export:
    """Write the policy of a checkpoint of ``run`` to the new folder ``out`` for transformers and vLLM, atomically.

    The checkpoint is the latest, that of ``step``, or the ``best`` on the validation panel. Raises SpearError if it is
    missing or torn, ``out`` exists or cannot be written, or verl cannot join the shards.
    """
    source, number = _find_checkpoint(run / "checkpoints", step, best)
    if out.exists():
        raise SpearError(f"{out} exists: choose another folder")
    check_files(source)  # joining shards loads pickles
    with draft_folder(out) as draft:
        whole = source / "actor" / "huggingface"
        if any(whole.glob(WEIGHTS)):
            shutil.copytree(whole, draft, dirs_exist_ok=True)
        else:
            _join_shards(source / "actor", draft)
        parameters, dtypes = _measure_weights(draft, source)
        dtype = _find_played_type(run) or (_TYPES.get(dtypes[0]) if len(dtypes) == 1 else None)
        if dtype is not None:
            name_dtype(draft, dtype)
    return Export(out, number, parameters, dtypes, dtype)


def name_dtype(folder: Path, dtype: str) -> None:
    """Have engines compute in ``dtype`` with the policy in ``folder``, if there is one: they trust its config.json,
    where verl always writes bfloat16.
    """
    path = folder / "config.json"
    if path.is_file():
        settings = json.loads(path.read_text("utf-8"))
        settings.pop("torch_dtype", None)
        write_json(path, {**settings, "dtype": dtype})


def _find_played_type(run: Path) -> str | None:
    """Return the type in which the run's rollouts computed; None if it is not known.

    Rewards were earned by the rounded policy. In the float32 of the optimiser it is another one, with changes that no
    rollout has seen: after 20 steps of one training it won 2 of 48 games so, and 9 as it had been rolled out.
    """
    try:
        found = read_config(run / CONFIG)["rollout"]["dtype"]
    except (SpearError, KeyError, TypeError):  # of another version
        return None
    return found if found in _TYPES.values() else None


def _find_checkpoint(checkpoints: Path, step: int | None, best: bool) -> tuple[Path, int]:
    if best:
        kept = read_best(checkpoints)
        if kept is None:
            raise SpearError(f"{checkpoints} does not contain a best checkpoint: leave --best out, or name a --step")
        return checkpoints / BEST, int(kept["step"])
    whole = list_whole(checkpoints)  # not by the tracker, which a training may be about to write
    number = step if step is not None else max(whole, default=None)
    if number is None:
        raise SpearError(f"{checkpoints} does not contain a complete checkpoint yet: name the folder of a training")
    if number not in whole:
        steps = ", ".join(map(str, whole))
        raise SpearError(f"{checkpoints} has no complete checkpoint of step {number}, only of {steps}")
    return checkpoints / f"global_step_{number}", number


def _join_shards(actor: Path, out: Path) -> None:
    """Let verl join the shards of all ranks, in a separate process: it takes the memory of the full model."""
    command = make_command("verl.model_merger", "merge", "--backend", "fsdp")
    command += ["--local_dir", str(actor), "--target_dir", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip() or "nothing").splitlines()[-1]
        raise SpearError(f"the shards in {actor} could not be joined: {said}")
    # verl writes the model's settings next to the shards, and joins only weights and tokenizer.
    for file in (actor / "huggingface").glob("*"):
        if file.is_file() and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def _measure_weights(folder: Path, source: Path) -> tuple[int, tuple[str, ...]]:
    """Return the parameters and types of weights, from the headers of the files.

    Raises SpearError, which names ``source``, if weights or ``config.json`` are missing or cannot be read.
    """
    files = sorted(folder.glob(WEIGHTS))
    if not files or not (folder / "config.json").is_file():
        raise SpearError(f"{source} lacks weights in safetensors or config.json: the checkpoint is not a policy")
    count, dtypes = 0, set()
    try:
        for file in files:
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - no mapping
                    part = weights.get_slice(name)
                    count += math.prod(part.get_shape())
                    dtypes.add(str(part.get_dtype()))
        if not isinstance(json.loads((folder / "config.json").read_text("utf-8")), dict):
            raise ValueError("config.json is not an object")
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SpearError(f"the policy in {source} cannot be read: {first_line(error)}") from error
    return count, tuple(sorted(dtypes))
