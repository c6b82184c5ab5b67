"""Text to index terms, as in Lucene 9's English chain.

UAX #29 word tokens (Lucene's ``StandardTokenizer``, Unicode 12.1), possessive ``'s`` dropped, lower case, 33 stop words
dropped, Porter's stemmer; the same for documents and queries. Tokens never contain an ASCII blank, so texts are split
at blanks first and the terms of words, which repeat, are cached.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import regex

# In each table the first matching suffix decides, whether or not its condition holds.
_STEP_2 = (
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("bli", "ble"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
    ("logi", "log"),
)
_STEP_3 = (
    ("icate", "ic"),
    ("ative", ""),
    ("alize", "al"),
    ("iciti", "ic"),
    ("ical", "ic"),
    ("ful", ""),
    ("ness", ""),
)
# Suffix and number of removed letters: of `sion` and `tion` only `ion`.
_STEP_4 = (
    ("al", 2),
    ("ance", 4),
    ("ence", 4),
    ("er", 2),
    ("ic", 2),
    ("able", 4),
    ("ible", 4),
    ("ant", 3),
    ("ement", 5),
    ("ment", 4),
    ("ent", 3),
    ("sion", 3),
    ("tion", 3),
    ("ou", 2),
    ("ism", 3),
    ("ate", 3),
    ("iti", 3),
    ("ous", 3),
    ("ive", 3),
    ("ize", 3),
)


def stem_word(word: str) -> str:
    """Stem a word in lower case; words of one or two characters are unchanged."""
    if len(word) < 3:
        return word
    # The steps of Porter's paper, with ``bli`` and ``logi`` as in his later code, which Lucene follows.
    word = _cut_inflection(word)
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    word = _cut_e(_cut_suffix(_rewrite(_rewrite(word, _STEP_2), _STEP_3)))
    return word[:-1] if word.endswith("ll") and _measure(_shape(word)) > 1 else word


def _shape(word: str) -> str:
    """Return a letter for each of the word's: ``c`` for a consonant, ``v`` for a vowel."""
    shape = []
    vowel = True  # so that a leading y counts as a consonant
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and not vowel)
        shape.append("v" if vowel else "c")
    return "".join(shape)


def _measure(shape: str) -> int:
    """Compute Porter's m of a word [C](VC)^m[V]."""
    return shape.count("vc")


def _ends_short(word: str, shape: str) -> bool:
    """Test Porter's *o: the word ends consonant, vowel, consonant, and the last is not w, x or y."""
    return shape.endswith("cvc") and word[-1] not in "wxy"


def _cut_inflection(word: str) -> str:
    """Cut plurals, ``-eed``, ``-ed`` and ``-ing`` (steps 1a and 1b)."""
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if word.endswith("eed"):
        return word[:-1] if _measure(_shape(word[:-3])) > 0 else word
    cut = 2 if word.endswith("ed") else 3 if word.endswith("ing") else 0
    if not cut or "v" not in (shape := _shape(word[:-cut])):
        return word
    word = word[:-cut]
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if len(word) > 1 and word[-1] == word[-2] and shape[-1] == "c":
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(shape) == 1 and _ends_short(word, shape) else word


def _rewrite(word: str, table: tuple[tuple[str, str], ...]) -> str:
    for suffix, new in table:
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            return stem + new if _measure(_shape(stem)) > 0 else word
    return word


def _cut_suffix(word: str) -> str:
    for suffix, cut in _STEP_4:
        if word.endswith(suffix):
            return word[:-cut] if _measure(_shape(word[:-cut])) > 1 else word
    return word


def _cut_e(word: str) -> str:
    if not word.endswith("e"):
        return word
    shape = _shape(word[:-1])
    measure = _measure(shape)
    return word[:-1] if measure > 1 or (measure == 1 and not _ends_short(word[:-1], shape)) else word


_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
    was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
MAX_TOKEN = 255
"""Size of the buffer of Lucene's tokenizer in UTF-16 units: longer tokens are cut."""
REMEMBERED_WORDS = 1 << 14
"""Words whose terms a process keeps: some 4 MB."""
_APOSTROPHES = "'\u2019\uff07"

# Underscores alone are not a token; they are matched outside the group, or each position would be tried.
_ASCII_TOKEN = re.compile(
    r"(_*[A-Za-z0-9]\w*(?:(?:(?<=[A-Za-z])[.:'](?=[A-Za-z])|(?<=[0-9])[.,;'](?=[0-9]))\w+)*)|_+", re.ASCII
)
# Letters in the Unicode version of `regex` that are not letters in Unicode 12.1.
_LATER_LETTERS = "\u00b8\u02e5-\u02eb\u055a\u058a\ua708-\ua716"
# Characters that are an emoji token for Lucene 9: measured one by one, since no property of current Unicode has them.
_EMOJI = (
    "©®‼⁉™\u2194-\u2199\u21a9-\u21aa\u231a-\u231b\u2328\u2388\u23cf\u23e9-\u23f3\u23f8-\u23fa\u24d0-\u24e9"
    "\u25aa-\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712"
    "\u2714\u2716\u271d\u2721\u2728\u2733-\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767"
    "\u2795-\u2797\u27a1\u27b0\u27bf\u2934-\u2935\u2b05-\u2b07\u2b1b-\u2b1c\u2b50\u2b55\u2e80-\u2e99"
    "\u2e9b-\u2ef3\u2f00-\u2fd5\u3030\u303d\u309b-\u309c\u30a0\u3297\u3299\u32d0-\u32fe\u3300-\u3357"
    "\U0001f000-\U0001f0ff\U0001f10d-\U0001f10f\U0001f12f-\U0001f149\U0001f150-\U0001f169\U0001f16c-\U0001f189"
    "\U0001f18e\U0001f191-\U0001f19a\U0001f1ad-\U0001f1e5\U0001f200-\U0001f20f\U0001f21a\U0001f22f"
    "\U0001f232-\U0001f23a\U0001f23c-\U0001f23f\U0001f249-\U0001f53d\U0001f546-\U0001f64f\U0001f680-\U0001f6ff"
    "\U0001f774-\U0001f77f\U0001f7d5-\U0001f7ff\U0001f80c-\U0001f80f\U0001f848-\U0001f84f\U0001f85a-\U0001f85f"
    "\U0001f888-\U0001f88f\U0001f8ae-\U0001f8ff\U0001f90c-\U0001f93a\U0001f93c-\U0001f945\U0001f947-\U0001faff"
)


