"""Answers against references, and the embedded problems."""

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.grading import Grader, find_answer, is_right, read_integer
from spear_envs.code.grammar import find_last_box, read_last_box
from spear_envs.code.tasks import EMBEDDED, SPLITS, Problem, normalize_text, open_problems, open_tasks
from spear_envs.code.verifying import Verifier
from spear_envs.core.tasks import check_disjoint
from spear_sandbox.protocol import Outcome


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
        ("\\boxed 42 \\boxed 43.", "43", None),
        ("\\boxed{42} and \\boxed {43}", "43", "42"),
        ("\\fbox{42}", "42", None),
        ("\\boxed 3.5", "3.5", None),
        ("\\boxed 1/2.", "1/2", None),
        ("\\boxed{1} \\boxed 42^\\circ", "42", "1"),
        ("\\boxed 42\\% \\boxed 2^{10} \\boxed 2x \\boxed 2\\frac12 \\boxed 5!", "42", None),
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


PAGE = Path(__file__).resolve().parents[3] / "docs" / "code.md"
TABLE = PAGE.read_text("utf-8").partition("<!-- integers -->")[2].partition("<!-- end -->")[0]
ROWS = [(text, read) for cells, read in re.findall(r"^\| (`.*) \| (.*) \|$", TABLE, re.M)
        for text in re.findall("`(.*?)`", cells)]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *ROWS,
        ("\\text{x}=42", "42"),
        ("-0", "0"),
        ("000", "0"),
        ("9" * 900, "9" * 900),
        ("12,345,678", "12345678"),
        ("-\\$5", "-5"),
        ("AUS$5", None),
        ("42_10 ✓", "42"),
        ("42_{102}", None),
        ("\U0001d7d2\U0001d7d0", "42"),
        ("10,00", None),
        ("2abc", None),
        ("(10)403", None),
        ("42/m", None),
        ("\ufeff42\u200b", "42"),
        ("10**403", None),
        ("x!=42", None),
        ("42 \\text{ because } 43", None),
        ("42 \\text{ halves}", None),
        ("42 \\text{ hundredths}", None),
        ("42\\text{ thousandths}", None),
        ("42 fifths", None),
        ("42 twentieths", None),
        ("42 millionths", None),
        ("42 crore", None),
        ("42 months", "42"),
        ("", None),
    ],
)
def test_integers_are_read_by_the_table_in_the_docs(written: str, read: str | None) -> None:
    assert len(ROWS) > 80
    expected = None if read == "–" else read
    box = find_answer(written, Grader.INTEGER)
    assert read_integer(written if box is None else box) == expected
    assert is_right(box or written, expected or "42", Grader.INTEGER) == (expected is not None)
    assert is_right(written, "42", Grader.STRICT) == (written == "42")


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


