"""Runs a training in a separate process, watches its metrics, and cleans up when it ends.

The process and everything Ray starts for it carry a mark in their environment, by which leftovers are found and ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from spear_agents.engines.vllm_options import find_semaphores, find_shared_memory
from spear_agents.evaluation.records import METRICS_FOLDER, measure_metrics, read_history
from spear_envs.core.errors import SpearError
from spear_envs.core.machine import make_command
from spear_envs.data.files import explain_unwritable, hold_lock
from spear_training.run.computing import read_threads

PREFIXES = (
    "SPEAR_",
    "HF_",
    "HUGGING_FACE_",
    "WANDB_",
    "NCCL_",
    "GLOO_",
    "VERL_",
    "VLLM_",
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "FSSPEC_",
)
NAMES = ("TENSORBOARD_DIR", "HYDRA_FULL_ERROR", "OMP_NUM_THREADS", "RAY_AUTH_MODE", "TOKENIZERS_PARALLELISM")
MARK = "SPEAR_RUN_MARK"
"""Variables of a training's processes on this machine only."""
CODE_FOLDER = "SPEAR_CODE_FOLDER"
"""Folder whose modules settings may name, where the training was started."""
SECRETS_FILE = ".secrets.json"
SECRETS_VARIABLE = "SPEAR_SECRETS_FILE"
_SECRET = re.compile(r"^FSSPEC_|(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|CONNECTION_STRING)(_|$)")
_ADDRESS = re.compile(r"://[^/\s]*@|[?&](sig|signature|token|key|x-amz-signature)=", re.IGNORECASE)


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable must not be logged: by its name, or as an address with a password or a signature."""
    return bool(_SECRET.search(name) or _ADDRESS.search(value))


def divide_variables(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split the variables for every node into plain and secret ones."""
    passed = {
        name: value
        for name, value in environment.items()
        if (name.startswith(PREFIXES) or name in NAMES) and name not in (MARK, SECRETS_VARIABLE)
    }
    secret = {name: value for name, value in passed.items() if is_secret(name, value)}
    return {name: value for name, value in passed.items() if name not in secret}, secret


def write_secrets(out: Path, secrets: Mapping[str, str]) -> Path:
    """Write ``secrets`` to a file of the run folder readable only by its owner; return the file."""
    path = out / SECRETS_FILE
    path.unlink(missing_ok=True)  # that of a killed run may have another owner or mode
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(dict(secrets), file)
    return path


def add_code_folder() -> None:
    """Let this process import from the training's folder what it finds nowhere else."""
    folder = os.environ.get(CODE_FOLDER)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def read_secrets() -> None:
    """Add the secrets of this training to the environment, without replacing variables.

    Raises SpearError if the file cannot be read on this node.
    """
    name = os.environ.get(SECRETS_VARIABLE)
    if name is None:
        return
    try:
        content: dict[str, str] = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpearError(f"{name} cannot be read on this node: every node must see the folder of --out") from error
    for key, value in content.items():
        os.environ.setdefault(key, value)


