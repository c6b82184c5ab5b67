"""Feedback on a run: pure functions of its outcome."""

from __future__ import annotations

from enum import Enum

from spear_sandbox.protocol import KillReason, Outcome, RunStatus

OBSERVATION_CHARS = 16_384
"""Characters of feedback that a policy sees by default, at most."""

EMPTY_CODE = "Empty input argument. You should pass your code into the function arguments."
TOOL_FAILED = "Tool API failed! Please try again."
_NO_OUTPUT = "Empty stdout! You might forget to print the answer."
_ERRORS = "Errors occurred! Check your code."
REMINDERS = (EMPTY_CODE, TOOL_FAILED, _NO_OUTPUT, _ERRORS)
"""All messages that may replace output."""


class Feedback(str, Enum):
    """How a run is described."""

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
        return _tell_all(outcome, time_limit)
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
    """Cut a text longer than ``limit`` in its middle, with a note of how many characters were cut."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return f"{text[:head]}\n... [{len(text) - limit:,} characters cut] ...\n{text[len(text) - tail :]}"
