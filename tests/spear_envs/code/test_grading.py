from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.grading import Grader, find_answer, is_right, read_integer
from spear_envs.code.grammar import find_last_box, read_last_box
from spear_envs.code.verifying import Verifier, open_verifier


@pytest.mark.parametrize(
    ("text", "closed", "last"),
    [
        ("\\boxed{42}", "42", "42"),
        ("\\boxed{1} \\boxed{2}", "2", "2"),
        ("\\boxed{1} \\boxed{2", "1", None),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\boxed{a \\boxed{b}}", "b", "b"),
        ("\\boxed{a} } } {", "a", "a"),
        ("} \\boxed{a}", "a", "a"),
        ("{ \\boxed{a}", "a", "a"),
        ("\\boxed{}", "", ""),
        ("\\boxed 42", None, None),
        ("", None, None),
    ],
)
def test_boxes(text: str, closed: str | None, last: str | None) -> None:
    assert find_last_box(text) == closed
    assert read_last_box(text) == last


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "1", "x "]), max_size=30))
def test_the_last_closed_box_by_looking_at_each(pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = None
    for begin in range(len(text)):
        if text.startswith("\\boxed{", begin):
            depth, start = 1, begin + len("\\boxed{")
            for end in range(start, len(text)):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                if depth == 0:
                    expected = text[start:end]
                    break
    assert find_last_box(text) == expected


@pytest.mark.parametrize(
    "written",
    [
        *("42", " 42 ", "$42$", "+42", "042", "42.", "x=42", "x = 42", "n=42", "\\text{42}", "\\text{ 42 }", "4\\,2"),
        *("\\ 42", "42\\!", "~42", "\\text{x}=42"),
    ],
)
def test_integers_however_they_are_written(written: str) -> None:
    assert read_integer(written) == "42"
    assert is_right(written, "42", Grader.INTEGER) and is_right(written, "042", Grader.INTEGER)
    assert is_right(written, "42", Grader.STRICT) == (written == "42")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1{,}000", "1000"),
        ("1,000", "1000"),
        ("12,345,678", "12345678"),
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("-0", "0"),
        ("000", "0"),
        ("9" * 900, "9" * 900),
        ("1,00", None),
        ("1,2", None),
        ("10,00", None),
        ("4.0", None),
        ("42..", None),
        ("1e3", None),
        ("6*7", None),
        ("\\frac{84}{2}", None),
        ("42 cm", None),
        ("xy=42", None),
        ("x=y=42", None),
        ("--42", None),
        ("٤٢", None),
        ("four", None),
        ("", None),
        ("{42}", None),
    ],
)
def test_what_is_an_integer(written: str, read: str | None) -> None:
    assert read_integer(written) == read


def test_strict_answers_stand_at_the_end() -> None:
    assert find_answer("\\boxed{42}" + " " * 90, Grader.STRICT) == "42"
    assert find_answer("\\boxed{42}" + " " * 91, Grader.STRICT) is None
    assert find_answer("\\boxed{42}" + " " * 91, Grader.INTEGER) == "42"
    assert find_answer("<think>\\boxed{42}", Grader.STRICT) == "42"
    assert find_answer("<think>\\boxed{42}", Grader.INTEGER) is None
    assert not is_right(None, "42", Grader.STRICT)


@given(st.integers(-(10**20), 10**20))
def test_integers_are_read_back(number: int) -> None:
    assert read_integer(str(number)) == str(number) == read_integer(f"{number:,}")
    assert read_integer(f"{number:,}".replace(",", "{,}")) == str(number)
    assert read_integer(f"$x = {number}$.".replace(" ", "\\,")) in (str(number), None)


@given(st.text())
def test_any_text_can_be_graded(text: str) -> None:
    for grader in (Grader.STRICT, Grader.INTEGER):
        assert is_right(find_answer(text, grader), "42", grader) in (True, False)


@given(st.integers(2, 10**9), st.integers(2, 10**9))
def test_the_graders_without_packages_agree_on_integers(gold: int, answer: int) -> None:
    for grader in (Grader.STRICT, Grader.INTEGER):
        found = find_answer(f"So it is \\boxed{{{answer}}}.", grader)
        assert is_right(found, str(gold), grader) == (gold == answer)


class TestMathVerify:
    """By the package itself."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("math_verify", reason="needs the extra 'sandbox'")

    def test_all_graders_agree_on_integers(self) -> None:
        pairs = [(gold, gold + shift) for gold in (0, 2, 73, 999, 10_007, -5) for shift in (0, 1, -1)]
        for gold, answer in pairs:
            response = f"So it is \\boxed{{{answer}}}."
            verdicts = {is_right(find_answer(response, grader), str(gold), grader) for grader in Grader}
            assert verdicts == {gold == answer}, (gold, answer)

    @pytest.mark.parametrize(
        ("gold", "answer", "right"),
        [
            ("1/2", "\\frac{1}{2}", True),
            ("1/2", "0.5", True),
            ("1000", "1{,}000", True),
            ("42", "x=42", True),
            ("73", "073", True),
            ("42", "6 \\cdot 7", True),
            ("3\\pi", "\\pi + 2\\pi", True),
            ("42", "43", False),
            ("42", "", False),
            ("42", "{{{", False),
            ("42", "\\frac", False),
            ("42", "\ud800", False),
        ],
    )
    def test_mathematics(self, gold: str, answer: str, right: bool) -> None:
        assert is_right(answer, gold, Grader.MATH_VERIFY) is right

    def test_from_many_threads(self) -> None:
        found: dict[int, bool] = {}

        def ask(number: int) -> None:
            found[number] = is_right(f"\\frac{{{2 * number}}}{{2}}", str(number - number % 2), Grader.MATH_VERIFY)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: number % 2 == 0 for number in range(16)}

    def test_an_answer_without_end_is_wrong_and_the_next_one_graded(self) -> None:
        verifier = Verifier(seconds=1.0)
        try:
            assert verifier.verify("42", "42")
            start = time.monotonic()
            assert not verifier.verify("42", "9^{9^{9^{9^{9}}}}")
            assert time.monotonic() - start < 10
            assert verifier.verify("42", "42")
        finally:
            verifier.close()
        assert verifier._process is None

    def test_a_process_that_was_killed_is_started_again_and_claims_are_no_values(self) -> None:
        verifier = Verifier()
        try:
            assert verifier.verify("42", "42")
            assert verifier._process is not None
            os.kill(verifier._process.pid, 9)
            verifier._process.wait()
            for gold, answer, right in (
                ("19", "20=19", False),
                ("19", "19", True),
                ("19", "x=19", True),
                ("19", "x=20", False),
                ("20=19", "20=19", True),
                ("x=19", "19", True),
                (r"\{1,2\}", r"x=1 \text{ or } x=2", True),
            ):
                assert verifier.verify(gold, answer) is right, (gold, answer)
        finally:
            verifier.close()

    def test_one_for_each_process(self) -> None:
        assert open_verifier() is open_verifier()
