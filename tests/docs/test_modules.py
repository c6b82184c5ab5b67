"""The page of modules is the one that the sources give, and each module says what it is."""

import importlib.util
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_modules", ROOT / "scripts" / "write_modules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_lists_every_module_with_its_sentence(script: ModuleType) -> None:
    page = script.make_page()
    assert script.PAGE.read_text("utf-8") == page, "run python scripts/write_modules.py"
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 200 and all(len(row[1]) > 20 for row in rows)
    assert any(row[0] == "| `rewards`" and "SPEAR reward" in row[1] for row in rows)
