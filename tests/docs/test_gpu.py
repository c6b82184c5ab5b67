"""The matrix of docs/gpu.md: every test that a cell names exists, and a GPU counts only where a report says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, REPORTS = ROOT / "docs" / "gpu.md", ROOT / "benchmarks" / "results" / "gpu"
COLUMNS = ("composed", "checked by verl", "run on a CPU", "run on a GPU")


def read_matrix() -> dict[str, dict[str, str]]:
    """Cells by path and column."""
    _, _, table = PAGE.read_text("utf-8").partition("| path |")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:] if line]
    return {path: dict(zip(COLUMNS, cells, strict=True)) for path, *cells in rows}


def list_tests() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)}


def test_every_cell_names_a_test_that_exists() -> None:
    matrix, known = read_matrix(), list_tests()
    assert len(matrix) > 12
    for path, cells in matrix.items():
        for column in COLUMNS[:3]:
            named = re.findall(r"`(test_\w+)`", cells[column])
            assert set(named) <= known, (path, column)
            assert named or cells[column] == "–" or cells[column].startswith("refused"), (path, column)
        assert any(cells[column] != "–" for column in COLUMNS[:3]), path


def test_a_gpu_counts_where_its_report_says_so() -> None:
    proved = {
        step["name"]
        for report in map(json.loads, (file.read_text("utf-8") for file in REPORTS.glob("*.json")))
        if report["device"] == "cuda"
        for step in report["steps"]
        if step["verdict"] == "ok"
    }
    for path, cells in read_matrix().items():
        told = re.findall(r"`([\w ,-]+)`", cells["run on a GPU"])
        assert set(told) <= proved, path
        assert told or cells["run on a GPU"] == "no", path