LOG_FILE = "train.log"
LOCK_FILE = ".lock"
PR_SET_PDEATHSIG = 1
WRAPPERS = ("ray.exceptions.RayTaskError", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
"""Exceptions that only report the failure of another process."""
DISK_FULL = 2**20
"""Free bytes below which a failure is attributed to the disk."""
NEEDED = re.compile("SimpleStorageUnit|TransferQueueController|raylet|gcs_server")
"""Processes that are not replaced, and whose death nobody reports to those that wait for them."""


@dataclass(frozen=True)
class Patience:
    """Time limits of the supervision of a training, in seconds."""

    look: float = 5.0
    """Pause between two looks at the processes of the training."""
    lost: float = 20.0
    """Time that a process may be gone or stopped before the training is ended: at its end all go within seconds."""
    grace: float = 20.0
    """Time of an interrupted training to shut Ray down by itself."""
    end: float = 5.0
    """Time of a process to end after each signal."""


PATIENCE = Patience()
"""Time limits of a training that a user waits for."""

Observer = Callable[[list[dict[str, Any]]], None]
"""Called a few times a second with the history of the run so far."""


def build_environment(out: Path, device: str, threads: int = 1) -> dict[str, str]:
    """Return the environment of a training's process: this one's, with variables for verl and its plugin.

    ``threads`` are those of a rank on a CPU, unless ``OMP_NUM_THREADS`` says how many.
    """
    metrics = out / METRICS_FOLDER
    metrics.mkdir(parents=True, exist_ok=True)
    variables = {
        **os.environ,
        CODE_FOLDER: os.getcwd(),  # settings may name functions in the current folder
        "VERL_USE_EXTERNAL_MODULES": "spear_training.verl_plugin",
        # verl's file logger truncates: one file per launch keeps earlier ones.
        "VERL_FILE_LOGGER_PATH": str(metrics / f"{_find_next(metrics):04d}.jsonl"),
        "TENSORBOARD_DIR": str(out / "tensorboard"),
        "WANDB_DIR": str(out),
        "TRANSFER_QUEUE_ENABLE": "1",  # verl reads it when it is imported
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "SPT_NOENV": "1",  # vLLM's processes set their title, which would overwrite the mark
    }
    # Each process of the training has variables of its own, so none that Ray starts beforehand is ever used.
    variables.setdefault("RAY_prestart_worker_first_driver", "0")
    variables.setdefault("WANDB_MODE", "offline")  # else it asks for a login; `wandb sync` uploads the run later
    if device == "cpu":
        variables |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}
        variables["OMP_NUM_THREADS"] = str(read_threads() or threads)
        # Else Ray joins any cluster already running on this machine.
        variables.setdefault("RAY_ADDRESS", "local")
        variables.pop("CUDA_VISIBLE_DEVICES", None)  # an empty value makes Ray refuse the logical GPUs of the plugin
    return variables


def _find_next(metrics: Path) -> int:
    """Return the number of a launch, after the highest there is: files may have been deleted."""
    return max((int(path.stem) + 1 for path in metrics.glob("*.jsonl") if path.stem.isdecimal()), default=0)


@contextmanager
def hold_run(out: Path) -> Iterator[None]:
    """Make and lock a run folder from the first look at it to the end; remove one that stays empty.

    Raises SpearError if it cannot be written, or another process trains in it, which then finds it unchanged.
    """
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_unwritable(out, error) from error
    try:
        with lock_run(out):
            yield
    finally:
        if is_new and out.is_dir() and {path.name for path in out.iterdir()} <= {LOCK_FILE}:
            shutil.rmtree(out, ignore_errors=True)


def lock_run(out: Path) -> AbstractContextManager[None]:
    """Lock a run folder. Raises SpearError if another process trains in it."""

    def refuse() -> NoReturn:
        raise SpearError(f"another process trains in {out}: wait for it, or name another --out")

    return hold_lock(out / LOCK_FILE, refuse)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent is killed; other systems ignore it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def supervise_training(
    out: Path,
    device: str,
    observer: Observer,
    *,
    module: str = "spear_training.verl_plugin.process",
    threads: int = 1,
    poll_seconds: float = 0.5,
    patience: Patience = PATIENCE,
    locked: bool = False,
) -> None:
    """Run the training that ``out/config.yaml`` describes until it ends.

    Args:
        out: the run folder.
        device: ``cpu`` or ``cuda``.
        observer: called with the growing history.
        module: the training's process, called with the run folder.
        threads: of a rank on a CPU.
        poll_seconds: between two calls of the observer.
        patience: with processes that are lost or do not end.
        locked: the caller holds the folder's lock.

    Raises:
        SpearError: the training failed; with its own error and the place of the log.
        KeyboardInterrupt: it was stopped cleanly, and the same command resumes it.
    """
    mark = uuid.uuid4().hex
    out = out.resolve()
    with nullcontext() if locked else lock_run(out), (out / LOG_FILE).open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            make_command(module, str(out)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=build_environment(out, device, threads) | {MARK: mark},
            start_new_session=True,  # Ctrl-C only reaches the supervisor, which then ends the rest in order
        )
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            size, history = measure_metrics(out), read_history(out)
            watch = _Watch(mark, patience)
            while process.poll() is None:
                if (lost := watch.find_lost()) is not None:
                    process.kill()  # it waits for what is lost, or is itself
                    raise SpearError(f"the training stopped: {lost}; the same command resumes (log: {out / LOG_FILE})")
                if measure_metrics(out) != size:  # parsing the metrics at every poll would grow with the run
                    size, history = measure_metrics(out), read_history(out)
                observer(history)
                time.sleep(poll_seconds)
            observer(read_history(out))
        finally:
            # A second Ctrl-C must not leave Ray running.
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _stop(process, patience.grace)
            end_marked(mark, patience.end)
            (out / SECRETS_FILE).unlink(missing_ok=True)
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, previous)
    if process.returncode != 0:
        raise SpearError(_explain_failure(out, start))


