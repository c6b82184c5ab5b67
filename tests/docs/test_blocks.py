"""Every code block of the pages is run, or says why it is not, and prints what the page shows as its output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import (
    CODE,
    PAGES,
    ROOT,
    TEXT,
    Block,
    Turn,
    cut_printed,
    is_printed,
    list_code,
    list_outputs,
    read_blocks,
    run_blocks,
)

FAST_SECONDS = 300  # a hang, also on a machine with other work
SLOW_SECONDS = 600
NEEDED = {"docs/mcp-tools.md": "mcp"}
"""Packages of extras, which `make setup` alone does not install, by the page whose blocks need them."""


def run_page(page: Path, folder: Path, *turns: Turn, seconds: int) -> str:
    """Run the blocks whose turn it is, as a reader with an empty home would; returns what they print."""
    blocks = [block for block in list_code(page) if block.turn in turns]
    for name in ("home", "work"):
        (folder / name).mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPEAR_")},
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "home" / ".cache"),
        "COLUMNS": "120",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        # From wherever it is called: the checkout's packages and this module.
        "PYTHONPATH": str(ROOT),
        "RAY_memory_monitor_refresh_ms": "0",
    }
    command = [sys.executable, "-m", "tests.docs.blocks", page.relative_to(ROOT).as_posix()]
    command += [str(block.line) for block in blocks]
    try:
        done = subprocess.run(
            command, cwd=folder / "work", env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{name_page(page)}: no end after {seconds} s; {(error.stdout or b'')[-1000:]!r}")
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count("== ") >= len(blocks)
    printed = cut_printed(page, done.stdout)
    for program, output in list_outputs(page, *turns):
        found = printed[program.line]
        assert is_printed(output.code, found), f"{name_page(page)}:{output.line} is not what is printed:\n{found}"
    return done.stdout


def name_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def list_pages(turn: Turn) -> list[Path]:
    return [page for page in PAGES if any(block.turn is turn for block in list_code(page))]


@pytest.mark.parametrize("page", list_pages(Turn.FAST), ids=name_page)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    if package := NEEDED.get(name_page(page)):
        pytest.importorskip(package, reason=f"needs the extra '{package}'")
    run_page(page, tmp_path, Turn.FAST, seconds=FAST_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("page", list_pages(Turn.SLOW), ids=name_page)
def test_long_blocks_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, Turn.FAST, Turn.SLOW, seconds=SLOW_SECONDS)


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_every_block_is_code_or_text(page: Path) -> None:
    strange = {block.language for block in read_blocks(page)} - {*CODE, *TEXT}
    assert not strange, f"the tests do not know {strange}: write python or bash to have it run, text for output"


def test_most_blocks_run_and_the_others_say_why() -> None:
    blocks = [block for page in PAGES for block in list_code(page)]
    left_out = [block for block in blocks if block.turn is Turn.NEVER]
    unexplained = [f"{name_page(block.page)}:{block.line}" for block in left_out if len(block.reason.split()) < 2]
    assert not unexplained
    print(*(f"{name_page(block.page)}:{block.line} {block.reason}" for block in left_out), sep="\n")
    # Those of the page of adapters run with libraries whose pins exclude ours.
    python = [block for block in left_out if block.language == "python" and block.page.name != "adapters.md"]
    assert len(python) <= 6, "Python blocks are to run"


class TestReading:
    def test_marks_titles_and_indents(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(
            "Text\n```python\na = 1\n```\n<!-- slow -->\n```bash\nls\n```\n<!-- not run: there is no GPU -->\n"
            '  ```bash\n  cat\n    x\n  ```\n```python title="b.py"\nb\n```\n````text\n```python\n```\n````\n'
        )
        first, slow, never, titled, text = read_blocks(page)
        assert (first.code, first.turn, first.line) == ("a = 1", Turn.FAST, 2)
        assert (slow.language, slow.turn) == ("bash", Turn.SLOW)
        assert (never.code, never.turn, never.reason) == ("cat\n  x", Turn.NEVER, "there is no GPU")
        assert titled.title == "b.py"
        assert text.code == "```python\n```"

    def test_outputs_belong_to_the_program_before(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(
            "```python\n```\n<!-- output -->\n```text\na\n```\n```text\nb\n```\n<!-- slow -->\n```bash\n```\n"
            "<!-- output -->\n```\nc\n```\n"
        )
        assert [(run.line, shown.code) for run, shown in list_outputs(page, Turn.FAST)] == [(1, "a")]
        assert [shown.code for _, shown in list_outputs(page, Turn.FAST, Turn.SLOW)] == ["a", "c"]

    def test_what_each_program_prints_is_its_own(self) -> None:
        printed = "== docs/x.md:3\na\n== docs/x.md:9\n== docs/x.md:12\n== b\n"
        assert cut_printed(ROOT / "docs" / "x.md", printed) == {3: "a\n", 9: "", 12: "== b\n"}

    def test_an_output_may_leave_something_out(self) -> None:
        printed = "== page\na 1.5 s  \n\nmore\nb (c)\n"
        assert is_printed("a … s\n\n…\nb (c)", printed) and is_printed("b (…)", printed)
        assert not is_printed("a s", printed) and not is_printed("b c", printed) and not is_printed("b … a", printed)

    def test_what_fails_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        block = Block(ROOT / "docs" / "x.md", 1, "bash", "", "exit 7", Turn.FAST, "")
        monkeypatch.setattr("tests.docs.blocks.list_code", lambda page: [block])
        with pytest.raises(SystemExit, match=r"docs/x.md:1: exit code 7"):
            run_blocks(ROOT / "docs" / "x.md", [1])
