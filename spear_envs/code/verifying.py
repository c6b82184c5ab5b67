"""math-verify in a separate process, where its time can be bounded from any thread."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from functools import lru_cache
from importlib.util import find_spec

from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.core.machine import make_command

ANSWER_SECONDS = 5.0
"""CPU time for one answer, so that a busy machine does not change a reward."""
WAIT_SECONDS = 60.0
"""For a start or an answer, whatever else the machine does."""


def require_math_verify() -> None:
    """Raise :class:`SpearError` unless math-verify is installed."""
    if find_spec("math_verify") is None:
        raise SpearError("grader='math_verify' needs a package: pip install 'spear-envs[sandbox]'.")


@lru_cache(maxsize=1)
def _open(pid: int) -> Verifier:
    return Verifier()


def open_verifier() -> Verifier:
    """Open the verifier of this process; a forked child has its own."""
    return _open(os.getpid())


class Verifier:
    """Answers one question at a time, from any thread.

    math-verify bounds its time by SIGALRM, which only works in a main thread; without a bound an answer such as
    ``9^{9^{9^{9}}}`` never ends. Here it runs in another process, which ends when its time is up.

    Args:
        seconds: CPU time for one answer; a slower one is wrong.
    """

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def verify(self, gold: str, answer: str) -> bool:
        """Return whether ``answer`` is mathematically equal to ``gold``.

        Raises:
            SpearError: math-verify is not installed.
            EnvFault: its process does not start.
        """
        question = json.dumps([gold, answer, self.seconds]).encode() + b"\n"
        with self._lock:
            process = self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(question)
                process.stdin.flush()
                reply = self._read(process, WAIT_SECONDS)
            except OSError:
                reply = b""
            except BaseException:  # an interrupt: the next question would get this one's answer
                self._stop()
                raise
            if reply not in (b"true", b"false"):  # it was too slow, or crashed
                self._stop()
            return reply == b"true"

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        require_math_verify()
        self._stop()
        here = os.getcwd()  # last, since it needs nothing of the user's
        path = [*(folder for folder in sys.path if folder not in ("", here)), here]
        # It ends with its stdin, so it does not outlive this process. Its stderr is useless.
        process = subprocess.Popen(
            make_command("spear_envs.code.verify_worker", path=path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process, self._buffer = process, b""
        try:
            ready = self._read(process, WAIT_SECONDS) == b"ready"
        except BaseException:
            self._stop()
            raise
        if not ready:
            self._stop()
            raise EnvFault("grader_unavailable", "the process of math-verify does not start")
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """Read the next line; empty if it does not come in time."""
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        waiting = select.poll()  # select.select refuses descriptors from 1,024 on
        waiting.register(process.stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.poll(1000 * left):
                return b""
            data = os.read(process.stdout.fileno(), 1 << 12)
            if not data:
                return b""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