class _Watch:
    """Looks now and then whether processes of a training are gone that nobody else misses, or stopped."""

    def __init__(self, mark: str, patience: Patience) -> None:
        self._mark, self._patience = mark, patience
        self._needed: dict[psutil.Process, str] = {}
        self._since: dict[psutil.Process, float] = {}
        """When a process was first seen gone or stopped."""
        self._next = 0.0

    def find_lost(self) -> str | None:
        """Return what has been lost for too long, in words; None if nothing has."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + self._patience.look
        alive = {process: _describe(process) for process in _find_marked(self._mark)}
        self._needed |= {process: name for process, (name, _) in alive.items() if NEEDED.search(name)}
        lost = {process: f"{name} ended" for process, name in self._needed.items() if process not in alive}
        lost |= {
            process: f"{name} is stopped"
            for process, (name, status) in alive.items()
            if status == psutil.STATUS_STOPPED
        }
        self._since = {process: self._since.get(process, now) for process in lost}
        late = [process for process, since in self._since.items() if now - since > self._patience.lost]
        return f"its process {lost[late[0]]}" if late else None


def _describe(process: psutil.Process) -> tuple[str, str]:
    """Return name and status of a process; Ray's show theirs in the command line."""
    with suppress(psutil.Error, OSError):
        words = process.cmdline()
        # Never the arguments: each new worker of Ray has --raylet-name in them, and idle ones come and go.
        return (words[0] if words and words[0].startswith("ray::") else process.name()), process.status()
    return "", ""


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _stop(process: subprocess.Popen[bytes], grace: float) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _find_marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                yield process


def end_marked(mark: str, seconds: float = PATIENCE.end) -> None:
    """End every process with ``mark`` in its environment, and remove the shared memory of killed ones.

    Ray's daemons and workers outlive a killed driver. ``seconds`` is the time for each signal to take effect.
    """
    left = list(_find_marked(mark))
    numbers = [process.pid for process in left]
    shared = find_shared_memory(numbers)
    try:
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in left:
                with suppress(psutil.Error):
                    end(process)
            left = psutil.wait_procs(left, timeout=seconds)[1]
            # A dying daemon may have started more.
            left += [process for process in _find_marked(mark) if process not in left]
    finally:
        for file in (*shared, *find_semaphores(numbers)):
            file.unlink(missing_ok=True)


def _explain_failure(out: Path, start: int) -> str:
    if shutil.disk_usage(out).free < DISK_FULL:  # the log could not be written either
        return f"the training stopped because the disk of {out} is full: free it, and the same command resumes"
    return f"the training stopped: {find_error(out / LOG_FILE, start)} (log: {out / LOG_FILE})"


def find_error(log: Path, start: int) -> str:
    """Find the cause in the log of a failed run, from byte ``start`` on: the last exception that wraps no other."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", "replace")
    text = re.sub(r"\x1b\[[0-9;]*m|\r", "", text)
    text = re.sub(r"^(?:\([^)\n]*\) |\[rank\d+\]: )", "", text, flags=re.MULTILINE)
    errors = re.findall(
        # An exception of any name stands below the code that raised it.
        r"^(?: {4}[^\n]*\n(?=(?:\w+\.)*[A-Z]\w*(?:: [^\n]*)?$)([^ \n][^\n]*)"
        r"|((?:[\w.]+\.)?(?:[A-Z]\w*(?:Error|Exception|Interrupt)\b|Exception:)[^\n]*))",
        text,
        re.MULTILINE,
    )
    errors = ["".join(found) for found in errors]
    own = [line for line in errors if not line.startswith(WRAPPERS)]
    for line in own:
        if "SpearError" in line or "SettingsError" in line:
            return line.partition(": ")[2]
    return (own or errors or ["the process was killed; the same command resumes"])[-1][:300]
