"""Grading final answers: strictly like the authors, as integers, or by math-verify."""

from __future__ import annotations

import re
from enum import Enum

from spear_envs.code.grammar import find_last_box, read_last_box, remove_thoughts

STRICT_TAIL = 100
"""Characters at the end of a response in which the strict grader looks for the box."""

_MAX_ANSWER = 1_000
"""Longest answer that is graded, in characters."""
_UNWRAP = re.compile(r"\\text\s*\{([^{}]*)\}")
_BLANKS = re.compile(r"\\[,;:! ]|[\s$~\u2009\u00a0]")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+")
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")
_NAME = re.compile(r"[A-Za-z]=")


class Grader(str, Enum):
    """Which answers are right."""

    STRICT = "strict"
    """The box in the last 100 characters is the answer, character by character: the authors' grading."""
    INTEGER = "integer"
    """The last box is the integer, however it is written."""
    MATH_VERIFY = "math_verify"
    """The last box is mathematically equal to the answer, according to math-verify."""


def find_answer(response: str, grader: Grader) -> str | None:
    r"""Find the content of the box that a grader reads; None if there is none.

    The strict grader reads the last ``\\boxed{`` of the last 100 characters, thoughts or not. The others take the last
    closed box outside thoughts.
    """
    if grader is Grader.STRICT:
        return read_last_box(response[-STRICT_TAIL:])
    return find_last_box(remove_thoughts(response)[0])


def is_right(answer: str | None, gold: str, grader: Grader) -> bool:
    """Whether an answer is right.

    Raises:
        SpearError: ``math_verify`` is asked for and not installed.
        EnvFault: its process cannot be started.
    """
    if answer is None:
        return False
    if grader is Grader.STRICT:
        return answer == gold
    if len(answer) > _MAX_ANSWER:
        return False
    if grader is Grader.INTEGER:
        found = read_integer(answer)
        return found is not None and found == read_integer(gold)
    from spear_envs.code.verifying import open_verifier

    return open_verifier().verify(gold, answer)


def read_integer(text: str) -> str | None:
    r"""Read a text as an integer in its shortest form; None if it is not one.

    Dollars, blanks, ``\\,`` and the like, ``\\text{}``, commas between thousands (``,`` or ``{,}``), one leading
    ``x=``, a full stop at the end, a plus and leading zeros are removed.
    """
    plain = _BLANKS.sub("", _UNWRAP.sub(r"\1", text)).replace("{,}", ",").replace("\u2212", "-")
    plain = _NAME.sub("", plain, count=1) if _NAME.match(plain) else plain
    plain = plain.removesuffix(".")
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    found = _INTEGER.fullmatch(plain)
    if found is None:
        return None
    return f"-{found[2]}" if found[1] == "-" and found[2] != "0" else found[2]