class TestMathVerify:
    """By the package itself."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("math_verify", reason="needs the extra 'sandbox'")

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
            ("18", "18\\%", True),
            ("18 dollars", "18", True),
            ("18", "\\frac{36}{2}\\text{ cm}", True),
            ("73", "**73**", True),
            ("x<3", "(-\\infty,3)", True),
            ("(-\\infty,3)", "x<3", True),
            ("(3,4]", "3<x\\le 4", True),
            ("(3,4]", "3<x<4", False),
            ("(1,2)", "1<x<2", True),
            ("x\\in\\{1,2\\}", "1<x<2", False),
            ("x=1,y=2", "1<x<2", False),
            ("n\\equiv 3\\pmod 5", "3", False),
            ("2x+4y-3=0", "y=-\\frac12x+\\frac34", True),
            ("2x+4y-3=0", "y=-\\frac12x+\\frac14", False),
            ("y=-\\frac12x+\\frac34", "2x+4y-3=0", True),
            ("f(x)=x^2", "x^2", True),
            ("x^2", "f(x)=x^2", True),
            ("x^2", "f(x)=x^3", False),
            ("5", "AB=5", True),
            ("5", "AB=6", False),
            ("AB=5", "5", True),
            ("5", "e=5", True),
            ("\\frac12", "P(A)=\\frac12", True),
            ("42", "x=6 \\cdot 7=42", True),
            ("42", "x=20=42", False),
            ("42", "6 \\cdot 7=42", False),
            ("\\frac12", "3=\\frac12", False),
            ("\\frac12", "\\pi=\\frac12", False),
            ("\\{1,2\\}", "20=1, 20=2", False),
            ("5", "3<5", False),
            ("2\\sqrt{3}", "2√3", True),
            ("2", "2√3", False),
            ("\\emptyset", "\\varnothing", True),
            ("5", "3 \\vee 5", False),
            ("5", "3\\to 5", False),
            ("5", "6 @ 5", False),
            ("5", "\\(6\\) \\(5\\)", False),
            ("\\frac12", "6 @ \\frac{1}{2}", False),
            ("3 \\vee 5", "3 \\vee 5", True),
            ("7:00", "7:00", True),
            ("\\text{June 20}", "June 20", True),
            ("\\text{June 20}", "June 21", False),
            ("A\\cup B", "A \\cup B", True),
            ("3.5", "-3.5 in", False),
            ("-3.5", "-3.5 in", True),
            ("12.5", "\\text{Area} = 12.5\\text{ cm}^2", True),
            ("15.5", "15.5 USD", True),
            ("15.5", "15.5\\%", True),
            ("1.5", "1.5 + 1", False),
            ("\\infty", "\\infty", True),
            ("1010_2", "1010_3", False),
            ("1010_2", "1010_{2}", True),
            ("1010_2", "1010", True),
            ("5", "5_8", False),
            ("5", "5\\text{ million}", False),
            ("2.5 million dollars", "2{,}500{,}000", True),
            ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}", False),
            ("\\frac{1}{2^{99}}", "2^{-99}", True),
            ("0.0000003", "0.0000004", False),
            ("\\frac13", "0.333333", True),
            ("1 1/2", "1", False),
            ("1 1/2", "\\frac32", True),
            ("-1.5", "-1 1/2", True),
            ("\\frac{11}{2}", "1 1/2", False),
            ("1.5e3", "1500", True),
            ("12.5\\%", "12.5", True),
            ("12.5", "12.5\\%", True),
            ("12.5\\%", "\\frac18", True),
            ("\\frac14", "25\\%", True),
            ("12.5\\%", "1.25", False),
            ("\\frac14", "25\\text{ percent}", True),
            ("\\frac{\\pi}{4}", "\\frac\\pi4", True),
            ("\\frac{1 \\pm \\sqrt{5}}{2}", "x=\\frac{1-\\sqrt5}{2}, x=\\frac{1+\\sqrt5}{2}", True),
            ("\\frac{1 \\pm \\sqrt{5}}{2}", "\\frac{1 \\pm \\sqrt{7}}{2}", False),
            ("25\\%", "2500", False),
            ("\\frac16", "0.1\\overline{6}", True),
            ("0.\\overline{12}", "\\frac{12}{99}", True),
            ("0.\\overline{3}", "0.3", False),
            ("1.5", "\\textbf{1.5}", True),
            ("1.5", "**1.5**", True),
            ("(-\\infty,2]\\cup[3,\\infty)", "x\\le 2 \\text{ or } x\\ge 3", True),
            ("x\\le 2 \\text{ or } x\\ge 3", "(-\\infty,2]\\cup[3,\\infty)", True),
            ("(-\\infty,2]\\cup[3,\\infty)", "x\\le 2 \\text{ or } x>3", False),
            ("x+y=3", "x+y-3=0", True),
            ("3x+4y=12", "6x+8y=24", True),
            ("(x-1)^2+(y+2)^2=9", "x^2+y^2-2x+4y-4=0", True),
            ("x+y=3", "x+y=4", False),
            ("x=0.0000003", "x=0.0000004", False),
            ("\\frac{1-i}{2}", "\\frac{1}{1+i}", True),
            ("\\sqrt3+i", "2e^{i\\pi/6}", True),
            ("\\sqrt3+i", "2e^{i\\pi/3}", False),
            ("i=5", "i=6", False),
            ("\\sin 1", "\\sin 1^\\circ", False),
            ("\\frac34", "\\cos^2 30^{\\circ}", True),
            ("2-\\sqrt3", "\\tan(15^\\circ)", True),
            ("5", "5\\text{ dozen}", False),
            ("5", "5\\text{ or more}", False),
            ("5", "\\ne 5", False),
            ("500", "5\\text{ hundred}", True),
            ("5.5", "5.5\\text{ cm squared}", True),
            ("5.5", "5.5\\text{ squared}", False),
            ("5.5", "5.5\\text{ (approximately)}", True),
            ("(1,2)", "\\{1,2\\}", False),
            ("\\{1,2\\}", "(1,2)", False),
            ("(1,2,3)", "\\left\\{1,2,3\\right\\}", False),
            ("(1,2)", "1,2", True),
            ("1,2", "\\{2,1\\}", True),
            ("\\{(1,2)\\}", "(1,2)", True),
            ("(1,2),(3,4)", "\\{(1,2),(3,4)\\}", True),
            ("(-\\infty,3]", "(-∞,3]", True),
            ("2.5", "2½", True),
            ("\\sqrt{3}x^2", "√(3)x²", True),
            ("1.5", "US\\$1.50", True),
            ("<<3*24=72>>72 clips.\n#### 72.5", "72.5", True),
            ("11/2", "1 1/2", False),
            ("11/2", "1\\ 1/2", False),
            ("12", "1  2", False),
            ("2e-1", "-1+2e", True),
            ("1.5e-3", "0.0015", True),
            ("2e-05", "0.00002", True),
            ("1.5", "f(1.5)=1", False),
            ("5", "5\\text{ more apples}", True),
            ("1.5", "1.5\\text{ times}", True),
            ("12", "12\\text{ quarters}", True),
            ("5", "5\\text{ or less}", False),
            ("5", "\\text{more than }5", False),
            ("(-\\infty,1)\\cup(2,\\infty)", "(-\\infty,1)\\text{ or }(2,\\infty)", True),
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

    def test_a_busy_machine_changes_no_verdict(self) -> None:
        verifier = Verifier(seconds=0.5)
        try:
            assert verifier.verify("42", "42") and verifier._process is not None
            os.kill(verifier._process.pid, signal.SIGSTOP)
            threading.Timer(1, os.kill, (verifier._process.pid, signal.SIGCONT)).start()
            assert verifier.verify("42", "42"), "it had no CPU time"
        finally:
            verifier.close()

    def test_an_interrupted_verdict_is_not_the_next_one_s(self) -> None:
        verifier = Verifier()

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        former = signal.signal(signal.SIGALRM, interrupt)
        try:
            assert verifier.verify("1", "1")
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                verifier.verify("42", "9^{9^{9^{9^{9}}}}")
            assert verifier.verify("7", "7") and not verifier.verify("8", "9") and verifier.verify("7", "7")
        finally:
            signal.signal(signal.SIGALRM, former)
            verifier.close()

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


EVERY = [(dataset, split) for dataset in EMBEDDED for split in SPLITS]


@pytest.mark.parametrize("dataset", EMBEDDED)
def test_splits_share_neither_text_nor_parameters(dataset: str) -> None:
    check_disjoint(*(open_tasks(dataset, split) for split in SPLITS))
    texts = [normalize_text(problem.text) for split in SPLITS for problem in open_problems(dataset)[split]]
    assert len(set(texts)) == len(texts)


def choose(dataset: str, each: int) -> list[Problem]:
    """So many problems of each family and level, of all splits."""
    seen: Counter[tuple[str, int | None]] = Counter()
    chosen = []
    for problem in (problem for split in reversed(SPLITS) for problem in open_problems(dataset)[split]):
        seen[problem.subtask, problem.level] += 1
        if seen[problem.subtask, problem.level] <= each:
            chosen.append(problem)
    return chosen


def check_printed(problem: Problem, outcome: Outcome) -> None:
    assert (outcome.stdout.strip(), outcome.stderr, outcome.return_code) == (problem.answer, "", 0), problem
    assert outcome.wall_s < 10 and outcome.cpu_s < 2


@pytest.mark.parametrize("dataset", EMBEDDED)
def test_codes_print_the_answers_in_the_sandbox(dataset: str, isolated: Callable[..., Outcome]) -> None:
    # Answers come by another way than the code's: a formula where the code tries all cases, say.
    for problem in choose(dataset, 1):
        assert problem.code is not None
        check_printed(problem, isolated(problem.code))


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "split"), [each for each in EVERY if each[0] != "mini-disjoint"])
def test_all_codes_print_the_answers(dataset: str, split: str, isolated: Callable[..., Outcome]) -> None:
    for problem in open_problems(dataset)[split]:
        assert problem.code is not None
        check_printed(problem, isolated(problem.code))
