"""The fenced code blocks of our pages.

``python -m tests.docs.blocks PAGE`` runs those of a page: in order, in the working directory, in one process.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [ROOT / room / "README.md" for room in ("sandbox", "spear_envs", "agents", "training")]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "panels" / "README.md",
    *ROOMS,
    *sorted((ROOT / "docs").glob("*.md")),
]
CODE = ("python", "bash")
TEXT = ("", "text", "console", "json", "yaml", "bibtex")
SHELL_SECONDS = 540

_FENCE = re.compile(r"( *)(`{3,})(\w*)(?: +title=\"([^\"]+)\")?\s*")
_MARK = re.compile(r" *<!-- (quickstart|output|not run: (.+)) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str
    """Name of the file that the reader is to save it as; empty if it is to be run."""
    code: str
    reason: str = ""
    """Why it is not run: ``<!-- not run: REASON -->`` or ``<!-- quickstart -->`` in the line before."""
    is_output: bool = False
    """Whether the program before it prints it: ``<!-- output -->`` in the line before."""


def read_blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines = page.read_text("utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.fullmatch(lines[number])
        if opening is None:
            number += 1
            continue
        indent, ticks, language, title = opening.groups()
        end = number + 1
        while not re.fullmatch(rf" *{ticks}`*\s*", lines[end]):
            end += 1
        mark = _MARK.fullmatch(lines[number - 1]) if number else None
        reason = ""
        if mark is not None:
            reason = mark[2] or ("scripts/quickstart.sh runs it" if mark[1] == "quickstart" else "")
        code = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end])
        is_output = mark is not None and mark[1] == "output"
        yield Block(page, number + 1, language, title or "", code, reason, is_output)
        number = end + 1


def list_code(page: Path) -> list[Block]:
    """The blocks of a page that are programs."""
    return [block for block in read_blocks(page) if block.language in CODE]


def list_outputs(page: Path) -> list[tuple[Block, Block]]:
    """The programs of a page that are run, each with an output that comes after it."""
    outputs: list[tuple[Block, Block]] = []
    last: Block | None = None
    for block in read_blocks(page):
        if block.language in CODE:
            last = block
        elif block.is_output and last is not None and not last.reason:
            outputs.append((last, block))
    return outputs


def is_printed(output: str, printed: str) -> bool:
    """Whether a program printed this; "…" stands for anything, and space at the end of a line does not count."""
    wanted, found = ("\n".join(line.rstrip() for line in text.splitlines()) for text in (output, printed))
    return re.search(".*".join(map(re.escape, wanted.split("…"))), found, re.DOTALL) is not None


def cut_printed(page: Path, printed: str) -> dict[int, str]:
    """What each program of :func:`run_blocks` printed, by its line."""
    parts = re.split(rf"^== {re.escape(str(page.relative_to(ROOT)))}:(\d+)\n", printed, flags=re.MULTILINE)
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))


def run_blocks(page: Path) -> None:
    """Run the blocks of a page; a Python block can use the names of earlier ones."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    sys.path.insert(0, "")
    for block in list_code(page):
        if block.reason:
            continue
        where = f"{page.relative_to(ROOT)}:{block.line}"
        print(f"== {where}", flush=True)
        if block.title:
            Path(block.title).write_text(block.code + "\n", "utf-8")
        elif block.language == "python":
            # The lines of the page, so that a traceback names them.
            exec(compile("\n" * block.line + block.code, where, "exec"), namespace)
        else:
            script = ["bash", "-euo", "pipefail", "-c", block.code]
            done = subprocess.run(script, stdin=subprocess.DEVNULL, timeout=SHELL_SECONDS, check=False)
            if done.returncode:
                sys.exit(f"{where}: exit code {done.returncode}")


if __name__ == "__main__":
    run_blocks(ROOT / sys.argv[1])
