"""Grading final answers: strictly like the authors, as integers, or by math-verify."""

from __future__ import annotations

import re
from enum import Enum

from spear_envs.code.grammar import find_last_box, read_last_box, remove_thoughts

STRICT_TAIL = 100
"""Characters at the end of a response in which the strict grader looks for the box."""

_MAX_ANSWER = 1_000
"""Longest answer that is graded, in characters."""
_ASCII: dict[int, str] = {
    **{0xFF01 + place: chr(0x21 + place) for place in range(94)},
    **{0x1D7CE + place: str(place % 10) for place in range(50)},
    **dict.fromkeys([*range(0x2010, 0x2016), 0x2212], "-"),
}
"""Full-width characters, digits of other mathematical fonts, dashes and the sign of subtraction."""
_NARROW = re.compile(r"\\[,;:!]|[\u2006\u2009-\u200f\u202f\ufeff]|\\(?:display|text|script)style(?![A-Za-z])")
"""What prints nothing, or next to nothing, and may stand within a number."""
_SPACE = re.compile(r"(?:\\(?:q?quad|(?:en|thin|med|thick)?space)(?![A-Za-z])|\\(?=\s)|\\\\|~|\s)+")
_MARKS = re.compile(
    r"(?:(?<![A-Za-z])US)?(?:\\?\$)|\\[()\[\]#]|[€£¥₹✓✔✅]|\\(?:text)?color\s*\{\w+\}"
    r"|\\(?:checkmark|blacksquare)(?![A-Za-z])|(?<=[0-9])_(?:10|\{10\})(?![0-9])"
    r"|\\(?:left|right|[bB]igg?[lr]?|pounds|euro|[Ll]arge|LARGE|[Hh]uge|bf|rm|it|sf|tt|em)(?![A-Za-z])"
)
"""Delimiters of mathematics, signs of currency, sizes, colours, marks of an end, and the usual base."""
_FONT = re.compile(
    r"\\(?:(text\w*|mbox|hbox|mathrm|operatorname)|math\w+|bm|boldsymbol|emph|underline|num)\s*\{([^{}\\]*)\}"
)
_DEGREES = re.compile(r"(?:\{\})?\^?\{?(?:\\circ|\\degree|[°º])(?![A-Za-z])\}?(?: ?[CF](?![A-Za-z]))?|\\?%")
_ANSWER = re.compile(r"(?:\x01?the )?(?:\x01?final )?\x01?answer(?: \x01?is)?:? ?|\(\x01?[A-E]\) ?", re.IGNORECASE)
_MODULUS = re.compile(r" ?(?:\\pmod ?\{? ?\d+ ?\}?|\(? ?(?:\\bmod|\\mod|\x01?mod(?:ulo)?) ?\{?\d+\}? ?\)?)$")
_NUMBER = re.compile(
    r"([+-]?) ?((?:[0-9]{1,3}(?:(?:,|\{,\}) ?[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)|[0-9]+)(?: ?\.0*)?(.*)", re.DOTALL
)
_ENCLOSED = re.compile(r"(?<!\\)\{([0-9]+)\}|^\( ?([+-]?[0-9,]+) ?\)(?! ?[0-9])")
_UNIT = re.compile(r"[ /.·(]*(\x01?)([A-Za-z]+)\.?(?:\^?\{?[23²³]\}?)?")
_SHORT_UNITS = re.compile(
    "[ckmn]m|[km]g|lbs?|oz|ft|in|yd|mi|mph|ml|hrs?|min|sec|day|old|men|usd|eur|ms|kj|kw|hz|sq|cu", re.IGNORECASE
)
_LETTERS_AS_UNITS = frozenset("msghlLdNJWVCF")
NO_UNITS = re.compile(
    r"(hundred|thousand|[mbtr]+illion|lakh|crore|gross|dozen|score|half|halve|third|quarter|fifth"
    r"|fourth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]+(?:teen|tie|illion)th|hundredth|thousandth"
    r"|factorial|squared|cubed|mod|or|and|to|plus|minus|times|over|sqrt|pi|log|sin|cos|tan|exp"
    r"|about|approx\w*|not|more|less|than|at|least|most)s?",
    re.IGNORECASE,
)
"""Words after a number that make it another one."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_GREEK = re.compile(
    r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega|ell)(?![A-Za-z])"
)
_LEFT = re.compile(r"_(?:\{[^{}]*\}|\w)|\^(?:\{[^{}]*\}|\w)|\([^()]*\)")
"""What is left out of the left side of an equation to see whether it is a name: indices and arguments."""


class Grader(str, Enum):
    """Which answers are right."""

    STRICT = "strict"
    """The box in the last 100 characters is the answer, character by character: the authors' grading."""
    INTEGER = "integer"
    """The last box is the integer, however it is written."""
    MATH_VERIFY = "math_verify"
    """The last box is mathematically equal to the answer, according to math-verify, or the same integer."""


