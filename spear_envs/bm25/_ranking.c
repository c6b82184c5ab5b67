/* BM25 over packed postings: what `rank_with_numpy` in ranking.py gives, to the last bit, without reading most of it.

   Documents are taken in windows whose sums stay in the processor's cache. Terms are in ascending order of the most that
   they can add. As long as the first of them cannot lift a document above the worst of the best k by themselves, only
   the others, the leading terms, are gone through; the first ones are looked up for documents that can still get there
   (MaxScore). A window that the bounds of its blocks exclude is passed over.

   That is exact for two reasons. A bound is made by the operations that make a score, all of which keep order, so that
   it is never below one. And a score is a whole multiple of half the last place of its term's weight: where all weights
   are within some 28 binary places of each other, no sum of scores or bounds is ever rounded, in whatever order it is
   made. Queries of other weights, which hardly exist, are scored term by term, in their order, without bounds.

   Files may be damaged: whatever the arrays hold, nothing outside them is read. Nothing outlives a call, so that threads
   do not meet. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_blocks.h"

#define WINDOW 4096   /* documents: 32 KiB of sums */
#define LOOKUP 12     /* postings that are gone through in the time of looking up one document */
#define SPARSE 8      /* with fewer than WINDOW / SPARSE postings a window's documents are listed, not looked for */

typedef struct {
    float score;
    uint32_t document;
} Hit;

typedef struct {
    Hit *hits;
    Py_ssize_t size, limit;
    float least;  /* of the hits, once there are `limit`; 0 before */
} Heap;

/* A document of a window that may be among the best. */
typedef struct {
    uint32_t at;
    double sum;
} Candidate;

typedef struct {
    const Index *index;
    Term **terms;        /* in ascending order of peaks if there is pruning, else as given */
    Py_ssize_t count;
    int prunes;
    double *rests;       /* (count + 1): the sum of the bounds of the terms before each, in the present window */
    Py_ssize_t lead;     /* terms before it lead no search any more */
    Py_ssize_t eager;    /* terms from it on were better gone through in the window before */
    uint32_t base, width;
    double *sums;
    uint16_t *touched;   /* documents with a sum, if they are listed */
    Candidate *candidates;
    Py_ssize_t candidate_count;
    Heap *heap;
} Search;

static inline int
is_worse(Hit a, Hit b)
{
    return a.score < b.score || (a.score == b.score && a.document > b.document);
}

