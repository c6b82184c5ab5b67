"""The interface of executors of model-written Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Protocol


class Isolation(Enum):
    """Isolation of the guest from the machine; the first two levels are strong, the others need a flag."""

    NAMESPACES = "namespaces"
    """Own user, pid, mount, net, ipc and uts namespaces, read-only root, seccomp; forked from a warm interpreter."""
    BWRAP = "bwrap"
    """The same through bubblewrap; an interpreter is started for each run."""
    LANDLOCK = "landlock"
    """Landlock and seccomp, without pid and net namespaces."""
    NONE = "none"
    """Resource limits only."""

    @property
    def weak(self) -> bool:
        """Whether the level must be asked for by name."""
        return self in (Isolation.LANDLOCK, Isolation.NONE)


class RunStatus(Enum):
    """How a run ended."""

    FINISHED = "Finished"
    """The program ended by itself, or was killed for memory or output."""
    TIME_LIMIT = "TimeLimitExceeded"
    """It was killed when its wall time was up; what it had printed is kept."""
    ERROR = "Error"
    """Our failure: it was not carried out. Executors raise :class:`SandboxFault` instead of returning it."""


class KillReason(Enum):
    """Why a run was ended from outside its program."""

    NONE = ""
    """It was not."""
    TIMEOUT = "timeout"
    """Wall time."""
    MEMORY = "memory_limit"
    """All processes of the run together held too much memory."""
    OUTPUT = "output_limit"
    """Too much was printed."""
    SIGKILL = "sigkill"
    """SIGKILL without a limit, from the program itself or from outside; Linux does not tell which."""


class FaultKind(Enum):
    """What kept a run from being carried out; never the policy's failure."""

    UNAVAILABLE = "sandbox_unavailable"
    """The sandbox was refused by the kernel, closed, died, or cannot be reached."""
    TIMEOUT = "sandbox_timeout"
    """No free slot came in time."""
    BAD_REPLY = "sandbox_bad_reply"
    """The sandbox's answer is not an outcome."""
    MEMORY = "sandbox_memory"
    """The kernel killed the run, or could not start it, because others had taken memory that it was still allowed."""
    SESSION_ENDED = "sandbox_session_ended"
    """A session is over: closed, idle for too long, killed at a limit, ended by its program, or its server was
    restarted."""


