"""What a benchmark says of itself is read without importing it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks._figures import Bar, Size
from benchmarks._registry import FOLDER, choose_benchmarks, find_benchmarks, read_benchmark
from spear_envs.core.errors import SpearError
from tests.benchmarks.scripts import write_script


def test_every_benchmark_keeps_the_contract() -> None:
    known = find_benchmarks()
    assert len(known) >= 14
    for benchmark in known:
        names = [bar.name for bar in benchmark.bars]
        assert len(set(names)) == len(names), f"{benchmark.name} has two bars of one name"
        functions = {node.name for node in ast.parse((FOLDER / f"{benchmark.name}.py").read_text("utf-8")).body
                     if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert {"measure", "main"} <= functions, f"{benchmark.name} lacks measure or main"


def test_bars_are_those_of_the_script(tmp_path: Path) -> None:
    found = read_benchmark(write_script(tmp_path, "mine"))
    assert (found.name, found.summary) == ("mine", "What mine costs.")
    assert found.bars[0] == Bar("step", "ms", at_most=2.0) and str(found.bars[1]) == "≥ 1.5 times"
    assert [bar.applies_to(Size.STANDARD) for bar in found.bars] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("BARS = ()", "no docstring"),
        ('"""X."""', "no literal tuple BARS"),
        ('"""X."""\nBARS = make_bars()', "no literal tuple BARS"),
        ('"""X."""\nBARS = (LIMIT,)', "literal arguments"),
        ('"""X."""\nBARS = (Bar("x", at_most=LIMIT),)', "malformed"),
        ('"""X."""\nBARS = (Bar("x"),)', "at_most or at_least"),
        ('"""X."""\nBARS = (Bar("x", at_most=1.0, size="tiny"),)', "tiny"),
    ],
)
def test_what_is_no_benchmark_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_benchmark(path)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    known = find_benchmarks()
    assert [one.name for one in choose_benchmarks(["sokoban", "agents", "sokoban"], known)] == ["sokoban", "agents"]
    assert choose_benchmarks([], known) == known
    with pytest.raises(SpearError, match="Did you mean 'sokoban'"):
        choose_benchmarks(["sokobn"], known)


@pytest.mark.parametrize(
    ("value", "most", "least"), [(1.0, True, True), (0.5, True, False), (float("nan"), False, False)]
)
def test_what_holds(value: float, most: bool, least: bool) -> None:
    assert Bar("x", at_most=1.0).holds(value) is most and Bar("x", at_least=1.0).holds(value) is least
