"""Mathematical equality by math-verify, with its misreadings corrected."""

from __future__ import annotations

import re

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, E, Eq, Expr, I, Set, Union, simplify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from spear_envs.code.grading import is_same_integer

NEAR = 1e-4
"""Relative error of equal numbers: math-verify rounds to six places, where small ones are all 0."""

_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PLAIN = (
    (re.compile(r"√\s*(\d+|\w)"), r"\\sqrt{\1}"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\\?%"), ""),
    (re.compile(r"\\(?:text\w*|math\w+|bm|boldsymbol)\{(-?[\d.,/]+)\}"), r"\1"),
    (re.compile(r"(?<![\w.,/^}])(\d+) +([1-9]\d?)/(\d+)(?![\d/])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])"), r"\1 \\cdot 10^{\2}"),
    *(
        (re.compile(rf"(?<=[\d}}])[\s~]*(\\text\w*\{{)?\s*{word}s?(?![A-Za-z])"), rf" \\cdot 10^{{{power}}} \1")
        for word, power in _POWERS.items()
    ),
    (re.compile(r"(?<=[\d}]) +(?:dollars?|euros?|cents?)(?![A-Za-z])"), ""),
)
"""Writings that math-verify misreads, and others for them."""
_SETTING = re.compile(r"\\(?:text\w*|math\w+)\{([^{}]*)\}")
_BLANK = re.compile(r"\\[ ,:;!]|[\s$~]")
_DECIMAL = re.compile(r"(?:^[+-])?\d+\.\d+")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)")
_NUMBER = re.compile(r"\d[\d.,/]*")
_BASE = re.compile(r"\d_\{?(\d+)")
_PERCENT = re.compile(r"%|percent")
_OR = re.compile(r"\\text\w*\{\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])|\bor\b")
_WHOLE = [LatexExtractionConfig(try_extract_without_anchor=False)]


def is_equal(gold: str, answer: str) -> bool:
    """Return whether an answer equals the gold one; may raise anything, and takes any time."""
    gold = gold.rpartition("####")[2].strip()  # GSM8K's
    if _strip_looks(gold) == _strip_looks(answer):
        return True
    if not re.search("=|equiv|mod", gold) and is_same_integer(answer, gold):
        return True
    base, other = _BASE.search(gold), _BASE.search(answer)
    if other is not None and (base is None or base[1] != other[1]):
        return False
    if _is_equal(gold, answer):
        return True
    if bool(_PERCENT.search(gold)) == bool(_PERCENT.search(answer)):
        return False
    return _is_equal(*(f"\\frac{{{text}}}{{100}}" if _PERCENT.search(text) else text for text in (gold, answer)))


def _read(text: str) -> list[object]:
    """Read a text as a whole, or the only number in it: of ``3 \\vee 5``, math-verify reads the 5."""
    text = _REPEATING.sub(_write_fraction, _undress(text.strip("*`'\" ")))
    for writing, other in _PLAIN:
        text = writing.sub(other, text)
    boxed = f"\\boxed{{{text}}}"
    found: list[object] = parse(boxed, _WHOLE, parsing_timeout=None)
    if (found and isinstance(found[0], Basic)) or len(_NUMBER.findall(_FRACTION.sub("1", text))) != 1:
        return found
    return parse(boxed, parsing_timeout=None)


def _strip_looks(text: str) -> str:
    return _BLANK.sub("", _SETTING.sub(r"\1", text))


def _undress(text: str) -> str:
    """Return a decimal alone where an integer in its place would be read without what it counts."""
    found = _DECIMAL.findall(text)
    return found[0] if len(found) == 1 and is_same_integer(text.replace(found[0], "1"), "1") else text


def _is_named(relation: Relational) -> bool:
    """Return whether it has a free variable, which a function, ``e`` and ``i`` on the left may also be."""
    return bool(relation.free_symbols or relation.atoms(AppliedUndef) or relation.lhs in (E, I))


def _is_claim(found: list[object]) -> bool:
    """Return whether it states a relation without a free variable: math-verify reads ``20=19`` as 19.

    A chain that begins with a name, as ``x=6*7=42``, may state true ones.
    """
    relations = found[0].atoms(Relational) if found and isinstance(found[0], Basic) else set()
    stated = [each for each in relations if not _is_named(each)]
    true = all(isinstance(each, Eq) and simplify(each.lhs.doit() - each.rhs.doit()) == 0 for each in stated)
    return bool(stated) and (len(stated) == len(relations) or not true)


def _is_range(wanted: list[object]) -> bool:
    """Return whether an inequality may be the same set: math-verify takes ``1<x<2`` for the numbers 1 and 2."""
    return bool(wanted) and isinstance(wanted[0], Set) and not wanted[0].is_FiniteSet


def _unite(text: str, found: list[object]) -> list[object]:
    """Return the union of inequalities between which ``or`` stands, else what was found."""
    parts = [_read(part) for part in _OR.split(text)]
    return [Union(*(part[0].as_set() for part in parts))] if len(parts) > 1 else found  # type: ignore[attr-defined]


def _is_near(wanted: list[object], found: list[object]) -> bool:
    """Return whether two numbers are as near as their sizes ask for; true of all but numbers."""
    one, other = (each[0].rhs if isinstance(each[0], Eq) else each[0] for each in (wanted, found))
    if not (isinstance(one, Expr) and isinstance(other, Expr) and one.is_number and other.is_number):
        return True
    if one == other:  # infinite ones, too
        return True
    one, other = one.doit(), other.doit()
    return bool(abs((one - other).evalf()) <= NEAR * max(abs(one.evalf()), abs(other.evalf())))


def _is_equal(gold: str, answer: str) -> bool:
    wanted, found = _read(gold), _read(answer)
    if _is_claim(found) and not _is_claim(wanted):
        return False
    if _is_range(wanted):
        found = _unite(answer, found)
    elif _is_range(found):
        wanted = _unite(gold, wanted)
    same = verify(wanted, found, allow_set_relation_comp=_is_range(wanted), timeout_seconds=None)
    return bool(same) and _is_near(wanted, found)


def _write_fraction(found: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    whole, fixed, again = found[1], found[2], found[3] or found[4]
    begin = int(f"0{whole}{fixed}")
    denominator = 10 ** len(fixed) * (10 ** len(again) - 1)
    return f"\\frac{{{int(f'{begin}{again}') - begin}}}{{{denominator}}}"
