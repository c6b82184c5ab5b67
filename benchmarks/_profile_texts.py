"""Texts and queries with the term statistics of a collection, in any number.

``webshop_profile.json`` was measured on the 1,000 real products and 300 recorded queries of WebShop,
``search_profile.json`` on real Wikipedia text, cut into passages of 100 words as those of wiki-18 are, and 960
questions of seven benchmarks. They hold no word of these, only how often terms occur.
``python -m benchmarks._profile_texts SHARED`` measures them anew.

- *Document frequencies.* A term that 3 or more of the measured documents hold keeps its share of documents at any size.
  The rest is a power law over millions of rarer terms, with as many occurrences a document as were measured, and the
  exponent with which so many documents would show as many distinct terms as the real ones do.
- *Lengths* are drawn from the measured distribution, in terms. Of a document's terms some are drawn by frequency; the
  rest repeat them, so that a document has as many distinct terms as a real one of its length.
- *Words* are made of syllables, the frequent ones short, and are their own stems. They come with commas, plurals, stop
  words and, in 38 of 100 documents, letters and marks beyond ASCII, so that analysis has its usual work.
- *Queries* take, for each term of a recorded query, a term of the same document frequency. Terms are independent of
  each other, so that fewer documents hold several of a query's terms than hold them in real text.
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
"""What follows a term in the texts of either profile."""


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

    @property
    def mean_distinct(self) -> float:
        """Distinct terms of a document."""
        return sum(count * terms for count, terms in self.frequencies) / self.documents


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


class TextMaker:
    """Draws texts and queries with the statistics of a profile.

    Args:
        profile: what was measured.
        rare_terms: terms of the power law.
        tails: one of them follows each term.
    """

    def __init__(self, profile: Profile, rare_terms: int = 2_000_000, tails: Sequence[str] = PRODUCT_TAILS) -> None:
        self.profile = profile
        self._rare_terms = rare_terms
        self._tails = tails
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
        """Texts, the same for the same seed."""
        rng = np.random.default_rng(seed)
        words, tails = self.words, self._tails
        for start in range(0, number, BATCH):
            size = min(BATCH, number - start)
            for tokens, ends, marked in self._draw_documents(rng, size):
                text = " ".join([words[token] + tails[end] for token, end in zip(tokens, ends, strict=True)])
                if marked:
                    text += f" 【{words[tokens[0]]}】 {words[tokens[-1]]}’s {words[tokens[len(tokens) // 2]]}®"
                yield text

    def _draw_documents(self, rng: np.random.Generator, size: int) -> Iterator[tuple[list[int], list[int], bool]]:
        lengths = np.maximum(np.interp(rng.uniform(0, 100, size), range(101), self._lengths), 1).astype(np.int64)
        drawn = np.clip((lengths * (self._drawn / self.profile.mean_length)).round().astype(np.int64), 1, lengths)
        draws = np.searchsorted(self._edges, rng.random(int(drawn.sum())) * self._edges[-1])
        first_draw = np.cumsum(drawn) - drawn
        # Token j of a document is its j-th draw, or a copy of one.
        owner = np.repeat(np.arange(size), lengths)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        copies = (rng.random(len(owner)) * drawn[owner]).astype(np.int64)
        tokens = draws[first_draw[owner] + np.where(place < drawn[owner], place, copies)].tolist()
        tails = rng.integers(0, len(self._tails), len(owner)).tolist()
        marked = (rng.random(size) < BEYOND_ASCII).tolist()
        end = 0
        for length, mark in zip(lengths.tolist(), marked, strict=True):
            start, end = end, end + length
            yield tokens[start:end], tails[start:end], mark

    def make_queries(self, rounds: int, seed: int = 0) -> list[str]:
        """A query for each of the profile's, ``rounds`` times with other terms."""
        rng = np.random.default_rng(seed)
        starts = {count: int(place) for place, count in reversed(list(enumerate(self._common)))}
        sizes = dict(self.profile.frequencies)
        made = []
        for _ in range(rounds):
            for counts in self.profile.queries:
                chosen: dict[int, None] = {}
                for count in counts:
                    # The most frequent of the rare terms stand for those that were seen once or twice, or not at all.
                    start, size = (starts[count], sizes[count]) if count > RARE else (len(self._common), 10_000)
                    chosen[start + int(rng.integers(size))] = None
                made.append(" ".join(self.words[number] for number in chosen))
        return made


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of an xz file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def measure_webshop(shared: Path) -> Profile:
    """Of WebShop's products and recorded queries."""
    from spear_envs.webshop.products import read_product

    with lzma.open(shared / "data" / "webshop" / "items_shuffle_1000.json.xz") as file:
        records: list[dict[str, Any]] = json.load(file)
    queries = [row["query"] for row in read_rows(shared / "golden" / "webshop" / "search_cases.jsonl.xz")]
    return measure_profile([read_product(record).index_text for record in records], queries)


def measure_search(shared: Path) -> Profile:
    """Of Wikipedia's passages and the questions of seven benchmarks."""
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
