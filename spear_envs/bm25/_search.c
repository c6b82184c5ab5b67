/* BM25 over packed postings: what `rank_with_numpy` in ranking.py gives, to the last bit, without reading most of it.

   Documents are taken in windows. The first, some for each that was asked for, are scored outright, since so few known
   scores exclude next to none. From there on, the first pass gives each document of a window a byte: the sum of the
   bounds of the terms that it holds, rounded up, in a unit of which 255 are what it takes to be among the best; sums
   stop there. Frequent terms have a map of their documents, so that this pass takes 64 documents at a time; the others
   are unpacked block by block. Those whose bounds do not suffice together are not unpacked at all: they are taken to be
   everywhere. The second pass looks up what the candidates hold, the greatest peaks first, and drops each as soon as
   what is left cannot lift it among the best.

   That is exact. A bound is made by the operations that make a score, all of which keep order, so that it is never
   below one; sums of bounds are compared with more room than their rounding takes. What is left is scored term by term
   in the order of the query.

   Files may be damaged: whatever the arrays hold, nothing outside them is read. Nothing outlives a call, so that threads
   do not meet. */

#include <stdint.h>
#include <string.h>

#if defined __AVX2__
#include <immintrin.h>
#endif

#include "_search.h"

#define SCORED 16         /* documents that are scored outright, for each that was asked for */
/* What takes as long as going through so many postings: */
#define LOOKUP 16         /* looking up a document */
#define MAP_PASS 200      /* going through a window of a map */
#define WINDOW_PASS 400   /* a window */
#define FULL 255          /* a byte sum that cannot be excluded */

/* ---------------------------------------------------------------- the best */

/* Offer a hit to the heap, whose root is the worst of the best. */
static void
offer(Heap *heap, Hit hit)
{
    Hit *hits = heap->hits;
    ptrdiff_t place;
    if (heap->size < heap->limit) {
        place = heap->size++;
        while (place > 0 && is_worse(hit, hits[(place - 1) / 2])) {
            hits[place] = hits[(place - 1) / 2];
            place = (place - 1) / 2;
        }
    }
    else {
        if (!is_worse(hits[0], hit))
            return;
        place = 0;
        for (;;) {
            ptrdiff_t child = 2 * place + 1;
            if (child >= heap->size)
                break;
            if (child + 1 < heap->size && is_worse(hits[child + 1], hits[child]))
                child++;
            if (!is_worse(hits[child], hit))
                break;
            hits[place] = hits[child];
            place = child;
        }
    }
    hits[place] = hit;
    if (heap->size == heap->limit)
        heap->least = hits[0].score;
}

/* ---------------------------------------------------------------- first pass: bounds */

/* The bound of this code in the unit of the window, rounded up. */
static inline unsigned
find_step(Term *term, const Search *search, unsigned code)
{
    if (term->steps[code] == 0) {
        const double step = recall_bound(term, code) * search->unit;
        term->steps[code] = step < FULL ? (uint8_t)((unsigned)step + 1) : FULL;
    }
    return term->steps[code];
}

/* Go to the next postings of a term that lie in the window: those of the scan's block from its place to before `stop`.
   Returns 1, 0 if there are none, or -1 if a block is damaged. */
static int
enter_block(Term *term, const Search *search, int *stop)
{
    const uint32_t base = search->base, end = base + search->width;
    Cursor *scan = &term->scan;
    if (!find_block(term, scan, base))
        return 0;
    if (scan->size == 0) {
        if (find_first(term, scan) >= end)
            return 0;
        if ((term->map ? read_mapped : read_block)(term, scan, search->index) < 0)
            return -1;
    }
    find_place(scan, base);
    const int place = scan->place;
    if (scan->documents[scan->size - 1] >= end)
        find_place(scan, end);
    else
        scan->place = scan->size;
    *stop = scan->place;
    scan->place = place;
    return place < *stop;
}

/* Go past them. */
static inline void
leave_block(Cursor *scan, int stop)
{
    scan->place = stop;
    if (stop == scan->size) {
        scan->block++;
        scan->size = 0;
    }
}

/* Add the bounds of a term with gaps to the sums of the window. Returns -1 if a block is damaged. */
static int
add_list(Term *term, const Search *search)
{
    Cursor *scan = &term->scan;
    int stop, found;
    for (; (found = enter_block(term, search, &stop)) > 0; leave_block(scan, stop)) {
        const unsigned step = find_step(term, search, read_bound(term->blocks[scan->block]));
        for (int place = scan->place; place < stop; place++) {
            uint8_t *sum = &search->sums[scan->documents[place] - search->base];
            const unsigned more = *sum + step;
            *sum = more > FULL ? FULL : (uint8_t)more;
        }
    }
    return found;
}

