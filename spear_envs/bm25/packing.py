"""Postings as they are stored and searched: blocks of 128 pairs, in as few bits as each block needs.

A block of n pairs is n - 1 gaps between document numbers, less 1, and then n counts, less 1. The last document of each
block is in a separate array, so that blocks can be skipped unread, and a term of one document has no gaps. Numbers of w
bits are stored from the lowest bit of the first byte on, so eight of them take w bytes.

A term in at least one of 32 documents has a map instead of gaps: a bit for each document. A search processes 64
documents of it at a time, and its blocks hold only counts.

A pair scores g(x) = weight - weight / (1 + x) with x = count * factor of the document's length, all in float32. Each
operation is monotonic, and so is g: at the greatest x of a block, rounded up, g is an upper bound of the scores in the
block for every weight. The bound is a byte: a float32 with five bits of mantissa, from 0.25 to 62, or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.postings import QUANTIZED_LENGTHS, Postings

K1 = np.float32(0.9)
B = np.float32(0.4)
BLOCK = 128
"""Pairs of a block; the last block of a term may have fewer."""
PADDING = 1_024
"""Zero bytes after the last block, so that reading a full block never leaves the data."""
OFFSET_BITS, GAP_BITS, COUNT_BITS, BOUND_BITS = 40, 6, 5, 8
"""Fields of a block's uint64, from the lowest bit on: offset of its data, bits of a gap, bits of a count, bound."""
GAP_SHIFT = OFFSET_BITS
COUNT_SHIFT = GAP_SHIFT + GAP_BITS
BOUND_SHIFT = COUNT_SHIFT + COUNT_BITS
MANTISSA_SHIFT = 23 - 5
LOWEST_BOUND = int(np.float32(0.25).view(np.uint32)) >> MANTISSA_SHIFT
MAPPED_SHARE = 32
"""A term has a map if at least one in this many documents holds it."""
MAP_SPAN = 256
"""Maps are padded to a multiple of this many documents, four words."""
DAMAGE = "document numbers are not ascending"


BOUNDS = ((np.arange(256, dtype=np.uint32) + LOWEST_BOUND) << MANTISSA_SHIFT).view(np.float32)
"""float32 (256,): the bound of each code, ascending."""
BOUNDS[-1] = np.inf


@dataclass(frozen=True)
class PackedPairs:
    """The pairs of T terms in B blocks; those of a term follow one another, and so do the terms."""

    lasts: npt.NDArray[np.uint32]
    """(B,): number of the block's last document."""
    blocks: npt.NDArray[np.uint64]
    """(B,): offset of its bytes, bits of a gap and of a count, and the code of its bound."""
    data: npt.NDArray[np.uint8]
    """Gaps and counts."""
    peaks: npt.NDArray[np.uint8]
    """(T,): the greatest code of a bound (:data:`BOUNDS`) among the term's blocks."""
    mapped: npt.NDArray[np.uint32]
    """(M,): terms with maps, ascending."""
    maps: npt.NDArray[np.uint64]
    """(M · W,): for each of them W words with a bit for each document, lowest first."""


@dataclass(frozen=True)
class Packed(PackedPairs):
    """A searchable inverted index of N documents and T terms; ``PADDING`` zeros follow the data."""

    term_bytes: npt.NDArray[np.uint8]
    """The terms in UTF-8, concatenated in ascending order of their bytes."""
    term_ends: npt.NDArray[np.int64]
    """(T + 1,): term i is ``term_bytes[term_ends[i] : term_ends[i + 1]]``."""
    frequencies: npt.NDArray[np.uint32]
    """(T,): documents that hold the term."""
    starts: npt.NDArray[np.int64]
    """(T + 1,): the blocks of term i are ``starts[i]`` to ``starts[i + 1]``."""
    norms: npt.NDArray[np.uint8]
    """(N,): lengths of the documents in terms, quantised."""
    terms_total: int
    """Sum of the lengths, not quantised."""
    filled: int
    """Documents with at least one term."""


def find_factors(terms_total: int, filled: int) -> npt.NDArray[np.float32]:
    """Compute 1 / (k1 · ((1 − b) + b · dl/avgdl)) in float32 for each quantised length dl.

    ``avgdl`` is ``terms_total`` over ``filled``, the number of documents that are not empty.
    """
    average = np.float32(terms_total / max(filled, 1))
    one = np.float32(1)
    lengths = QUANTIZED_LENGTHS.astype(np.float32)
    return one / (K1 * ((one - B) + B * lengths / max(average, one)))


def pack_postings(postings: Postings) -> Packed:
    """Pack an index in memory."""
    frequencies = np.diff(postings.starts)
    factors = find_factors(postings.terms_total, postings.filled)
    pairs = pack_pairs(frequencies, postings.documents, postings.counts, factors[postings.norms])
    return Packed(
        **{**vars(pairs), "data": np.concatenate([pairs.data, np.zeros(PADDING, np.uint8)])},
        term_bytes=postings.term_bytes,
        term_ends=postings.term_ends,
        frequencies=frequencies.astype(np.uint32),
        starts=_add_up(count_blocks(frequencies)),
        norms=postings.norms,
        terms_total=postings.terms_total,
        filled=postings.filled,
    )


