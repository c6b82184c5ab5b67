"""Every code block of the pages is run, or says why it is not, and prints what the page shows as its output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import CODE, PAGES, ROOT, TEXT, cut_printed, is_printed, list_code, list_outputs, read_blocks

SECONDS = 900
"""Of a page; a hang fails, also on a slow machine."""
NEEDED = {"docs/mcp-tools.md": "mcp"}
"""Packages of extras, which `make setup` alone does not install, by the page whose blocks need them."""

NIGHTLY = (
    *("docs/agent-programs.md", "docs/own-algorithm.md", "docs/own-environment.md", "docs/training.md"),
    "training/README.md",
)
"""Pages that take two or three minutes each, whose features other tests run as well."""


def name_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.nightly if name_page(page) in NIGHTLY else ())
        for page in PAGES
        if any(not block.reason for block in list_code(page))
    ],
    ids=name_page,
)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    """As a reader with an empty home would run them."""
    if package := NEEDED.get(name_page(page)):
        pytest.importorskip(package, reason=f"needs the extra '{package}'")
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPEAR_")},
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "home" / ".cache"),
        "COLUMNS": "120",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "RAY_memory_monitor_refresh_ms": "0",
    }
    command = [sys.executable, "-m", "tests.docs.blocks", name_page(page)]
    done = subprocess.run(
        command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    printed = cut_printed(page, done.stdout)
    assert set(printed) == {block.line for block in list_code(page) if not block.reason}
    for program, output in list_outputs(page):
        found = printed[program.line]
        assert is_printed(output.code, found), f"{name_page(page)}:{output.line} is not what is printed:\n{found}"


def test_most_blocks_run_and_the_others_say_why() -> None:
    blocks = [block for page in PAGES for block in read_blocks(page)]
    assert {block.language for block in blocks} <= {*CODE, *TEXT}
    left_out = [block for block in blocks if block.language in CODE and block.reason]
    assert not [f"{name_page(block.page)}:{block.line}" for block in left_out if len(block.reason.split()) < 2]
    # Those of the page of adapters run with libraries whose pins exclude ours.
    python = [block for block in left_out if block.language == "python" and block.page.name != "adapters.md"]
    assert len(python) <= 6, "Python blocks are to run"


def test_marks_titles_indents_and_outputs_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n```python\na = 1\n```\n<!-- output -->\n```text\na\n```\n<!-- not run: there is no GPU -->\n"
        '  ```bash\n  cat\n    x\n  ```\n```python title="b.py"\nb\n```\n````text\n```python\n```\n````\n'
    )
    first, output, never, titled, text = read_blocks(page)
    assert (first.code, first.reason, first.line) == ("a = 1", "", 2)
    assert (never.code, never.reason) == ("cat\n  x", "there is no GPU")
    assert (titled.title, text.code) == ("b.py", "```python\n```")
    assert list_outputs(page) == [(first, output)]


def test_what_is_printed_is_compared() -> None:
    page = ROOT / "docs" / "x.md"
    assert cut_printed(page, "== docs/x.md:3\na\n== docs/x.md:9\n== b\n") == {3: "a\n", 9: "== b\n"}
    printed = "a 1.5 s  \n\nmore\nb (c)\n"
    assert is_printed("a … s\n\n…\nb (c)", printed) and is_printed("b (…)", printed)
    assert not any(is_printed(other, printed) for other in ("a s", "b c", "b … a"))
