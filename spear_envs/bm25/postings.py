"""The arrays of an index, made from texts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.analysis import analyze_word, split_words

MAX_COUNT = 65_535
"""The largest count of a term in one document."""


def _list_quantized_lengths() -> npt.NDArray[np.int64]:
    """List the 256 document lengths that Lucene can store in a byte: exact below 40, then four significant bits."""
    # Lucene's SmallFloat: up to 24 free values are exact; above them a byte holds three bits after the leading one.
    codes = np.arange(256 - 24)
    shifts = np.maximum((codes >> 3) - 1, 0)
    coarse = 24 + np.where(codes < 8, codes, ((codes & 7) | 8) << shifts)
    return np.concatenate([np.arange(24), coarse])


QUANTIZED_LENGTHS = _list_quantized_lengths()
"""int64 (256,): the document length of each byte."""


def quantize_lengths(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the byte of the greatest storable length up to each length."""
    return (np.searchsorted(QUANTIZED_LENGTHS, lengths, side="right") - 1).astype(np.uint8)


@dataclass(frozen=True)
class Postings:
    """An inverted index of N documents, T terms and P pairs of a term and a document with it.

    Documents are numbered from 0 in their order.
    """

    term_bytes: npt.NDArray[np.uint8]
    """The terms in UTF-8, concatenated in ascending order of their bytes."""
    term_ends: npt.NDArray[np.int64]
    """(T + 1,): term i is ``term_bytes[term_ends[i] : term_ends[i + 1]]``."""
    starts: npt.NDArray[np.int64]
    """(T + 1,): the pairs of term i are ``starts[i]`` to ``starts[i + 1]``."""
    documents: npt.NDArray[np.uint32]
    """(P,): number of the document, ascending within a term."""
    counts: npt.NDArray[np.uint16]
    """(P,): how often the term occurs there, at most 65,535."""
    norms: npt.NDArray[np.uint8]
    """(N,): lengths of the documents in terms, quantised."""
    terms_total: int
    """Sum of the lengths, not quantised."""
    filled: int
    """Documents with at least one term."""


NumberWords = Callable[[Iterable[str], Callable[[str], tuple[int, ...]]], tuple[bytearray, bytearray]]
"""Turns the words of texts into numbers of terms, as :func:`number_with_python`."""


def number_with_python(
    texts: Iterable[str], find_numbers: Callable[[str], tuple[int, ...]], /
) -> tuple[bytearray, bytearray]:
    """Return the numbers of all words (uint32), and the end of each text among them (int64).

    Args:
        texts: split into words at blanks.
        find_numbers: called once for each word.
    """
    numbers = cache(find_numbers)
    occurrences, ends = array("I"), array("q")
    for text in texts:
        occurrences.extend(chain.from_iterable(map(numbers, split_words(text))))
        ends.append(len(occurrences))
    return bytearray(occurrences), bytearray(ends)


def choose_numbering() -> NumberWords:
    """Choose the compiled loop of ``_words.c``, or Python's if it was not compiled."""
    try:
        from spear_envs.bm25._words import number_words
    except ImportError:
        return number_with_python
    return number_words


def make_postings(
    texts: Iterable[str],
    analyze_word: Callable[[str], tuple[str, ...]] = analyze_word,
    number_words: NumberWords | None = None,
) -> Postings:
    """Index texts in memory, about 40 bytes a term occurrence at the peak.

    Args:
        texts: one for each document.
        analyze_word: gives the terms of a word; pass a cached one if more texts will follow.
        number_words: the compiled loop by default, if there is one.
    """
    known: dict[str, int] = {}

    def find_numbers(word: str) -> tuple[int, ...]:
        return tuple(known.setdefault(term, len(known)) for term in analyze_word(word))

    found, ends = (number_words or choose_numbering())(texts, find_numbers)
    occurrences = np.frombuffer(found, np.uint32)
    lengths = np.diff(np.frombuffer(ends, np.int64), prepend=0)
    terms = [term.encode("utf-8", "surrogatepass") for term in known]
    # By their bytes, which the binary search of a query compares.
    order = sorted(range(len(terms)), key=terms.__getitem__)
    ranks = np.empty(len(terms), np.int64)
    ranks[order] = np.arange(len(terms))
    owners, documents, counts = _count_pairs(ranks, occurrences, lengths)
    term_bytes, term_ends = pack_terms([terms[number] for number in order])
    return Postings(
        term_bytes=term_bytes,
        term_ends=term_ends,
        starts=np.searchsorted(owners, np.arange(len(terms) + 1, dtype=owners.dtype)).astype(np.int64),
        documents=documents,
        counts=counts,
        norms=quantize_lengths(lengths),
        terms_total=int(lengths.sum()),
        filled=int(np.count_nonzero(lengths)),
    )


def _count_pairs(
    ranks: npt.NDArray[np.int64], occurrences: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """Return rank of the term, document and count of each pair, ordered by the first two."""
    # One number for each occurrence, term before document, in as few bytes as possible: sorting orders the pairs and
    # groups equal ones.
    size = max(len(lengths), 1)
    kind = np.min_scalar_type(max(len(ranks), 1) * size)
    keys = ranks.astype(kind)[occurrences]
    keys *= kind.type(size)
    keys += np.repeat(np.arange(len(lengths), dtype=kind), lengths)
    keys.sort()
    is_first = np.ones(len(keys), bool)
    is_first[1:] = keys[1:] != keys[:-1]
    firsts = np.flatnonzero(is_first)
    counts = np.minimum(np.diff(firsts, append=len(keys)), MAX_COUNT).astype(np.uint16)
    owners, documents = np.divmod(keys[firsts], kind.type(size))
    return owners, documents.astype(np.uint32), counts


def pack_terms(terms: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Concatenate terms; return their bytes and, after a leading 0, their ends."""
    ends = np.zeros(len(terms) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, terms), np.int64, len(terms)), out=ends[1:])
    return np.frombuffer(b"".join(terms), np.uint8), ends


def unpack_terms(term_bytes: npt.NDArray[np.uint8], term_ends: npt.NDArray[np.int64]) -> list[bytes]:
    """Invert :func:`pack_terms`."""
    text, ends = term_bytes.tobytes(), term_ends.tolist()
    return [text[start:end] for start, end in pairwise(ends)]
