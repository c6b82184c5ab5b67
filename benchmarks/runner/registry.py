"""Which benchmarks there are, and their bars, read off the syntax trees: nothing that they need is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runner.figures import Bar
from spear_envs.core.errors import SpearError, suggest_name

__all__ = ["FOLDER", "Benchmark", "choose_benchmarks", "find_benchmarks", "read_benchmark"]

FOLDER = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Benchmark:
    """One script."""

    name: str
    summary: str
    """The first line of its docstring."""
    bars: tuple[Bar, ...]


def read_benchmark(path: Path) -> Benchmark:
    """Read what a script says of itself.

    Raises:
        ValueError: it has no docstring, or ``BARS`` is not a literal tuple of bars.
    """
    tree = ast.parse(path.read_text("utf-8"), str(path))
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    if not summary:
        raise ValueError(f"{path.name} has no docstring")
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["BARS"]:
            if not isinstance(node.value, ast.Tuple):
                break
            return Benchmark(path.stem, summary, tuple(_read_bar(call, path) for call in node.value.elts))
    raise ValueError(f"{path.name} has no literal tuple BARS; it may be empty")


def _read_bar(node: ast.expr, path: Path) -> Bar:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "Bar":
        raise ValueError(f"{path.name}:{node.lineno}: BARS holds calls of Bar with literal arguments, nothing else")
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    return Bar(*map(ast.literal_eval, node.args), **keywords)


def find_benchmarks(folder: Path = FOLDER) -> list[Benchmark]:
    """All of them, by name."""
    return [read_benchmark(path) for path in sorted(folder.glob("[a-z]*.py"))]


def choose_benchmarks(names: Iterable[str], known: list[Benchmark]) -> list[Benchmark]:
    """Return the benchmarks of these names, in their order; all if there are none.

    Raises:
        SpearError: a name that no benchmark has.
    """
    found = {benchmark.name: benchmark for benchmark in known}
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in found:
            raise SpearError(f"There is no benchmark {name!r}.{suggest_name(name, list(found))} See spear bench list.")
    return [found[name] for name in chosen] or known