/* Offer a hit to the heap, whose root is the worst of the best. */
static void
offer(Heap *heap, Hit hit)
{
    Hit *hits = heap->hits;
    Py_ssize_t place;
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
            Py_ssize_t child = 2 * place + 1;
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

/* ---------------------------------------------------------------- a window */

/* The term's first document from `base` on, or one that is not above it; the number of documents if there is none; -1
   if a block is damaged. Reads a block only where that can lead beyond the next window. */
static int64_t
find_next(Term *term, const Index *index, uint32_t base)
{
    if (!find_block(term, base))
        return index->size;
    if (term->size == 0) {
        const int64_t first = term->block ? (int64_t)term->lasts[term->block - 1] + 1 : 0;
        if (term->lasts[term->block] - base < WINDOW)
            return first > base ? first : base;
        if (read_block(term, index) < 0)
            return -1;
    }
    find_place(term, base);
    return term->documents[term->place];
}

/* The most that the term can add to a document of the window. */
static float
bound_window(Term *term, const Search *search)
{
    const uint32_t end = search->base + search->width;
    if (!find_block(term, search->base))
        return 0;
    if (term->size) {
        find_place(term, search->base);
        if (term->documents[term->place] >= end)
            return 0;
    }
    unsigned most = 0;
    for (int64_t block = term->block; block < term->block_count; block++) {
        const unsigned code = read_bound(term->blocks[block]);
        most = code > most ? code : most;
        if (term->lasts[block] >= end - 1)
            break;
    }
    return score_bound(term->weight, most);
}

/* Add the term's scores to the sums of the window. Returns how many documents are listed in `touched`, -1 if a block is
   damaged. */
static int
score_window(Term *term, const Search *search, int touched_count, int lists)
{
    const Index *index = search->index;
    const uint32_t base = search->base, end = base + search->width;
    double *sums = search->sums;
    if (!find_block(term, base))
        return touched_count;
    do {
        if (term->size == 0 && read_block(term, index) < 0)
            return -1;
        find_place(term, base);
        int place = term->place, stop = term->size;
        if (term->documents[stop - 1] >= end) {
            find_place(term, end);
            stop = term->place;
        }
        uint32_t counts[BLOCK];
        unpack_numbers(term->packed_counts, (stop + 7) / 8, (unsigned)term->count_bits, counts);
        if (lists)
            for (; place < stop; place++) {
                const uint32_t at = term->documents[place] - base;
                const double before = sums[at];
                sums[at] += score_posting(term, index, counts[place] + 1, term->documents[place]);
                search->touched[touched_count] = (uint16_t)at;
                /* Once for each document, as sums never shrink. */
                touched_count += before == 0 && sums[at] != 0;
            }
        else
            for (; place < stop; place++)
                sums[term->documents[place] - base] +=
                    score_posting(term, index, counts[place] + 1, term->documents[place]);
        if (stop < term->size)
            return touched_count;
        term->block++;
        term->size = 0;
    } while (term->block < term->block_count && term->lasts[term->block - 1] + 1 < end);
    return touched_count;
}

static int
compare_candidates(const void *a, const void *b)
{
    const uint32_t one = ((const Candidate *)a)->at, other = ((const Candidate *)b)->at;
    return (one > other) - (one < other);
}

/* List the documents whose sum is above `cut`. */
static void
collect_candidates(Search *search, double cut, int touched_count, int lists)
{
    const double *sums = search->sums;
    Candidate *candidates = search->candidates;
    Py_ssize_t count = 0;
    if (lists)
        for (int i = 0; i < touched_count; i++) {
            const uint32_t at = search->touched[i];
            candidates[count] = (Candidate){at, sums[at]};
            count += sums[at] > cut;
        }
    else
        for (uint32_t at = 0; at < WINDOW; at += 8) {
            int any = 0;
            for (int i = 0; i < 8; i++)
                any |= sums[at + i] > cut;
            for (uint32_t i = at; any && i < at + 8; i++) {
                candidates[count] = (Candidate){i, sums[i]};
                count += sums[i] > cut;
            }
        }
    search->candidate_count = count;
}

static void
clear_sums(Search *search, int touched_count, int lists)
{
    if (lists)
        for (int i = 0; i < touched_count; i++)
            search->sums[search->touched[i]] = 0;
    else
        memset(search->sums, 0, WINDOW * sizeof *search->sums);
}

/* Add the scores of the terms before `lead`, the greatest first, to the candidates that can still be among the best.
   Returns -1 if a block is damaged. */
static int
look_up_rest(Search *search, Py_ssize_t lead)
{
    const Index *index = search->index;
    const double least = search->heap->least;
    Candidate *candidates = search->candidates;
    for (Py_ssize_t t = lead - 1; t >= 0; t--) {
        Term *term = search->terms[t];
        const double rest = search->rests[t], with = search->rests[t + 1];
        Py_ssize_t kept = 0;
        for (Py_ssize_t i = 0; i < search->candidate_count; i++) {
            Candidate candidate = candidates[i];
            const uint32_t document = search->base + candidate.at;
            if (candidate.sum + with <= least)
                continue;
            if (find_block(term, document)) {
                if (term->bounded != term->block) {
                    term->bounded = term->block;
                    term->bound = score_bound(term->weight, read_bound(term->blocks[term->block]));
                }
                if (candidate.sum + term->bound + rest <= least)
                    continue;
                if (term->size == 0 && read_block(term, index) < 0)
                    return -1;
                find_place(term, document);
                if (term->documents[term->place] == document)
                    candidate.sum += score_posting(term, index, read_count(term, term->place), document);
            }
            candidates[kept++] = candidate;
        }
        search->candidate_count = kept;
    }
    return 0;
}

/* Postings of the term that a window has on average. */
static double
expect_postings(const Term *term, const Search *search)
{
    return (double)term->frequency * search->width / (double)search->index->size;
}

/* List the window's candidates in ascending order, with the sums of the terms from the one that is returned on; the
   terms before it are to be looked up. -1 if a block is damaged. */
static Py_ssize_t
find_candidates(Search *search, Py_ssize_t lead)
{
    double expected = 0;
    if (lead > search->eager)
        lead = search->eager;
    for (Py_ssize_t t = lead; t < search->count; t++)
        expected += expect_postings(search->terms[t], search);
    const int lists = expected < WINDOW / SPARSE;
    int touched_count = 0;
    for (Py_ssize_t t = search->count - 1; t >= lead; t--)
        if ((touched_count = score_window(search->terms[search->prunes ? t : search->count - 1 - t], search,
                                          touched_count, lists)) < 0)
            return -1;
    for (;;) {
        collect_candidates(search, search->prunes ? search->heap->least - search->rests[lead] : 0, touched_count, lists);
        /* To look a document up takes as long as to go through some postings. */
        const double spent = (double)search->candidate_count * LOOKUP;
        search->eager = lead;
        if (lead < search->count && spent * 4 < expect_postings(search->terms[lead], search))
            search->eager++;   /* try it in the next window */
        if (lead == 0 || spent < expect_postings(search->terms[lead - 1], search))
            break;
        lead--;
        if ((touched_count = score_window(search->terms[lead], search, touched_count, lists)) < 0)
            return -1;
    }
    clear_sums(search, touched_count, lists);
    if (lists)
        qsort(search->candidates, (size_t)search->candidate_count, sizeof *search->candidates, compare_candidates);
    return lead;
}

/* Offer what the window has to the heap. Returns -1 if a block is damaged. */
static int
search_window(Search *search)
{
    Heap *heap = search->heap;
    Py_ssize_t lead = search->lead;
    for (Py_ssize_t t = lead; t < search->count; t++) {
        search->rests[t + 1] = search->rests[t] + bound_window(search->terms[t], search);
        /* Rounding keeps order: a sum that is not above `least` has no score above it. */
        if (search->prunes && search->rests[t + 1] <= heap->least)
            lead = t + 1;
    }
    if (lead == search->count)
        return 0;
    lead = find_candidates(search, lead);
    if (lead < 0 || look_up_rest(search, lead) < 0)
        return -1;
    /* No score is 0. Later documents of equal scores gain nothing. */
    for (Py_ssize_t i = 0; i < search->candidate_count; i++) {
        const float score = (float)search->candidates[i].sum;
        if (score > heap->least)
            offer(heap, (Hit){score, search->base + search->candidates[i].at});
    }
    return 0;
}

/* Returns 0, or -1 if a block is damaged. */
static int
rank_documents(Search *search)
{
    const Index *index = search->index;
    int64_t base = 0;
    for (Py_ssize_t t = 0; t < search->count; t++)
        if (search->terms[t]->table)
            fill_table(search->terms[t], index->factors);
    for (;;) {
        /* `rests` of the terms that no longer lead is the sum of their peaks, whatever the window. */
        while (search->prunes && search->lead < search->count
               && search->rests[search->lead] + search->terms[search->lead]->peak <= search->heap->least) {
            search->rests[search->lead + 1] = search->rests[search->lead] + search->terms[search->lead]->peak;
            search->lead++;
        }
        int64_t next = index->size;
        for (Py_ssize_t t = search->lead; t < search->count; t++) {
            const int64_t document = base < index->size ? find_next(search->terms[t], index, (uint32_t)base) : index->size;
            if (document < 0)
                return -1;
            next = document < next ? document : next;
        }
        if (next >= index->size)
            return 0;
        search->base = (uint32_t)next;
        search->width = (uint32_t)(index->size - next < WINDOW ? index->size - next : WINDOW);
        if (search_window(search) < 0)
            return -1;
        base = next + search->width;
    }
}

static int
compare_peaks(const void *a, const void *b)
{
    const float one = (*(Term *const *)a)->peak, other = (*(Term *const *)b)->peak;
    return (one > other) - (one < other);
}

/* ---------------------------------------------------------------- Python's side */

static int
compare_hits(const void *a, const void *b)
{
    return is_worse(*(const Hit *)a, *(const Hit *)b) - is_worse(*(const Hit *)b, *(const Hit *)a);
}

static PyObject *
list_hits(Heap *heap)
{
    PyObject *list = PyList_New(heap->size);
    if (list == NULL)
        return NULL;
    qsort(heap->hits, (size_t)heap->size, sizeof *heap->hits, compare_hits);
    for (Py_ssize_t i = 0; i < heap->size; i++) {
        PyObject *hit = Py_BuildValue("(kd)", (unsigned long)heap->hits[i].document, (double)heap->hits[i].score);
        if (hit == NULL) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, hit);
    }
    return list;
}

