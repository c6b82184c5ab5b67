"""Runs a training as a process of its own, watches its metrics, and leaves nothing behind when it ends.

verl and Ray write thousands of lines; they go to ``train.log`` in the run folder while the user sees a progress bar.
The process and everything Ray starts for it carry a mark in their environment, by which what is left of them is found
and ended.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from spear_envs.core.errors import SpearError
from training.history import read_history

LOG_FILE = "train.log"
MARK = "SPEAR_RUN_MARK"
GRACE_SECONDS = 20.0
"""How long an interrupted training may take to shut Ray down by itself."""

Observer = Callable[[list[dict[str, Any]]], None]
"""Called a few times a second with the history of the run so far."""


def run_training(out: Path, observer: Observer, *, poll_seconds: float = 0.5) -> None:
    """Run the training that ``out/config.yaml`` describes until it ends.

    Raises:
        SpearError: the training failed; the message is its own error and where the log is.
        KeyboardInterrupt: after the training was stopped cleanly; the same command resumes it.
    """
    mark = uuid.uuid4().hex
    with (out / LOG_FILE).open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "training.process", str(out)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then ends the rest in order
        )
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            while process.poll() is None:
                observer(read_history(out))
                time.sleep(poll_seconds)
            observer(read_history(out))
        finally:
            signal.signal(signal.SIGTERM, previous)
            _stop(process)
            _end_all(mark)
    if process.returncode != 0:
        raise SpearError(f"the training stopped: {_find_error(out / LOG_FILE, start)} (log: {out / LOG_FILE})")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _find_marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                yield process
        except (psutil.Error, OSError):
            continue


def _end_all(mark: str) -> None:
    """End every process that carries the mark: Ray's daemons and workers outlive a killed driver."""
    left = list(_find_marked(mark))
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            try:
                end(process)
            except psutil.Error:
                continue
        left = psutil.wait_procs(left, timeout=5)[1]
        # What a dying daemon started meanwhile carries the mark too.
        left += [process for process in _find_marked(mark) if process not in left]
        if not left:
            return


def _find_error(log: Path, start: int) -> str:
    """The line of a failed run's log that says what went wrong: the last exception that is not Ray's wrapping of it."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", "replace")
    text = re.sub(r"\x1b\[[0-9;]*m|\r", "", text)
    errors = re.findall(
        r"^(?:\([^)]*\) )?((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt)\b[^\n]*)", text, re.MULTILINE
    )
    own = [line for line in errors if not line.startswith("ray.exceptions.RayTaskError")]
    for line in own:
        if "SpearError" in line or "SettingsError" in line:
            return line.partition(": ")[2]
    if own:
        return own[-1][:300]
    return "the process was killed" if not errors else errors[-1][:300]
