"""Programs out of responses, what comes back of a run, and prompts."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.code.grammar import (
    FILE_NAME,
    CodeParser,
    Prelude,
    make_program,
    read_call,
    strip_fences,
    write_answer,
    write_call,
)
from spear_envs.code.prompts import make_templates
from spear_envs.code.runs import Feedback, render_feedback, truncate_middle
from spear_envs.core.prompts import PromptContext
from spear_sandbox.protocol import KillReason, Outcome, RunStatus
from tests.spear_envs.code.conftest import Subprocess, make, make_outcome

IN_A_STRING = 'text = "```"\nprint(f"""\n  ```\n{text}""")'


@pytest.mark.parametrize(
    ("code", "stripped"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("```py\nprint(1)\n```\n", "print(1)"),
        ("```Python3 \r\nprint(1)\r\n```", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nand\n```python\nprint(2)\n```", "print(1)"),
        ("```bash\nls\n```\n```python\nprint(1)\n```", "print(1)"),
        ("```python\nprint(1)", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("\n```sage\nprint(1)\n```\n", "print(1)"),
        ("```\n```", ""),
        ("```python\n```", ""),
        (IN_A_STRING, IN_A_STRING),
        (f"```python\n{IN_A_STRING}\n```", IN_A_STRING),
        (f"```\n{IN_A_STRING}\n```", IN_A_STRING),
        ('print("```python")\nprint("```")', 'print("```python")\nprint("```")'),
        ('x = """ ```python\ny\n``` """', 'x = """ ```python\ny\n``` """'),
        ("text ```\nprint(1)\n```", "text ```\nprint(1)\n```"),
        ("```\nprint(1)", "```\nprint(1)"),
        ("```", "```"),
        ("", ""),
    ],
)
def test_fences(code: str, stripped: str) -> None:
    assert strip_fences(code) == stripped