/* Write the steps of a term with a map. */
static void
spread_steps(Term *term, const Search *search, uint8_t *steps)
{
    const uint32_t base = search->base, end = base + search->width;
    memset(steps, 0, WINDOW / SPAN);
    if (!find_block(term, &term->scan, base))
        return;
    if (term->look.block < term->scan.block) {
        term->look.block = term->scan.block;
        term->look.size = 0;
    }
    int64_t first = find_first(term, &term->scan);
    first = first > base ? first : base;
    for (int64_t block = term->scan.block; block < term->block_count && first < end; block++) {
        const unsigned step = find_step(term, search, read_bound(term->blocks[block]));
        const uint32_t last = term->lasts[block] < end ? term->lasts[block] : end - 1;
        if (last < first)
            continue;   /* a damaged file */
        for (uint32_t span = ((uint32_t)first - base) / SPAN; span <= (last - base) / SPAN; span++)
            steps[span] = steps[span] > step ? steps[span] : (uint8_t)step;
        first = (int64_t)term->lasts[block] + 1;
    }
}

/* Add the terms with maps to the sums of a span, and clear these. `full` gets a bit for each document that is FULL. */
#if defined __AVX512BW__
static inline void
find_full(const Search *search, uint32_t span, uint64_t *full)
{
    uint8_t *place = search->sums + SPAN * span;
    const int64_t word = (search->base + SPAN * span) / GROUP;
    __m512i sums[SPAN / GROUP];
    for (int i = 0; i < SPAN / GROUP; i++) {
        sums[i] = _mm512_loadu_si512(place + GROUP * i);
        _mm512_storeu_si512(place + GROUP * i, _mm512_setzero_si512());
    }
    for (ptrdiff_t t = 0; t < search->passed_maps; t++) {
        const __m512i steps = _mm512_set1_epi8((char)search->steps[t * (WINDOW / SPAN) + span]);
        const uint64_t *map = search->maps[t]->map + word;
        for (int i = 0; i < SPAN / GROUP; i++)
            sums[i] = _mm512_mask_adds_epu8(sums[i], map[i], sums[i], steps);
    }
    for (int i = 0; i < SPAN / GROUP; i++)
        full[i] = _mm512_cmpeq_epi8_mask(sums[i], _mm512_set1_epi8((char)FULL));
}
#elif defined __AVX2__
static inline void
find_full(const Search *search, uint32_t span, uint64_t *full)
{
    uint8_t *place = search->sums + SPAN * span;
    const int64_t word = (search->base + SPAN * span) / GROUP;
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i sums[SPAN / 32];
    for (int i = 0; i < SPAN / 32; i++) {
        sums[i] = _mm256_loadu_si256((const __m256i *)(place + 32 * i));
        _mm256_storeu_si256((__m256i *)(place + 32 * i), _mm256_setzero_si256());
    }
    for (ptrdiff_t t = 0; t < search->passed_maps; t++) {
        const __m256i steps = _mm256_set1_epi8((char)search->steps[t * (WINDOW / SPAN) + span]);
        const uint64_t *map = search->maps[t]->map + word;
        for (int i = 0; i < SPAN / 32; i++) {
            const uint32_t half = (uint32_t)(map[i / 2] >> 32 * (i % 2));
            const __m256i held = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)half), spread), bits);
            sums[i] = _mm256_adds_epu8(sums[i], _mm256_and_si256(_mm256_cmpeq_epi8(held, bits), steps));
        }
    }
    for (int i = 0; i < SPAN / GROUP; i++) {
        const __m256i all = _mm256_set1_epi8((char)FULL);
        full[i] = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(sums[2 * i], all))
                  | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(sums[2 * i + 1], all)) << 32;
    }
}
#else
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint64_t Words __attribute__((vector_size(16)));

static inline void
find_full(const Search *search, uint32_t span, uint64_t *full)
{
    uint8_t *place = search->sums + SPAN * span;
    const int64_t word = (search->base + SPAN * span) / GROUP;
    const uint64_t ones = 0x0101010101010101;
    const Words bits = {0x8040201008040201, 0x8040201008040201};
    memset(full, 0, SPAN / GROUP * sizeof *full);
    for (int i = 0; i < SPAN / 16; i++) {
        Bytes sums;
        memcpy(&sums, place + 16 * i, sizeof sums);
        for (ptrdiff_t t = 0; t < search->passed_maps; t++) {
            const uint64_t map = search->maps[t]->map[word + i / 4] >> 16 * (i % 4);
            const Words spread = {(map & 255) * ones, (map >> 8 & 255) * ones};
            const Bytes held = (Bytes)((Bytes)(spread & bits) == (Bytes)bits);
            const Bytes more = sums + (held & search->steps[t * (WINDOW / SPAN) + span]);
            sums = more | (Bytes)(more < sums);
        }
        for (int half = 0; half < 2; half++) {
            /* A byte of 255 is the only one whose complement is 0. */
            const uint64_t rest = ~((Words)sums)[half];
            const uint64_t zero = ~(((rest & 0x7f * ones) + 0x7f * ones) | rest | 0x7f * ones);
            full[i / 4] |= ((zero >> 7) * 0x0102040810204080 >> 56) << (16 * (i % 4) + 8 * half);
        }
    }
    memset(place, 0, SPAN);
}
#endif

