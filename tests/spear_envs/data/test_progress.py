"""Progress of a long work: lines where there is no terminal, bars where there is one."""

import os
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from spear_envs.data.progress import show_bytes, show_phases, show_rows
from spear_sandbox.terminal import Console, Progress, hold_console

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
EVERY_S = 0.05
LONG_S = 0.3
"""Six lines of time, for a machine that is busy."""


class Clock:
    """A time that a test sets; Rich asks for it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wait_for(text: StringIO, words: str) -> str:
    """The first line with these words that a progress writes within ten seconds."""
    for _ in range(1000):
        if found := [line for line in text.getvalue().splitlines() if words in line]:
            return found[0]
        time.sleep(0.01)
    raise AssertionError(text.getvalue())


def test_a_long_step_is_reported_without_a_terminal_although_nobody_says_anything() -> None:
    text, clock = StringIO(), Clock()
    with Progress(*COLUMNS, console=Console(file=text), every_s=EVERY_S, get_time=clock, announces=True) as progress:
        task = progress.add_task("training [3]", total=60)
        assert text.getvalue() == "training [3]\n"
        clock.now += 40
        assert wait_for(text, "40 s") == "training [3]: 0/60, 40 s so far"
        progress.update(task, completed=10)  # of an earlier run: no part of the speed
        clock.now += 20
        progress.update(task, completed=20)
        assert wait_for(text, "20/60") == "training [3]: 20/60, 60 s so far, about 80 s left"
        clock.now += 80
        progress.update(task, completed=60)
        last = wait_for(text, "60/60")
    assert last == "training [3]: 60/60, 2.3 min"
    assert text.getvalue().count("60/60") == 1


def test_a_task_that_counts_from_the_start_again_has_its_time_from_there() -> None:
    text, clock = StringIO(), Clock()
    with Progress(*COLUMNS, console=Console(file=text), every_s=EVERY_S, get_time=clock) as progress:
        task = progress.add_task("steps", total=90)
        for done in (30, 90):
            clock.now += 20
            progress.update(task, completed=done)
            line = wait_for(text, f"{done}/90")
        assert line == "steps: 90/90, 40 s"
        clock.now += 100
        progress.update(task, completed=5, total=45)
        clock.now += 10
        progress.update(task, completed=25)
        assert wait_for(text, "25/45") == "steps: 25/45, 10 s so far, about 10 s left"


def test_a_short_task_has_no_lines_and_an_ended_progress_is_silent() -> None:
    text = StringIO()
    with Progress(*COLUMNS, console=Console(file=text)) as progress:
        task = progress.add_task("quick", total=2)
        progress.update(task, completed=2)
    assert text.getvalue() == ""
    with Progress(*COLUMNS, console=Console(file=text), every_s=EVERY_S) as progress:
        progress.add_task("endless", total=None)
        wait_for(text, "endless")
    written = text.getvalue()
    time.sleep(LONG_S)
    assert text.getvalue() == written


def test_an_unknown_total_and_a_failure_are_no_question_marks() -> None:
    text = StringIO()
    with (
        pytest.raises(ValueError),
        Progress(*COLUMNS, console=Console(file=text), every_s=EVERY_S) as progress,
    ):
        progress.add_task("looking", total=None)
        wait_for(text, "looking")
        raise ValueError
    assert set(text.getvalue().splitlines()) == {"looking: 0 s so far"}


@pytest.mark.parametrize(
    ("show", "shown"), [(show_rows, "400 of 1,000"), (show_phases, "40%"), (show_bytes, "0.4/1.0 kB")]
)
def test_a_terminal_has_a_bar_and_a_file_the_name_of_the_work(show: object, shown: str) -> None:
    terminal, file = StringIO(), StringIO()
    for console in (Console(file=terminal, force_terminal=True, width=100), Console(file=file)):
        with show(console) as report:  # type: ignore[operator]
            report("encode", 400, 1_000)
    assert shown in terminal.getvalue()
    assert file.getvalue() == "encode\n"


def test_bytes_without_a_console_are_counted_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with show_bytes(None) as report:
        report("fetching", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_lines_go_on_while_standard_output_and_error_go_elsewhere(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = os.dup(2)
    with hold_console(Console(stderr=True)) as console, (tmp_path / "log").open("wb") as elsewhere:
        os.dup2(elsewhere.fileno(), 2)
        try:
            with Progress(TextColumn("{task.description}"), console=console, every_s=0.01) as progress:
                progress.add_task("loading", total=None)
                shown, end = "", time.monotonic() + 20
                while "loading: " not in shown and time.monotonic() < end:
                    time.sleep(0.05)
                    shown += capfd.readouterr().err
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    assert "loading: " in shown and (tmp_path / "log").read_bytes() == b""
    with hold_console(Console(file=StringIO())) as console:
        console.print("kept")
    assert isinstance(console.file, StringIO) and console.file.getvalue() == "kept\n"
