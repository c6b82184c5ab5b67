"""Golden cases of the SPEAR mathematics, where the folder that holds them lies beside the checkout."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "golden" / "spear"


def _load_checker() -> Any:
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("golden_spear_check", FOLDER / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    # The cases were recorded against 0.1.0, whose package had another name.
    module.NAMES = {name: re.sub(r"^training\.", "spear_training.", place) for name, place in module.NAMES.items()}
    module.NAMES["load_preset"] = "tests.training.presets.rows:load_preset"
    return module


def _find_rows() -> Iterator[Any]:
    if not (FOLDER / "check.py").is_file():
        yield pytest.param(
            None, None, None, marks=pytest.mark.skip(reason="the golden cases are not here"), id="absent"
        )
        return
    checker = _load_checker()
    for path in sorted(FOLDER.glob("*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        run = checker.RUNNERS.get(case["kind"]) or getattr(checker, case["kind"], None)
        for number, row in enumerate(case.get("rows", []) if run else []):
            yield pytest.param((checker, run), row, case["tolerance"], id=f"{path.stem}-{number}")


@pytest.mark.parametrize(("runner", "row", "tolerance"), list(_find_rows()))
def test_golden_row_holds(runner: Any, row: dict[str, Any], tolerance: float) -> None:
    checker, run = runner
    got = run(row["in"], want=row["out"], tol=tolerance)
    if got is not None:
        checker.close(got, row["out"], tolerance)
