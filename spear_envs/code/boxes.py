r"""Finding ``\boxed{…}`` in a text, with braces that balance."""

from __future__ import annotations

import re

_BOX = "\\boxed{"
_BRACES = re.compile(r"\\boxed\{|[{}]")


def find_last_box(text: str) -> str | None:
    r"""Content of the closed ``\boxed{…}`` that begins last, so of the innermost of nested ones; None if there is none.

    Takes time linear in the text.
    """
    if _BOX not in text:
        return None
    opened: list[int] = []
    best = (-1, -1)
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0] == _BOX else -1)
        elif opened:
            begin = opened.pop()
            if begin > best[0]:
                best = begin, brace.start()
    return text[best[0] : best[1]] if best[0] >= 0 else None


def read_last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed{``, as the authors read it; None if that is not closed."""
    begin = text.rfind(_BOX)
    if begin < 0:
        return None
    begin += len(_BOX)
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : brace.start()]
    return None
