"""Write ``docs/modules.md``: every folder and module of the product, with the first sentence that it says about itself.

``python scripts/write_modules.py`` writes the page; ``tests/docs/test_modules.py`` compares it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
PACKAGES = ("sandbox/spear_sandbox", "spear_envs", "agents/spear_agents", "training/spear_training")
HEAD = """# Every module in a line

The four packages from the lowest to the highest, folder by folder. `scripts/write_modules.py` writes this page from the
first line of each module.
"""


def make_page() -> str:
    """The page, from the sources."""
    return "\n".join([HEAD, *(line for package in PACKAGES for line in list_package(ROOT / package))])


def list_package(package: Path) -> Iterator[str]:
    """The lines of a package: for each folder with modules a heading, its own sentence and a table."""
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        if not modules or not (folder / "__init__.py").exists():
            continue
        yield from (f"## `{folder.relative_to(ROOT).as_posix()}`", "", read_sentence(folder / "__init__.py"), "")
        yield from ("| module | |", "|---|---|")
        yield from (f"| `{path.stem}` | {read_sentence(path)} |" for path in modules)
        yield ""


def read_sentence(path: Path) -> str:
    """The first paragraph of a module's docstring, as Markdown."""
    text = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n\n")[0]
    text = re.sub(r":(?:class|func|meth|data|mod):`[~.]*([^`]*)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(make_page(), "utf-8")
