"""What every executor of model-written Python takes and gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Protocol


class Isolation(Enum):
    """What stands between the guest and the machine; the first two are strong, the others need a flag."""

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
    """It could not be carried out: our failure. Executors raise :class:`SandboxFault` instead of returning it."""


class KillReason(Enum):
    """Why a run was ended from outside of its program."""

    NONE = ""
    """It was not."""
    TIMEOUT = "timeout"
    """Wall time."""
    MEMORY = "memory_limit"
    """All processes of the run together held too much."""
    OUTPUT = "output_limit"
    """Too much was printed."""
    SIGKILL = "sigkill"
    """SIGKILL, which no limit sent: the program itself, or somebody outside. Which of them, Linux does not say."""


class FaultKind(Enum):
    """What kept a run from being carried out; never the policy's failure."""

    UNAVAILABLE = "sandbox_unavailable"
    """No sandbox: refused by the kernel, closed, died, or not reachable."""
    TIMEOUT = "sandbox_timeout"
    """No free slot came in time."""
    BAD_REPLY = "sandbox_bad_reply"
    """The sandbox answered something that is not an outcome."""
    MEMORY = "sandbox_memory"
    """The kernel killed the run because others had taken the memory that it still might have used."""
    SESSION_ENDED = "sandbox_session_ended"
    """A session is over: closed, idle for too long, killed at a limit, ended by its program, or of a server that was
    started anew."""


class SandboxFault(Exception):
    """A run was not carried out. The message is one line; ``kind`` says whose business it is."""

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
    """Files and folders."""
    kept_output: int = 1 << 20
    """Bytes kept of each of stdout and stderr."""
    max_output: int = 16 << 20
    """Bytes printed to either at which the run is killed."""

    def __post_init__(self) -> None:
        if not 0 < self.wall_s <= 86_400:
            raise ValueError(f"wall_s={self.wall_s!r}: give seconds above 0 and up to 86,400.")
        for name in (
            "memory_mb",
            "processes",
            "descriptors",
            "file_mb",
            "disk_mb",
            "files",
            "kept_output",
            "max_output",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give an integer of at least 1.")

    def cut(self, most: Limits) -> Limits:
        """These limits, where they do not exceed ``most``, and ``most`` where they do."""
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
    """CPU seconds of all its processes that were waited for; 0 where it was killed from outside."""
    peak_rss_kb: int
    """Largest resident size of its first process in KiB; 0 where it was killed from outside."""
    queue_s: float
    """Seconds it waited for a free slot."""
    stdout_bytes: int
    stderr_bytes: int
    """Bytes printed, kept or not."""
    truncated: bool
    """Whether more was printed than kept."""
    level: Isolation | None
    """None where the server does not say it, as SandboxFusion."""
    reason: KillReason = KillReason.NONE
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The files asked for that exist, are regular, lie below the working folder and hold at most 1 MiB."""


@dataclass(frozen=True)
class Health:
    """How an executor is now."""

    level: Isolation
    features: Mapping[str, bool]
    """What the level has: userns, pidns, netns, seccomp, landlock; cgroup, where the kernel counts the memory of a run
    rather than its supervisor; disk, where ``disk_mb`` and ``files`` hold; locks, where
    programs may lock files of their own and no others."""
    zygotes: int
    """Warm interpreters that live."""
    restarts: int
    """Warm interpreters started to replace dead ones."""
    ok: bool
    """Whether runs can be started."""


class CellStatus(Enum):
    """How a cell ended."""

    FINISHED = "Finished"
    """With or without an error; the session goes on."""
    TIME_LIMIT = "TimeLimitExceeded"
    """It was interrupted; the session goes on."""
    ENDED = "Ended"
    """The session has ended with it."""


@dataclass(frozen=True)
class CellError:
    """An exception that a cell did not catch."""

    name: str
    """Of its class."""
    message: str
    traceback: tuple[str, ...]
    """Lines, of the cells and what they called."""


@dataclass(frozen=True)
class CellOutcome:
    """What a cell did. All of it comes from the session's own process, which the program shares."""

    status: CellStatus
    stdout: str
    stderr: str
    display: tuple[Mapping[str, str], ...]
    """What was shown, the value of a last expression included, each by media type; pictures in base64."""
    error: CellError | None
    wall_s: float
    truncated: bool
    """Whether more was printed than kept."""
    reason: KillReason
    """Of the end of the session, where a limit was."""


class Session(Protocol):
    """An interpreter that keeps its variables and files from one cell to the next.

    Between cells all of its processes are stopped, background threads included.
    """

    id: str
    """128 random bits: whoever knows it may use the session."""

    async def run(self, code: str, *, timeout_s: float | None = None) -> CellOutcome:
        """Play a cell; others of the session wait for it.

        Args:
            code: Source. The value of a last expression is shown, ``await`` works, and figures of Matplotlib are shown.
            timeout_s: Seconds after which the cell is interrupted; None for the session's ``wall_s``, the
                most. A cell that is not over 3 s later takes the session with it.

        Raises:
            SandboxFault: The session is over, with kind ``SESSION_ENDED``, or the sandbox failed.
        """
        ...

    async def write_file(self, name: str, content: bytes) -> None:
        """Write a file of at most 8 MiB below the working folder.

        Raises:
            SandboxFault: As for :meth:`run`.
            ValueError: The name leaves the working folder, or the file cannot be written.
        """
        ...

    async def read_file(self, name: str) -> bytes:
        """The content of a file, of which 12 MiB at most; raises as :meth:`write_file`."""
        ...

    async def list_files(self) -> dict[str, int]:
        """Relative names and bytes of the files below the working folder, 4,096 at most; raises as :meth:`run`."""
        ...

    async def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell that runs, if one does; raises as :meth:`run`."""
        ...

    async def close(self) -> None:
        """End it and everything that it started."""
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
            stdin: What the program can read; None is the end of file at once.
            files: Relative name → content.
            fetch_files: Relative names of files to hand back; ``*.png`` stands for all of the folder that fit.
            limits: None for the executor's defaults. Larger ones than its defaults are cut to them.

        Raises:
            SandboxFault: The run was not carried out.
            ValueError: A file name is absolute, empty, or leaves the working folder.

        Cancelling kills the run and everything it started.
        """
        ...

    async def close(self) -> None:
        """End all runs and processes; later calls of ``run`` raise :class:`SandboxFault`."""
        ...