/* How many items of `size` bytes a buffer holds; -1 with an exception if it cannot be an array of them. */
static Py_ssize_t
count_items(const Py_buffer *buffer, size_t size, const char *name)
{
    if (buffer->len % (Py_ssize_t)size || (buffer->len && (uintptr_t)buffer->buf % size)) {
        PyErr_Format(PyExc_ValueError, "%s is not an array of %zu-byte numbers", name, size);
        return -1;
    }
    return buffer->len / (Py_ssize_t)size;
}

/* What a search works with; `release_search` frees it. */
typedef struct {
    Search search;
    Heap heap;
    Term *terms;
    float *tables;
} Work;

static void
release_work(Work *work)
{
    PyMem_Free(work->search.terms);
    PyMem_Free(work->search.rests);
    PyMem_Free(work->search.sums);
    PyMem_Free(work->search.touched);
    PyMem_Free(work->search.candidates);
    PyMem_Free(work->heap.hits);
    PyMem_Free(work->terms);
    PyMem_Free(work->tables);
}

static int
prepare_work(Work *work, const Index *index, const int64_t *spans, const float *weights, Py_ssize_t count)
{
    Search *search = &work->search;
    search->terms = PyMem_Calloc((size_t)count, sizeof *search->terms);
    search->rests = PyMem_Calloc((size_t)count + 1, sizeof *search->rests);
    search->sums = PyMem_Calloc(WINDOW, sizeof *search->sums);
    search->touched = PyMem_Malloc((WINDOW + 1) * sizeof *search->touched);
    search->candidates = PyMem_Malloc((WINDOW + 1) * sizeof *search->candidates);
    work->heap.hits = PyMem_Malloc((size_t)work->heap.limit * sizeof *work->heap.hits);
    work->terms = PyMem_Calloc((size_t)count, sizeof *work->terms);
    Py_ssize_t tables = 0;
    for (Py_ssize_t t = 0; t < count; t++)
        tables += spans[3 * t + 1] > TABLED * CODES;
    work->tables = PyMem_Malloc((size_t)tables * TABLED * CODES * sizeof *work->tables + 1);
    if (search->terms == NULL || search->rests == NULL || search->sums == NULL || search->touched == NULL
        || search->candidates == NULL || work->heap.hits == NULL || work->terms == NULL || work->tables == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    float *free_table = work->tables;
    for (Py_ssize_t t = 0; t < count; t++) {
        const int64_t first = spans[3 * t], frequency = spans[3 * t + 1];
        Term *term = &work->terms[t];
        term->lasts = index->lasts + first;
        term->blocks = index->blocks + first;
        term->frequency = frequency;
        term->block_count = (frequency + BLOCK - 1) / BLOCK;
        term->weight = weights[t];
        term->bounded = -1;
        term->peak = score_bound(weights[t], (unsigned)spans[3 * t + 2]);
        if (frequency > TABLED * CODES) {
            term->table = free_table;
            free_table += TABLED * CODES;
        }
        search->terms[t] = term;
    }
    search->index = index;
    search->count = search->eager = count;
    search->heap = &work->heap;
    search->prunes = is_order_free(weights, count);
    if (search->prunes)
        qsort(search->terms, (size_t)count, sizeof *search->terms, compare_peaks);
    return 0;
}

/* Whether a search with these numbers stays inside the arrays; an exception if not. Returns the pairs of the terms. */
static int64_t
check_numbers(const int64_t *spans, const float *weights, Py_ssize_t count, Py_ssize_t blocks, const Index *index)
{
    int64_t total = 0;
    for (int code = 0; code < CODES; code++)
        if (!(index->factors[code] > 0 && isfinite(index->factors[code]))) {
            PyErr_SetString(PyExc_ValueError, "a factor is not above 0");
            return -1;
        }
    for (Py_ssize_t t = 0; t < count; t++) {
        const int64_t first = spans[3 * t], frequency = spans[3 * t + 1], peak = spans[3 * t + 2];
        if (first < 0 || frequency < 1 || frequency > index->size || first > blocks
            || (frequency + BLOCK - 1) / BLOCK > blocks - first || peak < 0 || peak > 255) {
            PyErr_SetString(PyExc_ValueError, "a term's blocks lie outside the array");
            return -1;
        }
        if (!(weights[t] > 0 && isfinite(weights[t]))) {
            PyErr_SetString(PyExc_ValueError, "a weight is not above 0");
            return -1;
        }
        total += frequency;
    }
    return total;
}

static PyObject *
rank_buffers(Py_buffer *buffers, Py_ssize_t k)
{
    static const char *const names[] = {"lasts", "blocks", "data", "norms", "factors", "spans", "weights"};
    static const size_t sizes[] = {4, 8, 1, 1, 4, 8, 4};
    Py_ssize_t items[7];
    for (int i = 0; i < 7; i++)
        if ((items[i] = count_items(&buffers[i], sizes[i], names[i])) < 0)
            return NULL;
    const Py_ssize_t count = items[6];
    if (items[1] != items[0] || items[4] != CODES || items[5] % 3 || items[5] / 3 != count || items[3] > UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "the lengths of the arrays do not fit");
    if (k < 1)
        return PyErr_Format(PyExc_ValueError, "k must be at least 1");
    const Index index = {buffers[0].buf, buffers[1].buf, buffers[2].buf, buffers[3].buf, buffers[4].buf, items[2],
                         items[3]};
    const int64_t *spans = buffers[5].buf;
    const float *weights = buffers[6].buf;
    const int64_t total = check_numbers(spans, weights, count, items[0], &index);
    if (total < 0)
        return NULL;
    Work work = {.heap = {.limit = k}};
    if (work.heap.limit > index.size)
        work.heap.limit = (Py_ssize_t)index.size;
    if (work.heap.limit > total)
        work.heap.limit = (Py_ssize_t)total;
    if (work.heap.limit == 0)
        return PyList_New(0);
    PyObject *result = NULL;
    if (prepare_work(&work, &index, spans, weights, count) == 0) {
        int failed;
        Py_BEGIN_ALLOW_THREADS
        failed = rank_documents(&work.search);
        Py_END_ALLOW_THREADS
        if (failed)
            PyErr_Format(PyExc_ValueError, "a block of postings contradicts itself");
        else
            result = list_hits(&work.heap);
    }
    release_work(&work);
    return result;
}

static PyObject *
rank_hits(PyObject *module, PyObject *args)
{
    Py_buffer buffers[7];
    Py_ssize_t k;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*n:rank_hits", &buffers[0], &buffers[1], &buffers[2], &buffers[3],
                          &buffers[4], &buffers[5], &buffers[6], &k))
        return NULL;
    PyObject *result = rank_buffers(buffers, k);
    for (int i = 0; i < 7; i++)
        PyBuffer_Release(&buffers[i]);
    return result;
}

static PyMethodDef methods[] = {
    {"rank_hits", rank_hits, METH_VARARGS,
     "rank_hits(lasts, blocks, data, norms, factors, spans, weights, k)\n--\n\n"
     "Numbers and scores of the k best documents; see spear_envs.bm25.ranking.Rank."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_ranking",
    .m_doc = "The compiled loop of BM25.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__ranking(void)
{
    return PyModuleDef_Init(&definition);
}
