/* The blocks and maps of packing.py: reading them, going through a term's, and what their pairs score. For _search.c
   and _ranking.c alone. */

#ifndef SPEAR_BLOCKS_H
#define SPEAR_BLOCKS_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Scores are float32 and sums float64 as written: no wider arithmetic here, and no fused by -ffp-contract=off. */
#if FLT_EVAL_METHOD != 0
#error "this processor's float arithmetic is not IEEE's: NumPy's loop will be used"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the files hold little-endian numbers: NumPy's loop will be used"
#endif

#define CODES 256     /* quantised lengths */

/* The format of packing.py. */
#define BLOCK 128
#define OFFSET_BITS 40
#define GAP_SHIFT 40
#define COUNT_SHIFT 46
#define BOUND_SHIFT 51
#define MANTISSA_SHIFT 18
#define LOWEST_BOUND 4000   /* float32 0.25 without the bits that a bound lacks */
#define READ_BYTES (16 * 32 + 16 * 16 + 8)   /* the most that is read from where a block begins */

typedef struct {
    const uint32_t *lasts;
    const uint64_t *blocks;
    const uint8_t *data;
    const uint8_t *norms;
    const uint64_t *maps;
    const float *factors;
    int64_t data_size, size, map_words;   /* bytes; documents; of one map */
} Index;

/* A place in a term's blocks. */
typedef struct {
    int64_t block;           /* all before has been gone through or passed over */
    int size, place;         /* postings of the block, and the next of them; size 0: not read yet */
    int count_bits;
    const uint8_t *packed_counts;
    uint32_t documents[BLOCK];
} Cursor;

typedef struct {
    const uint32_t *lasts;   /* of the term's blocks */
    const uint64_t *blocks;
    const uint64_t *map;     /* a bit for each document, or NULL: gaps */
    int64_t block_count, frequency;
    float weight;
    float peak;              /* no score is above it */
    float bounds[CODES];     /* what each code of a bound stands for; 0: not worked out yet */
    uint8_t steps[CODES];    /* the same in the unit of the present window; 0: not worked out yet */
    Cursor scan, look;
} Term;

/* ---------------------------------------------------------------- scores and bounds */

static inline float
score_share(float weight, float length)
{
    const float share = 1.0f + length;
    const float rest = weight / share;
    return weight - rest;
}

static inline float
score_posting(const Term *term, const Index *index, uint32_t count, uint32_t document)
{
    return score_share(term->weight, (float)count * index->factors[index->norms[document]]);
}

/* The most that a posting can score whose bound has this code. */
static inline float
score_bound(float weight, unsigned code)
{
    const uint32_t bits = (code + LOWEST_BOUND) << MANTISSA_SHIFT;
    float length;
    memcpy(&length, &bits, sizeof length);
    return score_share(weight, code == 255 ? INFINITY : length);
}

static inline unsigned
read_bound(uint64_t block)
{
    return (unsigned)(block >> BOUND_SHIFT) & 255;
}

/* The same, remembered. */
static inline float
recall_bound(Term *term, unsigned code)
{
    if (term->bounds[code] == 0)
        term->bounds[code] = score_bound(term->weight, code);
    return term->bounds[code];
}

/* ---------------------------------------------------------------- blocks */

/* Unpack groups of eight numbers of `width` bits, a constant wherever this is called. */
static inline __attribute__((always_inline)) void
unpack_width(const uint8_t *packed, int groups, const int width, uint32_t *numbers)
{
    const uint64_t mask = (UINT64_C(1) << width) - 1;
    for (int group = 0; group < groups; group++, packed += width, numbers += 8)
        for (int i = 0; i < 8; i++) {
            uint64_t bits;
            memcpy(&bits, packed + (i * width >> 3), sizeof bits);
            numbers[i] = (uint32_t)(bits >> (i * width & 7) & mask);
        }
}

#define CASE(width) case width: unpack_width(packed, groups, width, numbers); break;
#define CASES(width) CASE(width) CASE(width + 1) CASE(width + 2) CASE(width + 3)

static void
unpack_numbers(const uint8_t *packed, int groups, unsigned width, uint32_t *numbers)
{
    switch (width) {
    CASES(0) CASES(4) CASES(8) CASES(12) CASES(16) CASES(20) CASES(24) CASES(28) CASE(32)
    }
}

/* Go to the first block that may hold a document from `document` on. Returns whether there is one. */
static inline int
find_block(const Term *term, Cursor *cursor, uint32_t document)
{
    int64_t low = cursor->block, step = 1;
    if (low < term->block_count && term->lasts[low] >= document)
        return 1;
    /* All up to `low` end before it; look ahead by 1, 2, 4, ... and then between the last two places. */
    int64_t high = low + 1;
    while (high < term->block_count && term->lasts[high] < document) {
        low = high;
        step *= 2;
        high = low + step;
    }
    if (high > term->block_count)
        high = term->block_count;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (term->lasts[middle] < document)
            low = middle;
        else
            high = middle;
    }
    cursor->block = high;
    cursor->size = 0;
    return high < term->block_count;
}

