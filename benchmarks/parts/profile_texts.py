"""Texts and queries with the term statistics of a collection, in any number.

``webshop_profile.json`` was measured on the 1,000 real products and 300 recorded queries of WebShop,
``search_profile.json`` on real Wikipedia text, cut into passages of 100 words as those of wiki-18 are, and 960
questions of seven benchmarks. They hold no word of these, only how often terms occur.
``python -m benchmarks.parts.profile_texts SHARED`` measures them anew.

- *Document frequencies.* A term that 3 or more of the measured documents hold keeps its share of documents at any size.
  The rest is a power law over millions of rarer terms, with as many occurrences a document as were measured, and the
  exponent with which so many documents would show as many distinct terms as the real ones do.
- *Lengths* are drawn from the measured distribution, in terms. Of a document's terms some are drawn by frequency; the
  rest repeat them, so that a document has as many distinct terms as a real one of its length.
- *Words* are made of syllables, the frequent ones short, and are their own stems. They come with commas, plurals, stop
  words and, in 38 of 100 documents, letters and marks beyond ASCII, so that analysis has its usual work.
- *Queries* take, for each term of a recorded query, a term of the same document frequency.
- *Kin*: terms are drawn independently of each other, unless a collection has articles. Then some tokens of a passage
  come from its article's few words, some from the words of the article's theme, and the rest from all words. Words of
  articles and themes are drawn by the same frequencies, so that these stay what they are. A query is about a passage:
  some of its terms are those of the passage that are about as frequent as the recorded query's.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.analysis import analyze

FOLDER = Path(__file__).parent
RARE = 2
"""Terms of at most so many of the measured documents are taken for a sample of the power law."""
PASSAGE_WORDS = 100
BEYOND_ASCII = 0.38
BATCH = 4_096

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRODUCT_TAILS = ("", "", "", "", "", "", "", "", "", ",", ",", ".", "s", " the", " and", " with")
PASSAGE_TAILS = (
    *[""] * 8,
    ",",
    ",",
    ".",
    ".",
    "s",
    " the",
    " of the",
    " in",
    " and",
    " was a",
    " to the",
    " is",
    " at",
    ")",
)
"""Endings of a term in the texts of either profile."""


@dataclass(frozen=True)
class Profile:
    """Term statistics of a collection."""

    documents: int
    lengths: list[int]
    """Percentiles 0 to 100 of the documents' lengths in terms."""
    mean_length: float
    frequencies: list[tuple[int, int]]
    """A number of documents, and how many terms occur in so many; descending."""
    queries: list[list[int]]
    """For each query the document frequencies of its distinct terms."""

    @property
    def vocabulary(self) -> int:
        """Distinct terms."""
        return sum(terms for _, terms in self.frequencies)


def read_profile(name: str) -> Profile:
    """A measured profile: ``webshop`` or ``search``."""
    content = json.loads((FOLDER / f"{name}_profile.json").read_text("utf-8"))
    content["frequencies"] = [tuple(pair) for pair in content["frequencies"]]
    return Profile(**content)


def measure_profile(texts: list[str], queries: list[str]) -> Profile:
    """The profile of texts, and of queries over them."""
    documents = [analyze(text) for text in texts]
    lengths = np.array([len(terms) for terms in documents])
    frequency = Counter(term for terms in documents for term in set(terms))
    return Profile(
        documents=len(texts),
        lengths=np.percentile(lengths, range(101), method="nearest").tolist(),
        mean_length=float(lengths.mean()),
        frequencies=sorted(Counter(frequency.values()).items(), reverse=True),
        queries=[sorted((frequency[term] for term in set(analyze(query))), reverse=True) for query in queries],
    )


@dataclass(frozen=True)
class Kin:
    """Which terms occur together."""

    passages: int = 6
    """Passages of an article, one after another. Wiki-18 has 21.0 million passages of 3.2 million articles."""
    article_share: float = 0.4
    article_words: int = 40
    """So many tokens of a passage are drawn from so many words of its article."""
    themes: int = 2_000
    theme_share: float = 0.2
    theme_words: int = 500
    """The same for the article's theme."""
    more_draws: float = 1.12
    """So many times as many draws, since words of articles come twice: passages then have as many distinct terms."""
    asked_share: float = 0.6
    """Share of a query's terms that the passage it is about holds."""


@dataclass(frozen=True)
class _Drawn:
    """The tokens of some documents, one document after the other."""

    lengths: Ints
    tokens: Ints
    rng: np.random.Generator
    """For what is drawn further."""


