"""Porter's stemmer of 1980 with its author's two later rules (``bli`` → ``ble``, ``logi`` → ``log``), as in Lucene.

Porter, "An algorithm for suffix stripping", Program 14(3), 1980. Everything but a, e, i, o, u, and y after a consonant
counts as a consonant, also digits and é.
"""

from __future__ import annotations

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
    word = _cut_inflection(word)
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    word = _cut_e(_cut_suffix(_rewrite(_rewrite(word, _STEP_2), _STEP_3)))
    return word[:-1] if word.endswith("ll") and _measure(_shape(word)) > 1 else word


def _shape(word: str) -> str:
    """A letter for each of the word's: ``c`` for a consonant, ``v`` for a vowel."""
    shape = []
    vowel = True  # so that a leading y counts as a consonant
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and not vowel)
        shape.append("v" if vowel else "c")
    return "".join(shape)


def _measure(shape: str) -> int:
    """Porter's m of a word [C](VC)^m[V]."""
    return shape.count("vc")


def _ends_short(word: str, shape: str) -> bool:
    """Porter's *o: the word ends consonant, vowel, consonant, and the last is not w, x or y."""
    return shape.endswith("cvc") and word[-1] not in "wxy"


def _cut_inflection(word: str) -> str:
    """Plurals, ``-eed``, ``-ed`` and ``-ing`` (steps 1a and 1b)."""
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