class SandboxFault(Exception):
    """A run was not carried out; ``kind`` says why. The message is one line."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    wall_s: float = 30.0
    """Seconds from the start of the run, not from its arrival."""
    memory_mb: int = 1024
    """MiB of address space for each process beyond the bare interpreter's; all together may hold 1.5 times as much."""
    processes: int = 32
    """Processes and threads at once."""
    descriptors: int = 256
    """Open files of one process."""
    file_mb: int = 64
    """MiB of one file."""
    disk_mb: int = 64
    """MiB of all files; they live in memory and end with the run."""
    files: int = 4096
    """Files and folders that a run may have at once."""
    kept_output: int = 1 << 20
    """Bytes kept of each of stdout and stderr."""
    max_output: int = 16 << 20
    """Bytes printed to either at which the run is killed."""

    def __post_init__(self) -> None:
        if not 0 < self.wall_s <= 86_400:
            raise ValueError(f"wall_s={self.wall_s!r}: give seconds above 0 and up to 86,400.")
        for part in fields(self)[1:]:
            value = getattr(self, part.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{part.name}={value!r}: give an integer of at least 1.")

    def cut(self, most: Limits) -> Limits:
        """Return the smaller of each of these limits and of ``most``."""
        return Limits(**{part.name: min(getattr(self, part.name), getattr(most, part.name)) for part in fields(self)})


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    status: RunStatus
    return_code: int | None
    """Exit code, negative for a signal, -9 after a kill for memory or output, None after the time limit."""
    stdout: str
    stderr: str
    """Undecodable bytes are U+FFFD, one each. After a kill for memory or output the last line says so."""
    wall_s: float
    """Seconds from the start of the run to its end."""
    cpu_s: float
    """CPU seconds of all its reaped processes; 0 if it was killed from outside."""
    peak_rss_kb: int
    """Peak resident size of its first process in KiB; 0 if it was killed from outside."""
    queue_s: float
    """Seconds it waited for a free slot."""
    stdout_bytes: int
    stderr_bytes: int
    """Bytes printed, kept or not."""
    truncated: bool
    """Whether more was printed than kept."""
    level: Isolation | None
    """None if the server, such as SandboxFusion, does not report it."""
    reason: KillReason = KillReason.NONE
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Requested files that exist, are regular, lie below the working folder and have at most 16 MiB."""


@dataclass(frozen=True)
class Health:
    """State of an executor."""

    level: Isolation
    features: Mapping[str, bool]
    """What the level has: userns, pidns, netns, seccomp, landlock; cgroup, if the kernel counts the memory of a run and
    not the supervisor; disk, if ``disk_mb`` and ``files`` hold; locks, if programs may lock their own files only."""
    zygotes: int
    """Live warm interpreters."""
    restarts: int
    """Warm interpreters started to replace dead ones."""
    ok: bool
    """Whether runs can be started."""


class CellStatus(Enum):
    """How a cell ended."""

    FINISHED = "Finished"
    """With or without an error; the session continues."""
    TIME_LIMIT = "TimeLimitExceeded"
    """It was interrupted; the session continues."""
    ENDED = "Ended"
    """The session has ended with it."""


@dataclass(frozen=True)
class CellError:
    """An exception that a cell did not catch."""

    name: str
    """Name of its class."""
    message: str
    traceback: tuple[str, ...]
    """Lines, from the cells and what they called."""


@dataclass(frozen=True)
class CellOutcome:
    """What a cell did, as told by the session's process, which it shares with the program."""

    status: CellStatus
    stdout: str
    stderr: str
    display: tuple[Mapping[str, str], ...]
    """What was shown, including the value of a last expression, each by media type; pictures in base64."""
    error: CellError | None
    wall_s: float
    truncated: bool
    """Whether more was printed than kept."""
    reason: KillReason
    """The limit that ended the session, if one did."""


class Session(Protocol):
    """An interpreter that keeps its variables and files from one cell to the next.

    Between cells all of its processes are stopped, background threads included.
    """

    id: str
    """128 random bits: whoever knows it may use the session."""

    async def run(self, code: str, *, timeout_s: float | None = None) -> CellOutcome:
        """Run a cell; others of the session wait for it.

        Args:
            code: Source. The value of a last expression is shown, ``await`` works, and figures of Matplotlib are shown.
            timeout_s: Seconds after which the cell is interrupted; None for the session's ``wall_s``, the maximum. A
                cell that is not over 3 s later ends the session.

        Raises:
            SandboxFault: The session is over, with kind ``SESSION_ENDED``, or the sandbox failed.
        """
        ...

    async def write_file(self, name: str, content: bytes) -> None:
        """Write a file of at most 8 MiB below the working folder. Raises ValueError, or as :meth:`run`."""
        ...

    async def read_file(self, name: str) -> bytes:
        """Read a file, 12 MiB at most; raises as :meth:`write_file`."""
        ...

    async def list_files(self) -> dict[str, int]:
        """List the files below the working folder, 4,096 at most, with their sizes in bytes; raises as :meth:`run`."""
        ...

    async def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the running cell, if any; raises as :meth:`run`."""
        ...

    async def close(self) -> None:
        """End the session and everything that it started."""
        ...


class Executor(Protocol):
    """Runs Python programs, many at once; each in a fresh process that shares nothing with any other."""

    async def run(
        self,
        code: str,
        *,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Outcome:
        """Run ``code`` as ``main.py`` in a working folder that holds ``files``.

        Args:
            code: Source; need not be valid.
            stdin: What the program can read; None for immediate end of file.
            files: Relative name → content.
            fetch_files: Relative names of files to return; ``*.png`` matches files of the folder.
            limits: None for the executor's defaults, to which larger ones are cut.

        Raises:
            SandboxFault: The run was not carried out.
            ValueError: A file name is absolute, empty, or leaves the working folder.

        Cancelling kills the run and everything it started.
        """
        ...

    async def close(self) -> None:
        """End all runs and processes; later calls of ``run`` raise :class:`SandboxFault`."""
        ...