class TextMaker:
    """Draws texts and queries with the statistics of a profile.

    Args:
        profile: what was measured.
        rare_terms: terms of the power law.
        tails: one of them follows each term.
        kin: which terms occur together; without it, terms are independent.
    """

    def __init__(
        self,
        profile: Profile,
        rare_terms: int = 2_000_000,
        tails: Sequence[str] = PRODUCT_TAILS,
        kin: Kin | None = None,
    ) -> None:
        self.profile = profile
        self._rare_terms = rare_terms
        self._tails = tails
        self._kin = kin
        counts = [count for count, terms in profile.frequencies for _ in range(terms) if count > RARE]
        self._common = np.array(counts)
        self._lengths = np.array(profile.lengths)
        shares = np.concatenate([self._common / profile.documents, self._spread_rare()])
        rates = self._find_rates(shares)
        self._drawn = rates.sum()
        self._edges = np.cumsum(rates) / self._drawn

    def _spread_rare(self) -> Floats:
        """Share of documents for each rare term."""
        rare = [(count, terms) for count, terms in self.profile.frequencies if count <= RARE]
        mass = sum(count * terms for count, terms in rare) / self.profile.documents
        seen = sum(terms for _, terms in rare)
        ranks = np.arange(1.0, self._rare_terms + 1) + len(self._common)
        low, high = 0.5, 3.0
        for _ in range(20):
            exponent = (low + high) / 2
            shares: Floats = np.power(ranks, -exponent, dtype=np.float64)
            shares *= mass / shares.sum()
            # A flatter law has more distinct terms in a sample.
            if -np.expm1(-shares * self.profile.documents).sum() > seen:
                low = exponent
            else:
                high = exponent
        self.exponent = (low + high) / 2
        return shares

    def _find_rates(self, shares: Floats) -> Floats:
        """Expected draws of each term in a document of mean length, so that its share of documents comes out."""
        distinct, inverse = np.unique(shares, return_inverse=True)
        # Long documents hold common terms more than once, so the rate is above the share; the rare ones need nothing.
        common = distinct > 2e-3
        relative = np.interp(np.linspace(0, 100, 400), range(101), self._lengths) / self.profile.mean_length
        rates = distinct.copy()
        for _ in range(50):
            held = -np.expm1(-np.outer(rates[common], relative)).mean(1)
            rates[common] *= distinct[common] / held
        return rates[inverse]

    @cached_property
    def words(self) -> list[str]:
        """One word for each term, the frequent ones first."""
        consonants, vowels = "bcdfghjklmnprtvwxz", "aeiou"
        syllables = [c + v for c in consonants for v in vowels]
        size = len(syllables)
        words = [f"{a}k" for a in syllables]
        words += [f"{a}{b}k" for a in syllables for b in syllables]
        words += [f"{a}{b}{c}k" for a in syllables for b in syllables for c in syllables]
        needed = len(self._edges)
        for number in range(needed - len(words)):
            rest, last = divmod(number, size)
            rest, third = divmod(rest, size)
            first, second = divmod(rest, size)
            words.append("".join(syllables[i] for i in (first, second, third, last)) + "p")
        return words[:needed]

    def make_texts(self, number: int, seed: int = 0) -> Iterator[str]:
        """Texts, the same for the same seed; fewer are the beginning of more."""
        words, tails = self.words, self._tails
        for batch in range(-(-number // BATCH)):
            drawn = self.draw_batch(batch, seed)
            ends = drawn.rng.integers(0, len(tails), len(drawn.tokens)).tolist()
            marks = (drawn.rng.random(BATCH) < BEYOND_ASCII).tolist()
            tokens, stop = drawn.tokens.tolist(), 0
            lengths = drawn.lengths[: number - batch * BATCH].tolist()
            for length, marked in zip(lengths, marks, strict=False):
                start, stop = stop, stop + length
                own = tokens[start:stop]
                text = " ".join([words[token] + tails[end] for token, end in zip(own, ends[start:stop], strict=True)])
                if marked:
                    text += f" 【{words[own[0]]}】 {words[own[-1]]}’s {words[own[len(own) // 2]]}®"
                yield text

    def draw_batch(self, batch: int, seed: int = 0) -> _Drawn:
        """Draw ``BATCH`` documents, from number ``batch * BATCH`` on."""
        rng = np.random.default_rng((seed, batch))
        lengths = np.maximum(np.interp(rng.uniform(0, 100, BATCH), range(101), self._lengths), 1).astype(np.int64)
        share = self._drawn / self.profile.mean_length * (self._kin.more_draws if self._kin is not None else 1)
        drawn = np.clip((lengths * share).round().astype(np.int64), 1, lengths)
        draws = self._draw_terms(rng, int(drawn.sum()))
        if self._kin is not None:
            self._share_terms(rng, draws, np.repeat(np.arange(BATCH) // self._kin.passages, drawn))
        first_draw = np.cumsum(drawn) - drawn
        # Token j of a document is its j-th draw, or a copy of one.
        owner = np.repeat(np.arange(BATCH), lengths)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        copies = (rng.random(len(owner)) * drawn[owner]).astype(np.int64)
        return _Drawn(lengths, draws[first_draw[owner] + np.where(place < drawn[owner], place, copies)], rng)

    def _draw_terms(self, rng: np.random.Generator, number: int) -> Ints:
        return np.searchsorted(self._edges, rng.random(number) * self._edges[-1])

    @cached_property
    def _themes(self) -> Ints:
        """(themes, words): the words of each theme."""
        assert self._kin is not None
        size = self._kin.themes, self._kin.theme_words
        return self._draw_terms(np.random.default_rng(0), size[0] * size[1]).reshape(size)

    def _share_terms(self, rng: np.random.Generator, draws: Ints, articles: Ints) -> None:
        """Replace draws by words of their article or its theme; ``articles`` numbers the article of each, from 0."""
        kin = self._kin
        assert kin is not None
        count = int(articles[-1]) + 1
        own = self._draw_terms(rng, count * kin.article_words).reshape(count, -1)
        themes = rng.integers(0, kin.themes, count)
        chance = rng.random(len(draws))
        near, wider = chance < kin.article_share, chance >= 1 - kin.theme_share
        draws[near] = own[articles[near], rng.integers(0, kin.article_words, int(near.sum()))]
        places = rng.integers(0, kin.theme_words, int(wider.sum()))
        draws[wider] = self._themes[themes[articles[wider]], places]

    def make_queries(self, rounds: int, seed: int = 0) -> list[str]:
        """A query for each of the profile's, ``rounds`` times with other terms.

        With kin, each is about one of the first ``BATCH`` texts of the same seed.
        """
        rng = np.random.default_rng(seed)
        starts = {count: int(place) for place, count in reversed(list(enumerate(self._common)))}
        sizes = dict(self.profile.frequencies)
        documents: list[Ints] = []
        if self._kin is not None:
            about = self.draw_batch(0, seed)
            documents = np.split(about.tokens, np.cumsum(about.lengths)[:-1])
        made = []
        for _ in range(rounds):
            for counts in self.profile.queries:
                chosen: dict[int, None] = {}
                held = np.unique(documents[int(rng.integers(BATCH))]) if documents else None
                for count in counts:
                    # The most frequent of the rare terms stand for those that were seen once or twice, or not at all.
                    start, size = (starts[count], sizes[count]) if count > RARE else (len(self._common), 10_000)
                    term = start + int(rng.integers(size))
                    if held is not None and self._kin is not None and rng.random() < self._kin.asked_share:
                        term = self._find_alike(held, count, term)
                    chosen[term] = None
                made.append(" ".join(self.words[number] for number in chosen))
        return made

    def _find_alike(self, held: Ints, count: int, term: int) -> int:
        """Return a term of the document that is about as frequent as ``count``; else ``term``."""
        common = held[held < len(self._common)]
        if count <= RARE:
            rare = held[len(common) :]
            return int(rare[term % len(rare)]) if len(rare) else term
        ratios = np.abs(np.log(self._common[common] / count))
        return int(common[ratios.argmin()]) if len(common) and ratios.min() < np.log(2) else term


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of an xz file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def measure_webshop(shared: Path) -> Profile:
    """Measure the profile of WebShop's products and recorded queries."""
    from spear_envs.webshop.products import read_product

    with lzma.open(shared / "data" / "webshop" / "items_shuffle_1000.json.xz") as file:
        records: list[dict[str, Any]] = json.load(file)
    queries = [row["query"] for row in read_rows(shared / "golden" / "webshop" / "search_cases.jsonl.xz")]
    return measure_profile([read_product(record).index_text for record in records], queries)


def measure_search(shared: Path) -> Profile:
    """Measure the profile of Wikipedia's passages and the questions of seven benchmarks."""
    folder = shared / "data" / "qa"
    words = " ".join(row["contents"] for row in read_rows(folder / "kilt_passages.jsonl.xz")).split()
    texts = [" ".join(words[start : start + PASSAGE_WORDS]) for start in range(0, len(words), PASSAGE_WORDS)]
    return measure_profile(texts, [row["question"] for row in read_rows(folder / "seven_benchmarks.jsonl.xz")])


def main() -> None:
    """Measure the profiles of the folder ``shared`` and write them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("shared", type=Path)
    shared = parser.parse_args().shared
    for name, measure in {"webshop": measure_webshop, "search": measure_search}.items():
        line = json.dumps(measure(shared).__dict__, separators=(",", ":"))
        (FOLDER / f"{name}_profile.json").write_text(f"{line}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