def analyze(text: str) -> list[str]:
    """Return the index terms of a text in order, repeats kept."""
    return [term for word in split_words(text) for term in _recall_word(word)]


def split_words(text: str) -> list[str]:
    """Split a text at blanks, which tokens never cross."""
    # str.split() also splits at U+202F, the only Unicode blank that joins its neighbours.
    return text.split() if "\u202f" not in text else re.split(r"[ \t\n\r\f\v]+", text)


def analyze_word(word: str) -> tuple[str, ...]:
    """Return the index terms of one word."""
    return tuple(term for token in tokenize(word) if (term := _normalize(token)))


def remember_words(limit: int) -> Callable[[str], tuple[str, ...]]:
    """Return :func:`analyze_word` with a memory for at most ``limit`` words; long ones are not kept."""
    recall = lru_cache(maxsize=limit)(analyze_word)
    return lambda word: recall(word) if len(word) <= MAX_TOKEN else analyze_word(word)


_recall_word = remember_words(REMEMBERED_WORDS)


def tokenize(text: str) -> list[str]:
    """Return the tokens of a text in order, case kept."""
    pattern: Any = _ASCII_TOKEN if text.isascii() else compile_unicode()
    if len(text) > MAX_TOKEN // 2:
        return list(_cut_tokens(text, pattern))
    return [token for token in pattern.findall(text) if token]


def _cut_tokens(text: str, pattern: Any) -> Iterator[str]:
    """Yield the tokens of a text of any length, in linear time.

    Lucene cannot look beyond its buffer, so the last letter there is never joined.
    """
    # Lucene counts UTF-16 units: a character beyond U+FFFF takes two.
    units = [0, *accumulate(1 + (c > "\uffff") for c in text)]
    place = 0
    while place < len(text):
        reach = bisect_right(units, units[place] + MAX_TOKEN) - 1  # end of the buffer for a token that begins here
        found = pattern.search(text, place, reach)
        if found and found.start() == place:
            if found[1]:
                yield found[1]
            place = found.end()
        else:
            # The start of a token has up to three characters and may be cut by the end of the buffer.
            later = found.start() if found else reach
            place = later if reach == len(text) else min(later, reach - 2)


def _normalize(token: str) -> str:
    """Return the term of a token; empty for a stop word."""
    # EnglishPossessiveFilter comes before the lower-casing, hence both letters.
    if len(token) > 1 and token[-1] in "sS" and token[-2] in _APOSTROPHES:
        token = token[:-2]
    # One code point at a time, as Java does: İ becomes a plain i, and a final Σ is not ς.
    token = token.lower() if token.isascii() else "".join("i" if c == "\u0130" else c.lower() for c in token)
    return "" if token in STOP_WORDS else stem_word(token)


@cache
def compile_unicode() -> Any:
    """Compile the token pattern for any script, whose first group is the token; on demand, since it is slow."""
    letter = rf"[[\p{{Word_Break=ALetter}}\p{{Word_Break=Hebrew_Letter}}]--[{_LATER_LETTERS}]]"
    extend = r"[\p{Word_Break=Extend}\p{Word_Break=Format}\p{Word_Break=ZWJ}]*"
    digit = r"\p{Word_Break=Numeric}"
    mid_letter = r"[\p{Word_Break=MidLetter}\p{Word_Break=MidNumLet}']"
    mid_number = r"[\p{Word_Break=MidNum}\p{Word_Break=MidNumLet}']"
    connector = r"\p{Word_Break=ExtendNumLet}"
    katakana = r"\p{Word_Break=Katakana}"
    hebrew = r"\p{Word_Break=Hebrew_Letter}"
    return regex.compile(
        rf"""(
          (?:{connector}{extend})*(?:{letter}|{digit}|{katakana}){extend}
          (?:(?<!{katakana}{extend})(?:{letter}|{digit}){extend}
            |{connector}{extend}
            |(?<=(?:{katakana}|{connector}){extend}){katakana}{extend}
            |(?<={letter}{extend}){mid_letter}{extend}(?={letter})
            |(?<={digit}{extend}){mid_number}{extend}(?={digit})
            |(?<={hebrew}{extend})"{extend}(?={hebrew})
            |(?<={hebrew}{extend})'{extend})*
          |(?:\p{{Line_Break=Complex_Context}}{extend})+
          |[\p{{Han}}\p{{Hiragana}}]{extend}
          |(?:[{_EMOJI}]|[\U0001f1e6-\U0001f1ff]{{2}}|[0-9\#*]\ufe0f?\u20e3)
           (?:\ufe0f|[\U0001f3fb-\U0001f3ff]|\u200d\p{{Extended_Pictographic}}|{extend})*
        )|(?:{connector}{extend})+""",
        regex.V1 | regex.VERBOSE,
    )