def find_answer(response: str, grader: Grader) -> str | None:
    r"""Find the content of the box that a grader reads; None if there is none.

    The strict grader reads the last ``\\boxed{`` of the last 100 characters, thoughts or not. The others take the last
    closed box outside thoughts.
    """
    if grader is Grader.STRICT:
        return read_last_box(response[-STRICT_TAIL:])
    return find_last_box(remove_thoughts(response)[0])


def is_right(answer: str | None, gold: str, grader: Grader) -> bool:
    """Return whether an answer is right.

    Raises:
        SpearError: ``math_verify`` is asked for and not installed.
        EnvFault: its process cannot be started.
    """
    if answer is None:
        return False
    if grader is Grader.STRICT:
        return answer == gold
    if len(answer) > _MAX_ANSWER:
        return False
    if grader is Grader.INTEGER:
        return is_same_integer(answer, gold)
    from spear_envs.code.verifying import open_verifier

    return open_verifier().verify(gold, answer)


def is_same_integer(answer: str, gold: str) -> bool:
    """Return whether both read as one integer."""
    found = read_integer(answer)
    return found is not None and found == read_integer(gold)


def read_integer(text: str) -> str | None:
    r"""Read a text as an integer in its shortest form; None if it is not one.

    Only the writing may differ: the table in docs/code.md has what is ignored. Nothing is computed.
    """
    plain = _NARROW.sub("", text.translate(_ASCII))
    plain = _SPACE.sub(" ", _MARKS.sub(" ", _DEGREES.sub("\x01degrees", plain))).strip("*`'\" ")
    while (bare := _FONT.sub(_mark_words, plain)) != plain:
        plain = bare
    *names, plain = re.split(r"=|\\equiv(?![A-Za-z])", plain)
    if not all(_is_name(name, first=place == 0) for place, name in enumerate(names)):
        return None
    plain = _MODULUS.sub("", plain.strip()).strip()
    plain = _ANSWER.sub("", plain, count=1) if _ANSWER.match(plain) else plain
    while len(plain) > 1 and plain[0] + plain[-1] in ("()", "{}"):
        plain = plain[1:-1].strip()
    found = _NUMBER.fullmatch(_ENCLOSED.sub(r"\1\2", plain))
    if found is None or not _is_unit(re.sub("[{}]", "", found[3])):
        return None
    digits = re.sub(r"[^0-9]", "", found[2]).lstrip("0") or "0"
    return f"-{digits}" if found[1] == "-" and digits != "0" else digits


def _mark_words(font: re.Match[str]) -> str:
    """Return the text of a font command; a mark precedes each word of an upright one, which multiplies no letters."""
    return re.sub(r"(?<![A-Za-z\x01])(?=[A-Za-z])", "\x01", font[2]) if font[1] else font[2]


def _is_name(text: str, *, first: bool) -> bool:
    """Return whether it names a quantity, as ``x``, ``AB``, ``f(2)`` or ``100m+n`` do and ``20`` and ``2x`` do not.

    Only the ``first`` of a chain of equals may have numbers.
    """
    letters = set(re.findall(r"[A-Za-z]", _COMMAND.sub("", text))) | set(_GREEK.findall(text))
    rest = _LEFT.sub("", text)
    return (
        bool(letters)
        and not re.search(r"[<>≤≥≠≈!:~,;]|\b(?:and|or)\b|\\(?:neq?|[lg]eq?|approx|sim|not|pm)(?![A-Za-z])", rest)
        and (not re.search(r"[0-9]", rest) or (first and len(letters) > 1))
    )


def _is_unit(text: str) -> bool:
    """Return whether it is a unit, or nothing: words, which no product of letters may be taken for."""
    place, text = 0, text.rstrip(" )")
    while place < len(text) and (word := _UNIT.match(text, place)) is not None:
        upright = bool(word[1]) or (place > 0 and "/" in word[0])  # km/h
        letters, place = word[2], word.end()
        known = _SHORT_UNITS.fullmatch(letters) or (upright and letters in _LETTERS_AS_UNITS)
        long = len(letters) > 2 if upright else re.search(r"[aeiou]", letters) and len(letters) > 3
        if NO_UNITS.fullmatch(letters) or not (known or long):
            return False
    return place >= len(text)