/* ---------------------------------------------------------------- second pass: scores */

static inline int
is_mapped(const Term *term, uint32_t document)
{
    return term->map[document / GROUP] >> document % GROUP & 1;
}

/* Score the cursor's document of the block that may hold it. Returns 0 if the block does not hold it, -1 if it is
   damaged. */
static int
score_document(Term *term, const Index *index, uint32_t document, float *score)
{
    Cursor *look = &term->look;
    int place;
    if (term->map) {
        const int64_t first = find_first(term, look);
        if (first > document || (look->size == 0 && open_block(term, look, index) < 0))
            return -1;
        const int64_t before = count_bits(term->map, first, document);
        if (before >= look->size)
            return -1;
        place = (int)before;
    }
    else {
        if (look->size == 0 && read_block(term, look, index) < 0)
            return -1;
        find_place(look, document);
        place = look->place;
        if (place == look->size || look->documents[place] != document)
            return 0;
    }
    *score = score_posting(term, index, read_count(look, place), document);
    return 1;
}

/* Score some documents, which ascend, and offer the best. Returns -1 if a block is damaged. */
static int
score_batch(Search *search, const uint32_t *documents, int count)
{
    double tops[BATCH];   /* no score of the document is above it */
    uint8_t left[BATCH];  /* documents that may still be among the best */
    Heap *heap = search->heap;
    const double cut = heap->least - search->slack;
    int left_count = 0;
    for (int i = 0; i < count; i++) {
        tops[i] = search->rests[search->list_count];
        for (ptrdiff_t t = 0; t < search->map_count; t++)
            tops[i] += is_mapped(search->maps[t], documents[i]) * (double)search->maps[t]->peak;
        left[left_count] = (uint8_t)i;
        left_count += tops[i] > cut;
    }
    memset(search->scores, 0, (size_t)(count * search->count) * sizeof *search->scores);
    for (ptrdiff_t t = 0; t < search->count && left_count; t++) {
        Term *term = search->ordered[t];
        const ptrdiff_t number = term - search->terms;
        int kept = 0;
        for (int i = 0; i < left_count; i++) {
            const int at = left[i];
            if (!term->map || is_mapped(term, documents[at])) {
                float score = 0;
                const double rest = tops[at] - term->peak;
                if (find_block(term, &term->look, documents[at])) {
                    if (rest + recall_bound(term, read_bound(term->blocks[term->look.block])) <= cut)
                        continue;
                    if (score_document(term, search->index, documents[at], &score) < 0)
                        return -1;
                }
                else if (term->map)
                    return -1;
                tops[at] = rest + score;
                if (tops[at] <= cut)
                    continue;
                search->scores[at * search->count + number] = score;
            }
            left[kept++] = (uint8_t)at;
        }
        left_count = kept;
    }
    for (int i = 0; i < left_count; i++) {
        const float *scores = search->scores + left[i] * search->count;
        double sum = 0;
        for (ptrdiff_t t = 0; t < search->count; t++)
            sum += scores[t];
        /* No score is 0. Later documents of equal scores gain nothing. */
        if ((float)sum > heap->least)
            offer(heap, (Hit){(float)sum, documents[left[i]]});
    }
    return 0;
}

/* Score all documents of the window, and offer the best. Returns -1 if a block is damaged. */
static int
score_window(Search *search)
{
    Heap *heap = search->heap;
    double *totals = search->totals;
    memset(totals, 0, search->width * sizeof *totals);
    for (ptrdiff_t t = 0; t < search->count; t++) {
        Term *term = &search->terms[t];
        Cursor *scan = &term->scan;
        int stop, found;
        for (; (found = enter_block(term, search, &stop)) > 0; leave_block(scan, stop))
            for (int place = scan->place; place < stop; place++) {
                const uint32_t document = scan->documents[place], count = read_count(scan, place);
                totals[document - search->base] += score_posting(term, search->index, count, document);
            }
        if (found < 0)
            return -1;
    }
    for (uint32_t i = 0; i < search->width; i++)
        if ((float)totals[i] > heap->least)
            offer(heap, (Hit){(float)totals[i], search->base + i});
    return 0;
}

