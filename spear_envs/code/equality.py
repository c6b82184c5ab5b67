"""Mathematical equality by math-verify, with its misreadings corrected."""

from __future__ import annotations

import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, E, Eq, Expr, FiniteSet, I, Interval, Set, Tuple, Union, simplify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from spear_envs.code.grading import NO_UNITS, is_same_integer

NEAR = 1e-4
"""Relative error of equal numbers: math-verify rounds to six places, where small ones are all 0."""

_SIGNS = str.maketrans(
    {"∞": "\\infty ", "²": "^{2}", "³": "^{3}", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}"}
)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PLAIN = (
    (re.compile(r"√\s*[({]([^(){}]*)[)}]"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\d+|\w)"), r"\\sqrt{\1}"),
    (
        re.compile(
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])(?:\s*\^\s*\{?\d\}?)?\s*(?:\\left\s*)?(?:[({]\s*)?)"
            r"(\d+(?:\.\d+)?)\s*(?:\^\s*)?(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|°)"
        ),
        r"\1\\frac{\2\\pi}{180}",
    ),
    (re.compile(r"(\\[dt]?frac\s*(?:\{[^{}]*\}|\d)?)\s*\\pi(?![A-Za-z])"), r"\1{\\pi}"),
    (re.compile(r"^(?!.*\\pm.*\\pm)(.*\\[dt]?frac\s*\{(?:[^{}]|\{[^{}]*\})*)\\pm(.*)", re.DOTALL), r"\1+\2, \1-\2"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\\?%|\\text\w*\{\s*percent\s*\}|\bpercent\b"), ""),
    (re.compile(r"\\(?:text\w*|math\w+|bm|boldsymbol)\{(-?[\d.,/]+)\}"), r"\1"),
    (re.compile(r"(?<![\w.,/^}])(\d+) +([1-9]\d?)/(\d+)(?![\d/])"), r"\1\\frac{\2}{\3}"),
    (
        # Not 2e-1, which is 2e less 1.
        re.compile(r"(?<![\w.\\])(\d+\.\d+|1(?=[eE])|\d+(?=[eE](?:\d|[+-]0)))[eE]([+-]?\d+)(?![\w.])"),
        r"\1 \\cdot 10^{\2}",
    ),
    *(
        (re.compile(rf"(?<=[\d}}])[\s~]*(\\text\w*\{{)?\s*{word}s?(?![A-Za-z])"), rf" \\cdot 10^{{{power}}} \1")
        for word, power in _POWERS.items()
    ),
    (re.compile(r"(?<=[\d}]) +(?:dollars?|euros?|cents?)(?![A-Za-z])"), ""),
)
"""Writings that math-verify misreads, and others for them."""
_SETTING = re.compile(r"\\(?:text\w*|math\w+)\{([^{}]*)\}")
_BLANK = re.compile(r"(?<=\d)((?:\\[ ,:;!]|[\s$~])+)(?=\d)|\\[ ,:;!]|[\s$~]")
"""What prints nothing; between two digits, as in ``1 1/2``, it is the group."""
_DECIMAL = re.compile(r"(?:^[+-])?\d+\.\d+")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)")
_NUMBER = re.compile(r"\d[\d.,/]*")
_BASE = re.compile(r"\d_\{?(?!10(?!\d))(\d+)")
_PERCENT = re.compile(r"%|percent")
_OR = re.compile(r"\\text\w*\{\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])|\bor\b")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?<=[A-Za-z]{2} )(?:squared|cubed))[A-Za-z]+")
"""Without the end of a unit, as in ``5 cm squared``."""
_READ_WORDS = frozenset(
    {
        *("about", "approx", "approximately", "and", "or", "to", "at", "times", "quarter", "quarters"),
        *("sqrt", "pi", "log", "sin", "cos", "tan", "exp", "mod", *_POWERS),
    }
)
"""Words that are read, or mean nothing by themselves."""
_RELATION = re.compile(r"[\s$]*(?:\\(?:n?[lg]eq(?:slant)?|[lg]e|[lg]t|neq?|not)(?![A-Za-z])|[≤≥≠])")
_OPENING = re.compile(r"[\s$]*(?:\\left\s*)?(\(|\\\{)")
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
    if _list_words(answer) - _list_words(gold) or (_RELATION.match(answer) and not _RELATION.match(gold)):
        return False  # math-verify leaves them out
    if _is_equal(gold, answer):
        return True
    if bool(_PERCENT.search(gold)) == bool(_PERCENT.search(answer)):
        return False
    return _is_equal(*(f"\\frac{{{text}}}{{100}}" if _PERCENT.search(text) else text for text in (gold, answer)))