@pytest.mark.parametrize("piece", ["```python\n", "```\n", "`", "```py", "\n```python", "``` \n"])
def test_fences_take_linear_time(piece: str) -> None:
    start = time.process_time()
    strip_fences(piece * (600_000 // len(piece)))
    assert time.process_time() - start < 1


def run(code: str) -> tuple[str, str, int | None]:
    done = Subprocess().run(make_program(code, Prelude.RETOOL))
    return done.stdout, done.stderr, done.return_code


def test_no_prelude_is_the_code_itself() -> None:
    assert make_program("print(1)", Prelude.NONE) == "print(1)"


def test_numpy_is_imported_where_it_is_named() -> None:
    assert "numpy" in make_program("print(np.pi)", Prelude.RETOOL)
    assert "numpy" in make_program("import numpy", Prelude.RETOOL)
    assert "numpy" not in make_program("input_np2 = 1", Prelude.RETOOL)


def test_tracebacks_show_the_lines_of_the_code_alone() -> None:
    out, err, status = run("print('before')\ndef f():\n    return 1 / 0\n\nf()")
    assert (out, status) == ("before\n", 1)
    lines = [line.strip() for line in err.splitlines() if set(line.strip()) - set("~^")]
    assert lines == [
        "Traceback (most recent call last):",
        'File "/tmp/main.py", line 5, in <module>',
        "f()",
        'File "/tmp/main.py", line 3, in f',
        "return 1 / 0",
        "ZeroDivisionError: division by zero",
    ]


def test_errors_of_syntax_name_their_line() -> None:
    _, err, status = run("x = 1\nfor:\n")
    assert status == 1 and 'File "/tmp/main.py", line 2' in err and "SyntaxError" in err and "Traceback" not in err


@pytest.mark.parametrize("code", ["x = 1\nprint('é', (x\ny = 2", "x = 1\ny = ('é', [x)\n", 'x = 1\ny = "é'])
def test_errors_of_syntax_show_the_code_where_the_program_is_the_file(code: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(make_program(code, Prelude.RETOOL).replace(FILE_NAME, "main.py"))
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    error = done.stderr.decode()
    assert 'File "main.py", line 2\n' in error and code.split("\n")[1] in error, error


def test_chained_errors_are_told_in_full() -> None:
    _, err, _ = run("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('y') from error")
    assert err.count("Traceback") == 2 and "direct cause" in err and err.rstrip().endswith("KeyError: 'y'")


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import sys\nsys.exit(3)", 3, ""),
        ("exit()", 0, ""),
        ("raise SystemExit('no')", 1, "no"),
        ("a\0b", 1, "null bytes"),
        ("print('\ud800')", 1, "UnicodeEncodeError"),
        ("x = '\ud800'", 1, "UnicodeEncodeError"),
        ("def f(): return f()\nf()", 1, "RecursionError"),
        ("raise KeyboardInterrupt", 1, "line 1, in <module>\n    raise KeyboardInterrupt\nKeyboardInterrupt"),
        ("import warnings\nwarnings.warn('late')", 0, "/tmp/main.py:2: UserWarning: late\n  warnings.warn"),
        ("import inspect\ndef f(): pass\nassert inspect.getsource(f) == 'def f(): pass\\n'", 0, ""),
        ("import sys\nsys.stderr = None\n1 / 0", 1, ""),
        ("import traceback\ntraceback.print_exception = None\n1 / 0", 1, "ZeroDivisionError"),
        ("from __future__ import annotations\ndef f(x: y): pass", 0, ""),
        ("'''docstring'''\nassert __doc__ is None or True", 0, ""),
        ("run = 1\nprint(run)", 0, ""),
        ("run", 1, "NameError"),
        ("", 0, ""),
    ],
)
def test_ends_of_programs(code: str, status: int, words: str) -> None:
    _, err, ended = run(code)
    assert ended == status and words in err and (words or not err)


@given(st.text(alphabet=st.characters()))
def test_programs_are_plain_ascii(code: str) -> None:
    program = make_program(code, Prelude.RETOOL)
    assert program.isascii() and "\0" not in program
    compile(program, "main.py", "exec")


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


def test_the_middle_is_cut_out() -> None:
    text = "a" * 9_000 + "b" * 9_000
    cut = truncate_middle(text)
    assert cut == "a" * 8_192 + "\n... [1,616 characters cut] ...\n" + "b" * 8_192
    assert truncate_middle("x" * 16_384) == "x" * 16_384


FIRST = PromptContext("What is $\\frac{1}{2}$ of {4}?", "What is $\\frac{1}{2}$ of {4}?", None, (), 1, 8)


# What the chat template of Qwen2.5-Instruct writes for a message of the role `tool`, and for one of the role `user`.


@pytest.mark.parametrize("name", ["default", "budget", "retool", "compact"])
@given(code=st.text(st.characters(exclude_characters="`<>\r\n\0")).filter(str.strip), answer=st.integers())
def test_responses_are_read_as_they_were_meant(name: str, code: str, answer: int) -> None:
    template, parser = make_templates(CodeParser(), 30.0)[name], CodeParser()
    parsed = parser.parse(template.respond(write_call(code), "So"))
    fenced = f"```python\n{code}\n```" if name == "retool" else code
    assert parsed.format_ok and parsed.action is not None and read_call(parsed.action) == fenced
    parsed = parser.parse(template.respond(write_answer(str(answer)), "So"))
    assert (parsed.action, parsed.format_ok) == (write_answer(str(answer)), True)


def test_the_compact_words_are_few_and_give_back_the_text() -> None:
    env = make(dataset="mini-small")
    template = env.templates["compact"]
    assert template.token_pattern is not None
    words = set()
    for text in env.lexicon():
        pieces = re.findall(template.token_pattern, text)
        assert "".join(pieces) == text
        words.update(pieces)
    assert len(words) < 150
    for split in env.splits:
        for task in make(dataset="mini-small", split=split).tasks:
            shown = template.render(replace(FIRST, instruction=task.instruction))
            assert set(re.findall(template.token_pattern, shown)) <= words | {"#", "\n"}
            assert set(str(task.content["answer"])) <= words
