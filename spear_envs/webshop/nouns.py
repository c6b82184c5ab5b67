"""The nouns of a product's title, which the type of a purchase is judged by."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spear_envs.core.errors import SpearError

__all__ = ["Tagger", "find_tagger", "rule_nouns", "spacy_nouns"]

RULE = "rule"
SPACY = "spacy:"
_WORD = re.compile(r"[A-Za-z]{3,}")


class Tagger(NamedTuple):
    """A function from a title to its nouns, and the name that manifests and fingerprints know it by."""

    name: str
    tag: Callable[[str], Sequence[str]]


def rule_nouns(title: str) -> list[str]:
    """Nouns of a title in lower case, in order, repeats kept."""
    return [word.lower() for word in _WORD.findall(title)]


def spacy_nouns(model: str) -> Callable[[str], list[str]]:
    """A tagger."""
    raise SpearError(model)


def find_tagger(title_nouns: str | Callable[[str], Sequence[str]]) -> Tagger:
    """The tagger of a name, or a function as one.

    Raises:
        SpearError: no such tagger.
    """
    if callable(title_nouns):
        module, name = getattr(title_nouns, "__module__", "?"), getattr(title_nouns, "__qualname__", "?")
        return Tagger(f"custom:{module}.{name}", title_nouns)
    if title_nouns == RULE:
        return Tagger(RULE, rule_nouns)
    if isinstance(title_nouns, str) and title_nouns.startswith(SPACY):
        return Tagger(title_nouns, spacy_nouns(title_nouns.removeprefix(SPACY)))
    raise SpearError(f"title_nouns={title_nouns!r} is not valid: give 'rule', 'spacy:MODEL' or a function of a title.")
