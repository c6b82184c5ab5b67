"""Refuse turns of phrase that English does not have, in pages and in what Python modules say.

``python scripts/lint_prose.py`` looks at the pages and at strings and comments of the packages; exit code 1 and a line
for each finding. Spelling is codespell's. The list is short on purpose: each entry once came back in review.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("spear_envs", "agents/spear_agents", "training/spear_training", "sandbox/spear_sandbox")
PAGES = ("README.md", "CONTRIBUTING.md", "docs")
# Quoted prompts and made-up texts are data, and the lab book is history.
LEFT_OUT = ("docs/log.md", "scripts/datasets/")

_GOOD = "longer|more|other|less|better|smaller|larger|shorter|matter|need|way|later|earlier|such|fewer|reason"
PHRASES = {
    rf"(?<!here )\b(?:is|are|was|were) no (?!(?:{_GOOD})\b|[({{`'\"])(?=\w)": "write 'is not a …'",
    r"\bin (?:the )?place of\b": "write 'instead of'",
    r"\bgo(?:es)? on where\b": "write 'resumes'",
    r"\bcommand (?:then )?goes on\b": "write 'the same command resumes'",
    r"\bhangs? on\b": "write 'depends on'",
    r"\b[Ee]lsewhere than\b": "write 'except on'",
    r"\bstands? (?:behind|in front of|beside)\b": "write 'follows', 'precedes' or 'is next to'",
    r"(?<=[a-z0-9`)][.?!])  (?=[A-Z`])": "one space between sentences",
}


def read_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a page; of a module those with comments and strings."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            yield from enumerate(token.string.splitlines(), token.start[0])


def find_phrases(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, what was found and what to write."""
    for number, line in read_prose(path):
        for phrase, mend in PHRASES.items():
            if found := re.search(phrase, line):
                yield number, line[max(0, found.start() - 12) : found.end() + 24].strip(), mend


def list_files() -> Iterator[Path]:
    """Every page and module that is looked at."""
    for name in (*PAGES, *PACKAGES):
        place = ROOT / name
        files = [place] if place.is_file() else sorted(place.rglob("*.md" if name in PAGES else "*.py"))
        yield from (file for file in files if not any(part in f"/{file.relative_to(ROOT)}" for part in LEFT_OUT))


def main() -> int:
    """Print what is found; exit code 1 if anything is."""
    count = 0
    for path in list_files():
        for number, found, mend in find_phrases(path):
            print(f"{path.relative_to(ROOT)}:{number}: {found!r}: {mend}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