def count_blocks(frequencies: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count the blocks of each term."""
    return -(-frequencies // BLOCK)


def pack_pairs(
    frequencies: npt.NDArray[np.int64],
    documents: npt.NDArray[np.uint32],
    counts: npt.NDArray[np.uint16],
    factors: npt.NDArray[np.float32],
    offset: int = 0,
) -> PackedPairs:
    """Pack the pairs of some terms.

    Args:
        frequencies: int64 (T,), pairs of each term, at least 1.
        documents, counts: (P,), the pairs, term by term; documents ascend within a term.
        factors: float32 (N,), of each document.
        offset: bytes of data that come before.
    """
    if not len(documents):
        empty = np.empty(0, np.uint8)
        numbers, words = empty.astype(np.uint32), empty.astype(np.uint64)
        return PackedPairs(numbers, words, empty, empty, numbers, words)
    # A frequent term costs least as a bit for each document; its gaps are then left out, and only its counts packed.
    mapped = np.flatnonzero(frequencies * MAPPED_SHARE >= len(factors))
    starts, blocks = _add_up(frequencies), _add_up(count_blocks(frequencies))
    heads = np.repeat(starts[:-1] - BLOCK * blocks[:-1], np.diff(blocks)) + BLOCK * np.arange(blocks[-1])
    sizes = np.diff(heads, append=len(documents))
    gaps = documents.copy()
    # A gap is at least 1, so it is stored less 1, and so is a count. The last number of a block is known from
    # ``lasts``, which a search reads to pass over whole blocks: it needs no gap.
    gaps[1:] -= documents[:-1] + np.uint32(1)
    gaps[starts[:-1]] = documents[starts[:-1]]
    lasts = heads + sizes - 1
    gaps[lasts] = 0
    for term in mapped:
        gaps[starts[term] : starts[term + 1]] = 0
    counts = counts - np.uint16(1)
    gap_bits, count_bits = (_count_bits(np.maximum.reduceat(values, heads)) for values in (gaps, counts))
    gap_bytes, count_bytes = -(-(sizes - 1) * gap_bits // 8), -(-sizes * count_bits // 8)
    places = _add_up(gap_bytes + count_bytes)
    data = np.empty(places[-1], np.uint8)
    _pack_numbers(gaps, heads, sizes - 1, gap_bits, data, places[:-1])
    _pack_numbers(counts, heads, sizes, count_bits, data, places[:-1] + gap_bytes)
    # A score grows with count / norm, so a block's greatest quotient bounds all of its scores, for any weight.
    codes = _code_bounds(np.maximum.reduceat((counts + np.float32(1)) * factors[documents], heads))
    fields = ((places[:-1] + offset, 0), (gap_bits, GAP_SHIFT), (count_bits, COUNT_SHIFT), (codes, BOUND_SHIFT))
    return PackedPairs(
        lasts=documents[lasts],
        blocks=np.bitwise_or.reduce([values.astype(np.uint64) << np.uint64(shift) for values, shift in fields]),
        data=data,
        peaks=np.maximum.reduceat(codes, blocks[:-1]).astype(np.uint8),
        mapped=mapped.astype(np.uint32),
        maps=np.concatenate(
            [
                np.empty(0, np.uint64),
                *(map_documents(documents[starts[term] : starts[term + 1]], len(factors)) for term in mapped),
            ]
        ),
    )


def count_words(size: int) -> int:
    """Count the words of a map of ``size`` documents."""
    return -(-size // MAP_SPAN) * MAP_SPAN // 64


def map_documents(documents: npt.NDArray[np.uint32], size: int) -> npt.NDArray[np.uint64]:
    """Make a map: a bit for each of ``size`` documents, lowest first."""
    held = np.zeros(64 * count_words(size), bool)
    held[documents] = True
    return np.packbits(held, bitorder="little").view("<u8")


def list_documents(term_map: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """List the documents of a map, ascending."""
    return np.flatnonzero(np.unpackbits(term_map.view(np.uint8), bitorder="little"))


def _add_up(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the start of each of consecutive parts, and the end."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _count_bits(values: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.int64]:
    """Count the bits of each number without leading zeros."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def _code_bounds(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Find the least code whose bound is at least each value."""
    return np.searchsorted(BOUNDS, values).astype(np.int64)


def _pack_numbers(
    numbers: npt.NDArray[np.unsignedinteger],
    heads: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    data: npt.NDArray[np.uint8],
    places: npt.NDArray[np.int64],
) -> None:
    """Write ``sizes[i]`` numbers from ``heads[i]`` on to ``data[places[i]:]``, each in ``widths[i]`` bits."""
    groups = -(-sizes // 8)
    padded = np.concatenate([numbers, np.zeros(8, numbers.dtype)]).astype(np.uint32)
    for width in np.flatnonzero(np.bincount(widths)):
        if not width:
            continue
        (chosen,) = np.nonzero(widths == width)
        # Eight numbers of w bits fill w bytes exactly, so that groups are packed side by side, a byte at a time.
        owner = np.repeat(chosen, groups[chosen])
        nth = np.arange(len(owner)) - np.repeat(_add_up(groups[chosen])[:-1], groups[chosen])
        place = 8 * nth[:, None] + np.arange(8)
        held = np.where(place < sizes[owner, None], padded[heads[owner, None] + place], 0)
        packed = _pack_groups(held.T, int(width))
        # A partial last group writes only the bytes in use: what follows belongs to another block.
        used = np.minimum(-(-(sizes[owner] - 8 * nth) * width // 8), width)
        first = places[owner] + width * nth
        for byte in range(width):
            if byte:
                (within,) = np.nonzero(used > byte)
                data[first[within] + byte] = packed[byte][within]
            else:
                data[first] = packed[0]


def _pack_groups(numbers: npt.NDArray[np.uint32], width: int) -> npt.NDArray[np.uint8]:
    """Pack (8, G) numbers of at most ``width`` bits into (width, G) bytes."""
    made = np.zeros((width, numbers.shape[1]), np.uint8)
    for byte in range(width):
        for number in range(8 * byte // width, (8 * byte + 7) // width + 1):
            shift = number * width - 8 * byte
            bits = numbers[number] << np.uint32(shift) if shift >= 0 else numbers[number] >> np.uint32(-shift)
            made[byte] |= bits.astype(np.uint8)
    return made


def unpack_pairs(
    frequency: int,
    lasts: npt.NDArray[np.uint32],
    blocks: npt.NDArray[np.uint64],
    data: npt.NDArray[np.uint8],
    term_map: npt.NDArray[np.uint64] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Unpack the documents and counts of one term.

    Args:
        frequency: pairs, at least 1.
        lasts, blocks: of the term.
        data: all of the index, with padding.
        term_map: of the term, if it has one.

    Raises:
        ValueError: the numbers contradict each other.
    """
    sizes = np.full(len(blocks), BLOCK)
    sizes[-1] = frequency - BLOCK * (len(blocks) - 1)
    places = (blocks & np.uint64((1 << OFFSET_BITS) - 1)).astype(np.int64)
    gap_bits = (blocks >> np.uint64(GAP_SHIFT)).astype(np.int64) & ((1 << GAP_BITS) - 1)
    count_bits = (blocks >> np.uint64(COUNT_SHIFT)).astype(np.int64) & ((1 << COUNT_BITS) - 1)
    if gap_bits.max() > 32 or count_bits.max() > 16:
        raise ValueError("a number has more bits than there can be")
    held = np.arange(BLOCK) < sizes[:, None]
    counts = _unpack_numbers(places + -(-(sizes - 1) * gap_bits // 8), count_bits, data) + 1
    if term_map is not None:
        found = list_documents(term_map)
        if len(found) != frequency or not np.array_equal(found[np.cumsum(sizes) - 1], lasts):
            raise ValueError("a map holds other documents than its blocks")
        return found, counts[held]
    gaps = _unpack_numbers(places, gap_bits, data)
    # A block begins after the last document of the one before, so that each can be read alone.
    befores = np.concatenate([[-1], lasts[:-1].astype(np.int64)])
    documents = np.cumsum(gaps + 1, axis=1) + befores[:, None]
    documents[np.arange(len(blocks)), sizes - 1] = lasts
    found = documents[held]
    if (found[1:] <= found[:-1]).any():
        raise ValueError(DAMAGE)
    return found, counts[held]


def _unpack_numbers(
    places: npt.NDArray[np.int64], widths: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int64]:
    """Read (B, 128) numbers, those of block i from ``data[places[i]]`` on, also beyond a block's end."""
    # Whole blocks are read also where the last one is short: PADDING keeps that within the array.
    if places.max() + 16 * widths.max() > len(data):
        raise ValueError("a block lies outside the data")
    made = np.zeros((len(places), BLOCK), np.int64)
    for width in np.flatnonzero(np.bincount(widths)):
        if not width:
            continue
        (chosen,) = np.nonzero(widths == width)
        held = data[places[chosen, None] + np.arange(16 * width)].reshape(-1, width)
        made[chosen] = _unpack_groups(held.T, int(width)).T.reshape(-1, BLOCK)
    return made


def _unpack_groups(held: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint32]:
    """Invert :func:`_pack_groups`."""
    made = np.zeros((8, held.shape[1]), np.uint32)
    for byte in range(width):
        for number in range(8 * byte // width, (8 * byte + 7) // width + 1):
            shift = number * width - 8 * byte
            bits = held[byte].astype(np.uint32)
            made[number] |= bits >> np.uint32(shift) if shift >= 0 else bits << np.uint32(-shift)
    return made & np.uint32((1 << width) - 1)
