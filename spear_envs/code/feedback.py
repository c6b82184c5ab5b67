"""What a policy is told of a run: pure functions of its outcome."""

from __future__ import annotations

from enum import Enum

from spear_sandbox.protocol import KillReason, Outcome, RunStatus

OBSERVATION_CHARS = 16_384
"""Most characters of a tool's text that a policy is shown, unless told otherwise."""

EMPTY_CODE = "Empty input argument. You should pass your code into the function arguments."
TOOL_FAILED = "Tool API failed! Please try again."
_NO_OUTPUT = "Empty stdout! You might forget to print the answer."
_ERRORS = "Errors occurred! Check your code."
REMINDERS = (EMPTY_CODE, TOOL_FAILED, _NO_OUTPUT, _ERRORS)
"""All that a policy may be told instead of output."""


class Feedback(str, Enum):
    """How a run is told."""

    SPEAR = "spear"
    """As the authors' code does: the output, or of an error its last two lines without the output."""
    PAPER = "paper"
    """As the paper says: output and errors in full, and the reminder that applies."""
    HELPFUL = "helpful"
    """The output beside errors, also where a limit ended the run, and which limit that was."""


def render_feedback(outcome: Outcome, feedback: Feedback, time_limit: float) -> str:
    """The text that a run gives, of any length.

    Args:
        outcome: of the run.
        feedback: how it is told.
        time_limit: seconds that the run was given, as ``helpful`` says it.
    """
    if feedback is Feedback.HELPFUL:
        return _tell_all(outcome, time_limit)
    if outcome.status is not RunStatus.FINISHED:
        return TOOL_FAILED
    if feedback is Feedback.PAPER:
        reminder = _ERRORS if outcome.stderr else "" if outcome.stdout else _NO_OUTPUT
        return _join(outcome.stdout, outcome.stderr, reminder.removesuffix("."))
    if outcome.stderr:
        lines = [line.strip() for line in outcome.stderr.split("\n") if line.strip()]
        return "\n".join([*lines[-2:], _ERRORS])
    # Output that is nothing but blanks was something all the same: the text is then empty.
    return outcome.stdout.strip() if outcome.stdout else _NO_OUTPUT


def _tell_all(outcome: Outcome, time_limit: float) -> str:
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
    """The text, or where it is longer than ``limit`` its two ends of half as many characters around a note.

    The note says how many characters were cut.
    """
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return f"{text[:head]}\n... [{len(text) - limit:,} characters cut] ...\n{text[len(text) - tail :]}"
