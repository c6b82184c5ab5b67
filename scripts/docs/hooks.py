"""What MkDocs does to our pages beyond its own; ``mkdocs.yml`` names this file.

Pages are plain Markdown that reads well in the repository, too. Here links out of ``docs/`` are followed or dropped,
equations become MathML, names of algorithms become links into the API reference, and the pages of environments get
their generated end.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from episodes import PAGES, describe_environment
from equations import convert_equations
from mkdocs.structure.files import File
from notebooks import TUTORIALS, make_notebook, name_notebook

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Files of the repository that are pages, too.
_ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:|#|data:)([^)\s]+)\)")
_MARK = re.compile(r"^ *<!-- (?:slow|quickstart|output|not run: .*) -->\n", re.MULTILINE)
_CODE = re.compile(r"<code>([A-Za-z_]\w*)((?:\.\w+)*)</code>")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add CONTRIBUTING.md, a page for each package that the navigation names below ``api/``, and the notebooks."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    files.append(File.generated(config, "contributing.md", content=_LINK.sub(_enter_docs, text)))
    for path in _list_pages(config.nav):
        if path.startswith("api/"):
            name = PurePosixPath(path).name.removesuffix(".md")
            title = name.replace(".", ".<wbr>")  # long names break after a dot on a phone
            files.append(File.generated(config, path, content=f"# {title}\n\n::: {name}\n"))
    for page in TUTORIALS:
        notebook = make_notebook((ROOT / "docs" / page).read_text("utf-8"))
        files.append(File.generated(config, name_notebook(page), content=notebook))
    return files


def _list_pages(nav: Any) -> Iterator[str]:
    """The paths in a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _list_pages(item)


def _enter_docs(found: re.Match[str]) -> str:
    """A link of a file beside ``docs/``, as seen from within."""
    target = found[2]
    return f"[{found[1]}]({target.removeprefix('docs/') if target.startswith('docs/') else f'../{target}'})"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend links out of ``docs/``, drop the marks of the tests, and append what is generated."""
    text = _MARK.sub("", _LINK.sub(_leave_docs, markdown))
    if page.file.src_uri in TUTORIALS:
        link = f"[This page as a notebook]({name_notebook(page.file.src_uri)}){{ download }}"
        text = text.replace("\n\n", f"\n\n{link}\n\n", 1)
    if source := PAGES.get(page.file.src_uri):
        text += describe_environment(source)
    return text


def _leave_docs(found: re.Match[str]) -> str:
    """A link to a page of the site; a path beside it becomes plain text, since the site has no sources."""
    path, _, anchor = found[2].partition("#")
    if not path.startswith("../"):
        return found[0]
    inside = _ROOT_PAGES.get(path.removeprefix("../"))
    if inside == "index.md":
        return f"[{found[1]}]({inside})"  # the first page has other headings than the README
    if inside is not None:
        return f"[{found[1]}]({inside}{'#' if anchor else ''}{anchor})"
    if not (ROOT / "docs" / path).exists():
        raise FileNotFoundError(f"a page links to {path}, which is not in the repository")
    return found[1]


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn equations into MathML, and on the page of algorithms names of functions into links."""
    html = convert_equations(html)
    return _CODE.sub(_link_name, html) if page.file.src_uri == "algorithms.md" else html


@lru_cache
def _list_names() -> frozenset[str]:
    """The public names of the algorithms."""
    return frozenset(importlib.import_module("spear_training.algorithms").__all__)


def _link_name(found: re.Match[str]) -> str:
    if found[1] not in _list_names():
        return found[0]
    return f'<autoref optional identifier="spear_training.algorithms.{found[1]}{found[2]}">{found[0]}</autoref>'
