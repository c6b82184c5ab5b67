"""Merging the chunks of a build: a stretch of neighbouring terms at a time, from every chunk, packed and appended.

Memory holds some million pairs and their terms, however large the index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.chunks import Chunk
from spear_envs.bm25.files import ArrayWriter, finish_index
from spear_envs.bm25.packing import PADDING, count_blocks, find_factors, pack_pairs
from spear_envs.bm25.postings import pack_terms, unpack_terms

STRETCH_PAIRS = 1 << 22
"""Pairs merged at a time, approximately; a single term may have more."""


def merge_chunks(chunks: Sequence[Chunk], folder: Path) -> None:
    """Write the index of all chunks, whose documents follow one another."""
    terms_total, filled = sum(chunk.terms_total for chunk in chunks), sum(chunk.filled for chunk in chunks)
    norms = np.concatenate([np.empty(0, np.uint8), *(chunk.read("norms") for chunk in chunks)])
    factors = find_factors(terms_total, filled)[norms]
    with ArrayWriter(folder) as writer:
        writer.append("norms", norms)
        writer.append("term_ends", np.zeros(1))
        writer.append("starts", np.zeros(1))
        terms, letters, blocks, offset = 0, 0, 0, 0
        for stretch in _cut_stretches(chunks):
            term_bytes, term_ends = pack_terms(stretch.terms)
            pairs = pack_pairs(stretch.frequencies, stretch.documents, stretch.counts, factors, offset)
            writer.append("term_bytes", term_bytes)
            writer.append("term_ends", term_ends[1:] + letters)
            writer.append("frequencies", stretch.frequencies)
            writer.append("starts", np.cumsum(count_blocks(stretch.frequencies)) + blocks)
            writer.append("mapped", pairs.mapped + np.uint32(terms))
            for array in ("peaks", "lasts", "blocks", "data", "maps"):
                writer.append(array, getattr(pairs, array))
            terms += len(stretch.terms)
            letters += len(term_bytes)
            blocks += len(pairs.blocks)
            offset += len(pairs.data)
        writer.append("data", np.zeros(PADDING))
    finish_index(folder, terms_total, filled)


@dataclass(frozen=True)
class _Stretch:
    """The pairs of some neighbouring terms, of one chunk or of all: T terms and P pairs."""

    terms: list[bytes]
    frequencies: npt.NDArray[np.int64]
    documents: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint16]

    @classmethod
    def read(cls, chunk: Chunk, start: int, stop: int, first: int) -> _Stretch:
        """Read the terms from ``start`` to before ``stop``; ``first`` is the number of the chunk's first document."""
        ends = chunk.read("term_ends", start, stop + 1)
        starts = chunk.read("starts", start, stop + 1)
        pairs = int(starts[0]), int(starts[-1])
        return cls(
            terms=unpack_terms(chunk.read("term_bytes", int(ends[0]), int(ends[-1])), ends - ends[0]),
            frequencies=np.diff(starts),
            documents=chunk.read("documents", *pairs) + np.uint32(first),
            counts=chunk.read("counts", *pairs),
        )


def _cut_stretches(chunks: Sequence[Chunk]) -> Iterator[_Stretch]:
    """All terms in ascending order."""
    borders = _choose_borders(chunks)
    cuts = [_find_terms(chunk, borders) for chunk in chunks]
    firsts = np.cumsum([0] + [chunk.sizes["norms"] for chunk in chunks])
    for column in range(len(borders) + 1):
        parts = [
            _Stretch.read(chunk, cuts[row][column], cuts[row][column + 1], int(firsts[row]))
            for row, chunk in enumerate(chunks)
        ]
        if parts := [part for part in parts if part.terms]:
            yield _join_parts(parts)


def _join_parts(parts: list[_Stretch]) -> _Stretch:
    """Join the pairs of each term, part after part."""
    terms = sorted(set().union(*(part.terms for part in parts)))
    numbers = {term: number for number, term in enumerate(terms)}
    ranks = [np.fromiter(map(numbers.__getitem__, part.terms), np.int64, len(part.terms)) for part in parts]
    frequencies = np.zeros(len(terms), np.int64)
    for part, rank in zip(parts, ranks, strict=True):
        frequencies[rank] += part.frequencies
    places = np.cumsum(frequencies) - frequencies
    documents = np.empty(int(frequencies.sum()), np.uint32)
    counts = np.empty(len(documents), np.uint16)
    for part, rank in zip(parts, ranks, strict=True):
        starts = np.cumsum(part.frequencies) - part.frequencies
        targets = np.repeat(places[rank] - starts, part.frequencies) + np.arange(len(part.documents))
        documents[targets] = part.documents
        counts[targets] = part.counts
        places[rank] += part.frequencies
    return _Stretch(terms, frequencies, documents, counts)


def _choose_borders(chunks: Sequence[Chunk]) -> list[bytes]:
    """Terms that begin a stretch, ascending, with about ``STRETCH_PAIRS`` pairs between two of them."""
    step = max(STRETCH_PAIRS // (2 * max(len(chunks), 1)), 1)
    samples = []
    for chunk in chunks:
        starts, ends = chunk.read("starts"), chunk.read("term_ends")
        text = chunk.read("term_bytes")
        places = np.unique(np.searchsorted(starts, np.arange(step, int(starts[-1]), step)))
        places = places[places < len(starts) - 1]
        for place, pairs in zip(places.tolist(), np.diff(starts[places], prepend=0).tolist(), strict=True):
            samples.append((text[ends[place] : ends[place + 1]].tobytes(), pairs))
    borders, pairs_since = [], 0
    samples.sort()
    for (term, pairs), (following, _) in pairwise([*samples, (b"", 0)]):
        pairs_since += pairs
        if pairs_since >= STRETCH_PAIRS // 2 and term != following:
            borders.append(term)
            pairs_since = 0
    return borders


def _find_terms(chunk: Chunk, borders: list[bytes]) -> list[int]:
    """Starts of the stretches among the chunk's terms, and the end."""
    ends, text = chunk.read("term_ends"), chunk.read("term_bytes")
    terms = range(len(ends) - 1)
    found = [bisect_left(terms, border, key=lambda i: text[ends[i] : ends[i + 1]].tobytes()) for border in borders]
    return [0, *found, len(terms)]
