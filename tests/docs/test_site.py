"""The site: what is generated for it, and the whole of it, as a reader without a network gets it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.agents.replay.chromium import PROGRAM
from tests.docs.blocks import list_code

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def episodes() -> ModuleType:
    return load("episodes")


@pytest.mark.parametrize("page", load("episodes").PAGES)
def test_environments_describe_themselves(episodes: ModuleType, page: str) -> None:
    assert (ROOT / "docs" / page).is_file()
    text = episodes.describe_environment(episodes.PAGES[page])
    assert "The episode is won after" in text
    assert text.count("**Turn ") == text.count('!!! quote "Observation"') - 1 >= 1
    assert re.search(r"\| `train` \| [\d,]+ \||\| `train` \| made on demand \|", text)
    assert "| `max_turns` |" in text and ":class:" not in text
    assert ("data:image/png;base64," in text) is (page == "sokoban.md")


def test_equations_become_mathml() -> None:
    pytest.importorskip("latex2mathml", reason="needs the dependency group 'docs'")
    page = load("equations").convert_equations(
        r'<p><span class="arithmatex">\(\hat A &gt; \tfrac12 R_{tool} - \bar R\)</span> and <code>\(x\)</code></p>'
    )
    assert "arithmatex" not in page and r"<code>\(x\)</code>" in page
    assert '<mover accent="true"><mi>A</mi>' in page and "<mfrac><mrow><mn>1</mn></mrow>" in page
    assert '<mrow class="bar"><mi>R</mi></mrow>' in page
    assert "<mtext>tool</mtext>" in page or '<mi mathvariant="normal">t</mi>' in page


@pytest.mark.parametrize("page", load("notebooks").TUTORIALS)
def test_notebooks_have_the_cells_of_their_pages(page: str) -> None:
    notebook = json.loads(load("notebooks").make_notebook((ROOT / "docs" / page).read_text("utf-8")))
    assert notebook["cells"][0]["source"].startswith("# ") and notebook["nbformat"] == 4
    found = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    wanted = []
    for block in list_code(ROOT / "docs" / page):
        magic = f"%%writefile {block.title}\n" if block.title else "%%bash\n" if block.language == "bash" else ""
        wanted.append(magic + block.code)
    assert found == wanted and len(found) >= 4
    prose = "".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert "<!--" not in prose and ".md)" not in prose and "```python" not in prose


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the dependency group 'docs'")
    # Not --quiet: --strict would not see the warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    # No name resolves and no proxy answers: a build that asks the network would fail.
    offline = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **offline}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "sokoban.html", "algorithms.html", "contributing.html"} <= {page.name for page in pages}
    for page in pages:
        html = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"(https?:[^\"]+)", html)
        loaded += re.findall(
            r"<link[^>]+rel=\"(?:stylesheet|preconnect|preload|icon)\"[^>]+href=\"(https?:[^\"]+)", html
        )
        assert not loaded, f"{page.name} would fetch {loaded}"
        assert "arithmatex" not in html and '"mermaid"' not in html
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", sheet.read_text("utf-8")), sheet
    algorithms = (tmp_path / "site" / "algorithms.html").read_text("utf-8")
    assert algorithms.count("<math ") > 30
    assert 'href="api/spear_training.algorithms.html#spear_training.algorithms.policy_loss"' in algorithms
    assert_found_from_the_disk(tmp_path / "site" / "index.html", "sokoban")


def assert_found_from_the_disk(page: Path, word: str) -> None:
    """Search the built site as somebody does who unpacked it and opened its first page."""
    if PROGRAM is None:
        pytest.skip("the search is tried in Chromium, which is not installed")
    command = [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"{page.as_uri()}?q={word}"], capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r"search-result__meta\">(\d+) matching documents", done.stdout)
    assert found and int(found[1]) > 5, done.stderr[-2000:]
