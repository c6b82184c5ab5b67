"""Tutorials as notebooks: their prose as Markdown cells, their code blocks as cells that run."""

from __future__ import annotations

import json
import re
from typing import Any

TUTORIALS = ("first-evaluation.md", "first-training.md", "own-environment.md", "own-algorithm.md")
"""Pages that the site offers as notebooks; that of real-models.md is kept by hand, since it runs with fewer games."""

_BLOCK = re.compile(r"^ *```(python|bash)(?: +title=\"([^\"]+)\")?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^ *<!-- .* -->\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:)[^)\s]+\)")


def name_notebook(page: str) -> str:
    """Where the site has the notebook of a page."""
    return f"notebooks/{page.removesuffix('.md')}.ipynb"


def make_notebook(markdown: str) -> str:
    """The page as a notebook of format 4.5, in JSON. Links to other pages become plain text."""
    cells: list[dict[str, Any]] = []
    place = 0
    for block in _BLOCK.finditer(markdown):
        _add(cells, "markdown", _clean(markdown[place : block.start()]))
        language, title, code = block.groups()
        magic = f"%%writefile {title}\n" if title else "%%bash\n" if language == "bash" else ""
        _add(cells, "code", magic + code.rstrip("\n"))
        place = block.end()
    _add(cells, "markdown", _clean(markdown[place:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1
    )


def _clean(prose: str) -> str:
    return _LINK.sub(r"\1", _MARK.sub("", prose)).strip()


def _add(cells: list[dict[str, Any]], kind: str, source: str) -> None:
    if not source:
        return
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": source}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    cells.append(cell)
