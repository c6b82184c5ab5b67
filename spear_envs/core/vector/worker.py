"""A group of environments in a process of its own, spoken to over a pipe."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # comes with gymnasium
import gymnasium as gym

from spear_envs.core.errors import SpearError
from spear_envs.core.vector.group import LocalGroup

__all__ = ["ProcessGroup", "serve"]

CLOSE_TIMEOUT_S = 5.0
"""How long a worker may take to close its environments before it is terminated."""


def serve(connection: Connection, pickled_make_env: bytes, indices: list[int]) -> None:
    """Main function of a worker: answer requests until the other end of the pipe is gone, however it went."""
    # Ctrl-C in a terminal reaches the whole process group; the parent decides what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    group: LocalGroup | None = None
    try:
        while True:
            request, payload = connection.recv()
            if request == "close":
                break
            try:
                if group is None:
                    group = LocalGroup(pickle.loads(pickled_make_env), indices)
                answer = (True, group.answer(request, payload))
            except Exception as error:
                answer = (False, _portable(error))
            connection.send_bytes(cloudpickle.dumps(answer))
    except (EOFError, ConnectionError):
        pass  # the parent has died or closed: nobody is left to answer to
    finally:
        if group is not None:
            group.close()
        connection.close()


def _portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else one that holds its traceback."""
    try:
        if str(pickle.loads(cloudpickle.dumps(error))) == str(error):
            return error
    except Exception:
        pass
    return SpearError("An environment in a worker failed:\n" + "".join(traceback.format_exception(error)))


class ProcessGroup:
    """The parent's end of a worker.

    Raises:
        SpearError: from any method, if the worker has died; the message names its environments.
    """

    def __init__(self, make_env: Callable[[], gym.Env[Any, Any]], indices: Sequence[int]) -> None:
        self.indices = list(indices)
        # spawn: a fork would copy threads' locks and hold the other workers' pipes open, so that none would see the end
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, cloudpickle.dumps(make_env), self.indices), daemon=True
        )
        self._process.start()
        theirs.close()
        self._closed = False
        self.dead = False
        """Whether the worker was found dead."""

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._process.pid

    def begin(self, request: str, payload: Any) -> None:
        """Send a request."""
        try:
            self._connection.send_bytes(cloudpickle.dumps((request, payload)))
        except OSError as error:  # BrokenPipeError, or closed on our side
            raise self._death() from error

    def finish(self) -> Any:
        """Wait for the answer."""
        try:
            succeeded, answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death() from error
        if not succeeded:
            raise answer
        return answer

    def close(self) -> None:
        """Ask the worker to close; terminate it if it does not."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._connection.send(("close", None))
        self._connection.close()
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _death(self) -> SpearError:
        if self._closed:
            return SpearError("This vector environment is closed: make a new one.")
        self.dead = True
        self._process.join(CLOSE_TIMEOUT_S)
        which = ", ".join(map(str, self.indices))
        return SpearError(
            f"The worker process of environments {which} died (exit code {self._process.exitcode}); if it was killed"
            " for memory, use fewer workers or environments. Make the vector environment anew."
        )
