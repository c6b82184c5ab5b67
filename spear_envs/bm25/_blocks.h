/* The blocks of packing.py: reading them, going through a term's, and what their pairs score. For _ranking.c alone. */

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
#define TABLED 8      /* counts whose scores are worth a table */

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
    const float *factors;
    int64_t data_size, size;   /* bytes; documents */
} Index;

typedef struct {
    const uint32_t *lasts;   /* of the term's blocks */
    const uint64_t *blocks;
    int64_t block_count, frequency;
    float weight;
    float peak;              /* no score is above it */
    float *table;            /* scores by count - 1 and length, or NULL */
    int64_t block;           /* where the term is; all before has been gone through or passed over */
    int64_t bounded;         /* the block that `bound` is of, or -1 */
    float bound;
    int size, place;         /* postings of the block, and the next of them; size 0: not read yet */
    int count_bits;
    const uint8_t *packed_counts;
    uint32_t documents[BLOCK];
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
    const uint8_t code = index->norms[document];
    if (term->table && count <= TABLED)
        return term->table[(count - 1) * CODES + code];
    const float length = (float)count * index->factors[code];
    return score_share(term->weight, length);
}

static void
fill_table(Term *term, const float *factors)
{
    for (int count = 0; count < TABLED; count++)
        for (int code = 0; code < CODES; code++) {
            const float length = (float)(count + 1) * factors[code];
            term->table[count * CODES + code] = score_share(term->weight, length);
        }
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

/* Whether sums of the terms' scores and bounds are the same in any order, without rounding. */
static int
is_order_free(const float *weights, Py_ssize_t count)
{
    double total = 0;
    int lowest = 1024, highest;
    for (Py_ssize_t t = 0; t < count; t++) {
        int exponent;
        frexp(weights[t], &exponent);
        lowest = exponent < lowest ? exponent : lowest;
        total += weights[t];
    }
    frexp(total, &highest);
    /* All are multiples of 2^(lowest - 25) and below 2^(highest + 1); a double has 53 bits. Tiny weights may have fewer
       bits than others. */
    return lowest > -100 && highest + 1 - (lowest - 25) <= 53;
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

/* Read the documents of the term's block. Returns -1 if it is damaged. */
static int
read_block(Term *term, const Index *index)
{
    const uint64_t block = term->blocks[term->block];
    const int64_t offset = (int64_t)(block & ((UINT64_C(1) << OFFSET_BITS) - 1));
    const unsigned gap_bits = (unsigned)(block >> GAP_SHIFT) & 63, count_bits = (unsigned)(block >> COUNT_SHIFT) & 31;
    const int64_t last = term->lasts[term->block];
    const int64_t left = term->frequency - BLOCK * term->block;
    const int size = left < BLOCK ? (int)left : BLOCK;
    if (gap_bits > 32 || count_bits > 16 || offset + READ_BYTES > index->data_size || last >= index->size)
        return -1;
    unpack_numbers(index->data + offset, (size + 6) / 8, gap_bits, term->documents);
    int64_t document = term->block ? (int64_t)term->lasts[term->block - 1] : -1;
    for (int i = 0; i < size - 1; i++) {
        document += (int64_t)term->documents[i] + 1;
        term->documents[i] = (uint32_t)document;
    }
    if (document >= last)
        return -1;
    term->documents[size - 1] = (uint32_t)last;
    term->packed_counts = index->data + offset + ((size - 1) * (int)gap_bits + 7) / 8;
    term->count_bits = (int)count_bits;
    term->size = size;
    term->place = 0;
    return 0;
}

/* How often the term occurs in a document of the block that was read. */
static inline uint32_t
read_count(const Term *term, int place)
{
    const int bit = place * term->count_bits;
    uint32_t bits;
    memcpy(&bits, term->packed_counts + (bit >> 3), sizeof bits);
    return (bits >> (bit & 7) & ((UINT32_C(1) << term->count_bits) - 1)) + 1;
}

/* Go to the first block that may hold a document from `document` on. Returns whether there is one. */
static int
find_block(Term *term, uint32_t document)
{
    int64_t low = term->block, step = 1;
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
    term->block = high;
    term->size = 0;
    return high < term->block_count;
}

/* Go to the first posting from `document` on in the block that was read, or to its end. */
static inline void
find_place(Term *term, uint32_t document)
{
    const uint32_t *documents = term->documents;
    int low = term->place, step = 1;
    if (low == term->size || documents[low] >= document)
        return;
    while (low + step < term->size && documents[low + step] < document) {
        low += step;
        step *= 2;
    }
    int high = low + step < term->size ? low + step : term->size;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (documents[middle] < document)
            low = middle;
        else
            high = middle;
    }
    term->place = high;
}