/* ---------------------------------------------------------------- windows */

/* Postings of the term that a whole window has on average. */
static inline double
expect_postings(const Term *term, const Search *search)
{
    return (double)term->frequency * WINDOW / (double)search->index->size;
}

/* Search a window: returns -1 if a block is damaged. */
static int
search_window(Search *search)
{
    for (ptrdiff_t t = search->lead; t < search->list_count; t++)
        if (add_list(search->lists[t], search) < 0)
            return -1;
    for (ptrdiff_t t = 0; t < search->passed_maps; t++)
        spread_steps(search->maps[t], search, search->steps + t * (WINDOW / SPAN));
    uint32_t documents[BATCH];
    int count = 0;
    for (uint32_t span = 0; span < (search->width + SPAN - 1) / SPAN; span++) {
        uint64_t full[SPAN / GROUP];
        find_full(search, span, full);
        for (uint32_t i = 0; i < SPAN / GROUP; i++)
            for (; full[i]; full[i] &= full[i] - 1) {
                const uint32_t document = search->base + SPAN * span + GROUP * i + (uint32_t)__builtin_ctzll(full[i]);
                if (document >= search->index->size)
                    return -1;   /* a map has documents that there are not */
                documents[count++] = document;
                if (count == BATCH) {
                    if (score_batch(search, documents, count) < 0)
                        return -1;
                    count = 0;
                }
            }
    }
    return count ? score_batch(search, documents, count) : 0;
}

/* Where the next document may be that a list from `lead` on holds; the number of documents if there is none. -1 if a
   block is damaged. */
static int64_t
find_next(Search *search, int64_t base)
{
    const Index *index = search->index;
    int64_t next = index->size;
    for (ptrdiff_t t = search->lead; t < search->list_count; t++) {
        Term *term = search->lists[t];
        Cursor *scan = &term->scan;
        if (!find_block(term, scan, (uint32_t)base))
            continue;
        int64_t document = find_first(term, scan);
        /* A block is read only where that can lead beyond the next window. */
        if (scan->size || term->lasts[scan->block] - base >= WINDOW) {
            if (scan->size == 0 && read_block(term, scan, index) < 0)
                return -1;
            find_place(scan, (uint32_t)base);
            document = scan->documents[scan->place];
        }
        next = document < next ? document : next;
    }
    return next > base ? next : base;
}

/* Choose what the first pass goes through. If the maps and some lists do not suffice together, it may be the other lists
   alone, whose documents are looked up; else it is everything. */
static void
choose_passed(Search *search)
{
    const double least = search->heap->least - search->slack;
    ptrdiff_t lead = 0;
    double all = 0, rare = 0;
    while (lead < search->list_count && search->map_total + search->rests[lead + 1] <= least)
        lead++;
    for (ptrdiff_t t = 0; t < search->list_count; t++)
        all += expect_postings(search->lists[t], search);
    for (ptrdiff_t t = lead; t < search->list_count; t++)
        rare += expect_postings(search->lists[t], search);
    const int alone = search->map_total <= least
                      && rare * LOOKUP < all + MAP_PASS * (double)search->map_count + WINDOW_PASS;
    search->lead = alone ? lead : 0;
    search->passed_maps = alone ? 0 : search->map_count;
    search->rest = alone ? search->map_total + search->rests[lead] : 0;
}

int
spear_search(Search *search)
{
    const int64_t size = search->index->size;
    const int64_t scored = search->heap->limit < size / SCORED ? search->heap->limit * SCORED : size;
    int64_t base = 0, width = scored < WINDOW ? (scored + SPAN - 1) / SPAN * SPAN : WINDOW;
    float least = -1;
    while (base < size) {
        if (search->heap->least != least) {
            least = search->heap->least;
            choose_passed(search);
            const double need = least - search->slack - search->rest;
            search->unit = need > 0 ? FULL / need : 1e300;
            for (ptrdiff_t t = 0; t < search->count; t++)
                memset(search->terms[t].steps, 0, CODES);
        }
        if (search->passed_maps == 0) {
            const int64_t next = find_next(search, base);
            if (next < 0)
                return -1;
            if (next >= size)
                break;
            base = next / SPAN * SPAN;
        }
        search->base = (uint32_t)base;
        search->width = (uint32_t)(size - base < width ? size - base : width);
        if ((base < scored ? score_window : search_window)(search) < 0)
            return -1;
        base += search->width;
        width = 2 * width < WINDOW ? 2 * width : WINDOW;
    }
    return 0;
}