def _list_words(text: str) -> set[str]:
    """List the words that make a number another one, as in ``5 dozen`` and ``5 or more``."""
    words = {word.lower() for word in _WORD.findall(text)}
    if words.isdisjoint(("or", "than", "no", "not")):
        words -= {"more", "less"}  # as in ``5 more apples``
    return {word for word in words if NO_UNITS.fullmatch(word) and _READ_WORDS.isdisjoint((word, word.rstrip("s")))}


def _read(text: str) -> list[object]:
    """Read a text as a whole, or the only number in it: of ``3 \\vee 5``, math-verify reads the 5."""
    text = _REPEATING.sub(_write_fraction, _undress(text.translate(_SIGNS).strip("*`'\" ")))
    for writing, other in _PLAIN:
        text = writing.sub(other, text)
    boxed = f"\\boxed{{{text}}}"
    found: list[object] = parse(boxed, _WHOLE, parsing_timeout=None)
    if found and isinstance(found[0], FiniteSet) and len(found[0]) == 1:
        (only,) = found[0]
        return [only, *found[1:]] if isinstance(only, Interval | Tuple) else found
    if (found and isinstance(found[0], Basic)) or len(_NUMBER.findall(_FRACTION.sub("1", text))) != 1:
        return found
    return parse(boxed, parsing_timeout=None)


def _strip_looks(text: str) -> str:
    return _BLANK.sub(lambda blank: " " if blank[1] else "", _SETTING.sub(r"\1", text))


def _undress(text: str) -> str:
    """Return a decimal alone where an integer in its place would be read without what it counts."""
    found = _DECIMAL.findall(text)
    return found[0] if len(found) == 1 and is_same_integer(text.replace(found[0], "98765"), "98765") else text


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
    if len(parts) < 2:
        return found
    sets: list[Any] = [part[0] for part in parts]
    return [Union(*(each if isinstance(each, Set) else each.as_set() for each in sets))]


def _take_values(wanted: list[object], found: list[object]) -> list[Expr]:
    """Return both as values, an equation as its right side; empty if one is none, or if their left sides differ."""
    both: list[Any] = [*wanted[:1], *found[:1]]
    values = [each.rhs if isinstance(each, Eq) else each for each in both]
    is_alike = len(both) == 2 and len({each.lhs for each in both if isinstance(each, Eq)}) < 2
    return values if is_alike and all(isinstance(each, Expr) for each in values) else []


def _is_near(wanted: list[object], found: list[object]) -> bool:
    """Return whether two numbers are as near as their sizes ask for; true of all but numbers."""
    values = _take_values(wanted, found)
    if not values or not all(each.is_number for each in values) or values[0] == values[1]:  # infinite ones, too
        return True
    one, other = (each.doit() for each in values)
    return bool(abs((one - other).evalf()) <= NEAR * max(abs(one.evalf()), abs(other.evalf())))


def _is_same_complex(wanted: list[object], found: list[object]) -> bool:
    """Return whether two values are equal with i as the imaginary unit, which is a variable to math-verify."""
    values = _take_values(wanted, found)
    units = {name: I for each in values for name in each.free_symbols if str(name) == "i"}
    return bool(units) and bool(verify(*(each.subs(units) for each in values), timeout_seconds=None))


def _is_ordered(text: str, found: list[object]) -> bool | None:
    """Return whether it is written as a tuple or interval, True, or as a set, False; None for anything else."""
    opening = _OPENING.match(text)
    if opening is None or not found or not isinstance(found[0], Interval | Tuple | FiniteSet):
        return None
    is_ordered = opening[1] == "("
    return is_ordered if is_ordered != isinstance(found[0], FiniteSet) else None


def _is_equal(gold: str, answer: str) -> bool:
    wanted, found = _read(gold), _read(answer)
    if _is_claim(found) and not _is_claim(wanted):
        return False
    if {_is_ordered(gold, wanted), _is_ordered(answer, found)} == {True, False}:
        return False
    if _is_range(wanted):
        found = _unite(answer, found)
    elif _is_range(found):
        wanted = _unite(gold, wanted)
    same = verify(wanted, found, allow_set_relation_comp=_is_range(wanted), timeout_seconds=None)
    return _is_near(wanted, found) if same else _is_same_complex(wanted, found)


def _write_fraction(found: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    whole, fixed, again = found[1], found[2], found[3] or found[4]
    begin = int(f"0{whole}{fixed}")
    denominator = 10 ** len(fixed) * (10 ** len(again) - 1)
    return f"\\frac{{{int(f'{begin}{again}') - begin}}}{{{denominator}}}"