/* The first document that the cursor's block may hold. */
static inline int64_t
find_first(const Term *term, const Cursor *cursor)
{
    return cursor->block ? (int64_t)term->lasts[cursor->block - 1] + 1 : 0;
}

/* Read how the cursor's block is written. Returns the bits of a gap, or -1 if the block is damaged. */
static inline int
open_block(const Term *term, Cursor *cursor, const Index *index)
{
    const uint64_t block = term->blocks[cursor->block];
    const int64_t offset = (int64_t)(block & ((UINT64_C(1) << OFFSET_BITS) - 1));
    const unsigned gap_bits = (unsigned)(block >> GAP_SHIFT) & 63, count_bits = (unsigned)(block >> COUNT_SHIFT) & 31;
    const int64_t left = term->frequency - BLOCK * cursor->block;
    const int size = left < BLOCK ? (int)left : BLOCK;
    if (gap_bits > 32 || count_bits > 16 || offset + READ_BYTES > index->data_size
        || term->lasts[cursor->block] >= index->size)
        return -1;
    cursor->packed_counts = index->data + offset + ((size - 1) * (int)gap_bits + 7) / 8;
    cursor->count_bits = (int)count_bits;
    cursor->size = size;
    cursor->place = 0;
    return (int)gap_bits;
}

/* Read the documents of the cursor's block of a term with gaps. Returns -1 if it is damaged. */
static inline int
read_block(const Term *term, Cursor *cursor, const Index *index)
{
    const int gap_bits = open_block(term, cursor, index);
    if (gap_bits < 0)
        return -1;
    const int size = cursor->size;
    const uint8_t *packed = index->data + (term->blocks[cursor->block] & ((UINT64_C(1) << OFFSET_BITS) - 1));
    unpack_numbers(packed, (size + 6) / 8, (unsigned)gap_bits, cursor->documents);
    const int64_t last = term->lasts[cursor->block];
    int64_t document = find_first(term, cursor) - 1;
    for (int i = 0; i < size - 1; i++) {
        document += (int64_t)cursor->documents[i] + 1;
        cursor->documents[i] = (uint32_t)document;
    }
    if (document >= last)
        return -1;
    cursor->documents[size - 1] = (uint32_t)last;
    return 0;
}

/* The same for a term with a map. */
static inline int
read_mapped(const Term *term, Cursor *cursor, const Index *index)
{
    if (open_block(term, cursor, index) < 0)
        return -1;
    const uint32_t last = term->lasts[cursor->block];
    const int64_t first = find_first(term, cursor);
    uint64_t before = ~UINT64_C(0) << (first & 63);
    int size = 0;
    for (int64_t word = first >> 6; word <= last >> 6; word++, before = ~UINT64_C(0))
        for (uint64_t bits = term->map[word] & before; bits && size < cursor->size; bits &= bits - 1)
            cursor->documents[size++] = (uint32_t)(64 * word + __builtin_ctzll(bits));
    return size == cursor->size && cursor->documents[size - 1] == last ? 0 : -1;
}

/* Go to the first posting from `document` on in the block that was read, or to its end. */
static inline void
find_place(Cursor *cursor, uint32_t document)
{
    const uint32_t *documents = cursor->documents;
    int low = cursor->place, step = 1;
    if (low == cursor->size || documents[low] >= document)
        return;
    while (low + step < cursor->size && documents[low + step] < document) {
        low += step;
        step *= 2;
    }
    int high = low + step < cursor->size ? low + step : cursor->size;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (documents[middle] < document)
            low = middle;
        else
            high = middle;
    }
    cursor->place = high;
}

/* How often the term occurs in the posting at a place of the block that was opened. */
static inline uint32_t
read_count(const Cursor *cursor, int place)
{
    const int bit = place * cursor->count_bits;
    uint32_t bits;
    memcpy(&bits, cursor->packed_counts + (bit >> 3), sizeof bits);
    return (bits >> (bit & 7) & ((UINT32_C(1) << cursor->count_bits) - 1)) + 1;
}

/* Documents of a map from `first` to before `stop`. */
static inline int64_t
count_bits(const uint64_t *map, int64_t first, int64_t stop)
{
    const int64_t from = first >> 6, to = stop >> 6;
    const uint64_t before = ~UINT64_C(0) << (first & 63), until = (UINT64_C(1) << (stop & 63)) - 1;
    if (from == to)
        return __builtin_popcountll(map[from] & before & until);
    int64_t count = __builtin_popcountll(map[from] & before);
    for (int64_t word = from + 1; word < to; word++)
        count += __builtin_popcountll(map[word]);
    return until ? count + __builtin_popcountll(map[to] & until) : count;
}

#endif
