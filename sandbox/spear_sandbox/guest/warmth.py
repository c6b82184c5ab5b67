"""What the warm interpreter imports and tries once, so that no program pays for it."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys

_NAMES = (
    "atexit bisect builtins collections collections.abc copy dataclasses datetime decimal enum fractions functools "
    "heapq io itertools json math operator random re statistics string sys textwrap threading time traceback types "
    "typing warnings"
)
COMMON_MODULES = tuple(_NAMES.split())
"""Small modules of the standard library that models' programs import most."""

KNOWN = frozenset((*COMMON_MODULES, "numpy", "sympy", "mpmath", "scipy", "collections", "spear_sandbox"))
"""Modules whose needs in a forked process are known: reseeded streams of random numbers."""


def warm_up(modules: list[str]) -> None:
    """Import the installed modules, and use those that build tables at their first use."""
    for name in modules:
        # A package that fails here also fails, and reports it, in the program that imports it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if "matplotlib" in sys.modules:
        with contextlib.suppress(Exception):
            _use_matplotlib()
    if "sympy" in sys.modules:
        _use_sympy()
    if "numpy" in sys.modules:
        _use_numpy()


def _use_sympy() -> None:
    import sympy

    x, y = sympy.symbols("x y")
    for expression in (
        lambda: sympy.solve(x**2 - 5 * x + 6, x),
        lambda: sympy.solve([x + y - 3, x - y - 1], [x, y]),
        lambda: sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2),
        lambda: sympy.integrate(x**2, x),
        lambda: sympy.diff(sympy.exp(x) * x, x),
        lambda: sympy.factor(x**2 - 1),
        lambda: sympy.factorint(360),
        lambda: sympy.Matrix([[1, 2], [3, 4]]).det(),
        lambda: str(sympy.sqrt(8) + sympy.Rational(1, 3) + sympy.pi.evalf()),
        lambda: sympy.parse_expr("2*x + 1"),
    ):
        with contextlib.suppress(Exception):
            expression()


def _use_matplotlib() -> None:
    from matplotlib import pyplot

    # Finds the fonts, which takes seconds.
    pyplot.figure()
    pyplot.plot([1, 2], [3, 4])
    pyplot.title("warm")
    pyplot.savefig(io.BytesIO())
    pyplot.close("all")


def _use_numpy() -> None:
    import numpy

    table = numpy.array([[2.0, 1.0], [1.0, 3.0]])
    numpy.linalg.det(table), numpy.linalg.solve(table, [1.0, 2.0]), numpy.linalg.eigvals(table)
    io.StringIO().write(str(table.sum(axis=0)))
