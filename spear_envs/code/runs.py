"""Runs of the programs that a policy writes: where they run, their limits, and the feedback on them."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, Protocol, TypeAlias

from spear_envs.core.errors import EnvFault, SpearError, require_whole
from spear_sandbox.protocol import Executor, KillReason, Limits, Outcome, RunStatus, SandboxFault

OBSERVATION_CHARS = 16_384
"""Characters of feedback that a policy sees by default, at most."""

EMPTY_CODE = "Empty input argument. You should pass your code into the function arguments."
TOOL_FAILED = "Tool API failed! Please try again."
_NO_OUTPUT = "Empty stdout! You might forget to print the answer."
_ERRORS = "Errors occurred! Check your code."
REMINDERS = (EMPTY_CODE, TOOL_FAILED, _NO_OUTPUT, _ERRORS)
"""All messages that may replace output."""


class Feedback(str, Enum):
    """The form of the feedback on a run."""

    SPEAR = "spear"
    """As the authors' code: the output, or the last two lines of an error without the output."""
    PAPER = "paper"
    """As the paper: output and errors in full, and the matching reminder."""
    HELPFUL = "helpful"
    """Output and errors, also if a limit ended the run, and which limit."""


def render_feedback(outcome: Outcome, feedback: Feedback, time_limit: float) -> str:
    """Render the feedback on a run, of any length.

    Args:
        time_limit: seconds that the run was given, for ``helpful``.
    """
    if feedback is Feedback.HELPFUL:
        return _report_all(outcome, time_limit)
    if outcome.status is not RunStatus.FINISHED:
        return TOOL_FAILED
    if feedback is Feedback.PAPER:
        reminder = _ERRORS if outcome.stderr else "" if outcome.stdout else _NO_OUTPUT
        return _join(outcome.stdout, outcome.stderr, reminder.removesuffix("."))
    if outcome.stderr:
        lines = [line.strip() for line in outcome.stderr.split("\n") if line.strip()]
        return "\n".join([*lines[-2:], _ERRORS])
    # Output of blanks counts as output: the text is then empty.
    return outcome.stdout.strip() if outcome.stdout else _NO_OUTPUT


def _report_all(outcome: Outcome, time_limit: float) -> str:
    if outcome.status is RunStatus.ERROR:
        return TOOL_FAILED
    if outcome.status is RunStatus.TIME_LIMIT:
        return _join(outcome.stdout, outcome.stderr, f"Time limit of {time_limit:g} s exceeded.")
    ended = ""
    if outcome.return_code and not outcome.stderr.strip() and outcome.reason in (KillReason.NONE, KillReason.SIGKILL):
        code = outcome.return_code
        ended = f"Killed by signal {-code}." if code < 0 else f"Ended with exit code {code}."
    elif outcome.stderr.strip() and outcome.return_code:
        ended = _ERRORS
    elif not outcome.stdout.strip():
        ended = _NO_OUTPUT
    return _join(outcome.stdout, outcome.stderr, ended)


def _join(*parts: str) -> str:
    return "\n".join(filter(None, (part.strip() for part in parts)))


def truncate_middle(text: str, limit: int = OBSERVATION_CHARS) -> str:
    """Cut a text longer than ``limit`` in its middle, with a note of how many characters were cut."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return f"{text[:head]}\n... [{len(text) - limit:,} characters cut] ...\n{text[len(text) - tail :]}"


class Runner(Protocol):
    """Runs code and waits for it, such as :class:`spear_sandbox.blocking.BlockingExecutor`."""

    def run(self, code: str, *, limits: Limits | None = None) -> Outcome:
        """Run a program; raises :class:`spear_sandbox.protocol.SandboxFault`."""


SandboxChoice: TypeAlias = "str | Runner | Executor | None"
"""None for a private pool in this process, the address of a service, or an executor."""


def open_runner(sandbox: SandboxChoice) -> Runner:
    """Open what runs the code of an environment; nothing starts before the first run.

    Raises:
        SpearError: the value is not valid.
    """
    if sandbox is None or (isinstance(sandbox, str) and sandbox.startswith(("http://", "https://"))):
        from spear_sandbox.blocking import open_executor

        return open_executor(sandbox)
    run: Any = getattr(sandbox, "run", None)
    if isinstance(sandbox, str) or not callable(run):
        raise SpearError(
            f"sandbox={sandbox!r} is not valid: give the address of a sandbox service (http://…), an executor, or None"
            " for a sandbox in this process."
        )
    if inspect.iscoroutinefunction(run):
        from spear_sandbox.blocking import BlockingExecutor

        return BlockingExecutor(lambda: sandbox)  # type: ignore[arg-type, return-value]
    return sandbox  # type: ignore[return-value]


def open_limits(time_limit: float, memory_mb: int, sandbox: SandboxChoice) -> Limits:
    """Return limits of each run.

    Args:
        time_limit: seconds.
        memory_mb: MiB.

    Raises:
        SpearError: a value is not valid, or a sandbox with default limits would silently cut it.
    """
    require_whole("memory_mb", memory_mb, 1)
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not 0 < time_limit <= 3_600:
        raise SpearError(f"time_limit={time_limit!r} is not valid: give seconds above 0 and up to 3,600.")
    most = Limits()
    if sandbox is None and (time_limit > most.wall_s or memory_mb > most.memory_mb):
        raise SpearError(
            f"a sandbox in this process allows time_limit={most.wall_s:g} and memory_mb={most.memory_mb}: ask for less,"
            " or give the address of a service that allows more."
        )
    return Limits(wall_s=float(time_limit), memory_mb=memory_mb)


def run_program(runner: Runner, program: str, limits: Limits) -> Outcome:
    """Run a program that a policy wrote.

    Raises:
        EnvFault: the sandbox failed, not the program.
        SpearError: an address or a token that the user must fix.
    """
    try:
        outcome = runner.run(program, limits=limits)
    except SandboxFault as fault:
        raise EnvFault(fault.kind.value, str(fault)) from fault
    except ValueError as error:
        raise SpearError(f"sandbox: {error}") from error
    if outcome.status is RunStatus.ERROR:
        raise EnvFault("sandbox_unavailable", TOOL_FAILED)
    return outcome
