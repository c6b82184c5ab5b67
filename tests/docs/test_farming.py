from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_of_loops_on_the_pages_are_those_that_are_measured() -> None:
    spec = importlib.util.spec_from_file_location("farming", ROOT / "scripts" / "farming.py")
    assert spec is not None and spec.loader is not None
    farming = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(farming)
    for page in farming.PAGES:
        table = farming.make_table(page)
        assert f"<!-- farming -->\n{table}\n<!-- end -->" in (ROOT / "docs" / page).read_text(encoding="utf-8"), page
