from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.feedback import Feedback, render_feedback, truncate_middle
from spear_sandbox.protocol import KillReason, Outcome, RunStatus
from tests.spear_envs.code.conftest import make_outcome

EMPTY = "Empty stdout! You might forget to print the answer."
ERRORS = "Errors occurred! Check your code."
FAILED = "Tool API failed! Please try again."
TRACE = 'Traceback (most recent call last):\n  File "/tmp/main.py", line 1\n\n  1 / 0\n ZeroDivisionError: no \n\n'


def late(stdout: str = "", stderr: str = "") -> Outcome:
    return make_outcome(stdout, stderr, status=RunStatus.TIME_LIMIT, return_code=None, reason=KillReason.TIMEOUT)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (make_outcome(" 42 \n"), "42"),
        (make_outcome(), EMPTY),
        (make_outcome(" \n"), ""),
        (make_outcome("42\n", TRACE), f"1 / 0\nZeroDivisionError: no\n{ERRORS}"),
        (make_outcome("42\n", "one: Warning\n", return_code=0), f"one: Warning\n{ERRORS}"),
        (make_outcome("42\n", "\n"), ERRORS),
        (make_outcome("", "x", return_code=-9), f"x\n{ERRORS}"),
        (make_outcome("42\n", return_code=3), "42"),
        (make_outcome("", return_code=-11), EMPTY),
        (late("42\n"), FAILED),
        (make_outcome(status=RunStatus.ERROR, return_code=None), FAILED),
    ],
)
def test_as_the_authors_tell_it(outcome: Outcome, text: str) -> None:
    assert render_feedback(outcome, Feedback.SPEAR, 30) == text


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (make_outcome(" 42 \n"), "42"),
        (make_outcome(), EMPTY[:-1]),
        (make_outcome("42\n", TRACE), f"42\n{TRACE.strip()}\n{ERRORS[:-1]}"),
        (make_outcome("", "w", return_code=0), f"w\n{ERRORS[:-1]}"),
        (late("42\n"), FAILED),
    ],
)
def test_as_the_paper_tells_it(outcome: Outcome, text: str) -> None:
    assert render_feedback(outcome, Feedback.PAPER, 30) == text


KILLED = "[sandbox] killed: memory limit of 1024 MB for all processes together"


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (make_outcome(" 42 \n"), "42"),
        (make_outcome(), EMPTY),
        (make_outcome(" \n"), EMPTY),
        (make_outcome("42\n", TRACE), f"42\n{TRACE.strip()}\n{ERRORS}"),
        (make_outcome("42\n", "w\n", return_code=0), "42\nw"),
        (make_outcome("", "w\n", return_code=0), f"w\n{EMPTY}"),
        (make_outcome("4\n", KILLED, return_code=-9, reason=KillReason.MEMORY), f"4\n{KILLED}\n{ERRORS}"),
        (make_outcome("4\n", return_code=-11), "4\nKilled by signal 11."),
        (make_outcome(return_code=3), "Ended with exit code 3."),
        (late("42\n"), "42\nTime limit of 30 s exceeded."),
        (late(), "Time limit of 30 s exceeded."),
        (make_outcome(status=RunStatus.ERROR, return_code=None), FAILED),
    ],
)
def test_the_helpful_way(outcome: Outcome, text: str) -> None:
    assert render_feedback(outcome, Feedback.HELPFUL, 30.0) == text


def test_the_limit_is_said_as_it_is() -> None:
    assert render_feedback(late(), Feedback.HELPFUL, 2.5) == "Time limit of 2.5 s exceeded."


def test_the_middle_is_cut_out() -> None:
    text = "a" * 9_000 + "b" * 9_000
    cut = truncate_middle(text)
    assert cut == "a" * 8_192 + "\n... [1,616 characters cut] ...\n" + "b" * 8_192
    assert truncate_middle("x" * 16_384) == "x" * 16_384


@given(st.text(), st.integers(16, 60))
def test_what_is_cut_and_what_is_left_are_all(text: str, limit: int) -> None:
    cut = truncate_middle(text, limit)
    if len(text) <= limit:
        assert cut == text
        return
    head, tail = limit - limit // 2, limit // 2
    note = f"\n... [{len(text) - limit:,} characters cut] ...\n"
    assert cut == text[:head] + note + text[-tail:]
