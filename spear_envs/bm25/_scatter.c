/* BM25 over postings: the loop of `rank_with_numpy` in ranking.py, with the same scores to the last bit.

   Documents are taken in windows whose sums stay in the processor's cache. Within a window every term adds its scores;
   then the sums are read, the best kept in a heap, and the window is cleared. The work is in proportion to the postings
   of the query's terms, not to the number of documents. Nothing outlives a call, so that threads do not meet. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Scores are float32 and sums float64 as written: no wider arithmetic here, and no fused by -ffp-contract=off. */
#if FLT_EVAL_METHOD != 0
#error "this processor's float arithmetic is not IEEE's: NumPy's loop will be used"
#endif

#define WINDOW 4096   /* documents: 32 KiB of sums */
#define CODES 256     /* quantised lengths */
#define TABLED 8      /* counts whose scores are worth a table */
#define SPARSE 4      /* a window with fewer than WINDOW / SPARSE postings is read posting by posting */

typedef struct {
    int64_t place, end;   /* postings not yet scored */
    int64_t first;        /* where `place` was when the window began */
    float weight;
    float *table;         /* scores by count - 1 and length, or NULL */
} Term;

typedef struct {
    float score;
    uint32_t document;
} Hit;

typedef struct {
    Hit *hits;
    Py_ssize_t size, limit;
    float least;  /* of the hits, once there are `limit`; 0 before */
} Heap;

typedef struct {
    const uint32_t *documents;
    const uint16_t *counts;
    const uint8_t *norms;
    const float *factors;
    int64_t size;  /* of `norms` */
} Index;

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

static inline float
score_posting(float weight, uint16_t count, float factor)
{
    const float length = (float)count * factor;
    const float share = 1.0f + length;
    const float rest = weight / share;
    return weight - rest;
}

static void
fill_table(Term *term, const float *factors)
{
    for (int count = 0; count < TABLED; count++)
        for (int code = 0; code < CODES; code++)
            term->table[count * CODES + code] = score_posting(term->weight, (uint16_t)(count + 1), factors[code]);
}

/* Add the term's scores to the sums of the window that begins at `base`. A document number below the window, or too
   large, stops the term for good, which `rank_documents` notices; within the window order does not matter. */
static void
score_window(Term *term, const Index *index, double *sums, uint32_t base, uint32_t width)
{
    const uint32_t *documents = index->documents;
    const uint16_t *counts = index->counts;
    const uint8_t *norms = index->norms + base;
    const int64_t end = term->end;
    int64_t place = term->place;
    term->first = place;
    if (term->table) {
        const float *table = term->table;
        for (; place < end; place++) {
            const uint32_t at = documents[place] - base;
            const uint32_t count = (uint32_t)counts[place] - 1;
            if (at >= width)
                break;
            sums[at] += count < TABLED ? table[count * CODES + norms[at]]
                                       : score_posting(term->weight, counts[place], index->factors[norms[at]]);
        }
    }
    else {
        for (; place < end; place++) {
            const uint32_t at = documents[place] - base;
            if (at >= width)
                break;
            sums[at] += score_posting(term->weight, counts[place], index->factors[norms[at]]);
        }
    }
    term->place = place;
}

/* Read all sums of a window and clear them. No score is 0, so that documents without a term stay out from the beginning;
   equal scores of later documents are no gain. */
static void
collect_window(Heap *heap, double *sums, uint32_t base, uint32_t width)
{
    uint32_t at = 0;
    for (; at + 8 <= width; at += 8) {
        /* Rounding keeps order: a sum that is not above `least` has no score above it. */
        const double least = heap->least;
        int any = 0;
        for (int i = 0; i < 8; i++)
            any |= sums[at + i] > least;
        if (!any)
            continue;
        for (uint32_t i = at; i < at + 8; i++)
            if ((float)sums[i] > heap->least)
                offer(heap, (Hit){(float)sums[i], base + i});
    }
    for (; at < width; at++)
        if ((float)sums[at] > heap->least)
            offer(heap, (Hit){(float)sums[at], base + at});
    memset(sums, 0, width * sizeof *sums);
}

/* Read and clear the sums of a window's postings alone. */
static void
collect_postings(Heap *heap, double *sums, uint32_t base, const Term *terms, Py_ssize_t count, const Index *index)
{
    for (Py_ssize_t t = 0; t < count; t++)
        for (int64_t place = terms[t].first; place < terms[t].place; place++) {
            const uint32_t at = index->documents[place] - base;
            const float score = (float)sums[at];
            sums[at] = 0;
            if (score > 0 && score >= heap->least)
                offer(heap, (Hit){score, base + at});
        }
}

/* Returns 0, or -1 if document numbers are not ascending or too large. */
static int
rank_documents(const Index *index, Term *terms, Py_ssize_t count, double *sums, Heap *heap)
{
    for (Py_ssize_t t = 0; t < count; t++)
        if (terms[t].table)
            fill_table(&terms[t], index->factors);
    for (;;) {
        int64_t next = -1;
        for (Py_ssize_t t = 0; t < count; t++)
            if (terms[t].place < terms[t].end) {
                const int64_t document = index->documents[terms[t].place];
                if (next < 0 || document < next)
                    next = document;
            }
        if (next < 0)
            return 0;
        if (next >= index->size)
            return -1;
        const uint32_t base = (uint32_t)next;
        const uint32_t width = (uint32_t)(index->size - next < WINDOW ? index->size - next : WINDOW);
        int64_t postings = 0;
        for (Py_ssize_t t = 0; t < count; t++) {
            score_window(&terms[t], index, sums, base, width);
            /* What is left of the term must lie behind the window. */
            if (terms[t].place < terms[t].end && index->documents[terms[t].place] < (uint64_t)base + width)
                return -1;
            postings += terms[t].place - terms[t].first;
        }
        if (postings < width / SPARSE)
            collect_postings(heap, sums, base, terms, count, index);
        else
            collect_window(heap, sums, base, width);
    }
}

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
        PyErr_Format(PyExc_ValueError, "%s is no array of %zu-byte numbers", name, size);
        return -1;
    }
    return buffer->len / (Py_ssize_t)size;
}

static PyObject *
rank_buffers(Py_buffer *buffers, Py_ssize_t k)
{
    static const char *const names[] = {"documents", "counts", "norms", "factors", "spans", "weights"};
    static const size_t sizes[] = {4, 2, 1, 4, 8, 4};
    Py_ssize_t items[6];
    for (int i = 0; i < 6; i++)
        if ((items[i] = count_items(&buffers[i], sizes[i], names[i])) < 0)
            return NULL;
    const Py_ssize_t postings = items[0], size = items[2], count = items[5];
    if (items[1] != postings || items[3] != CODES || items[4] % 2 || items[4] / 2 != count || size > UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "the lengths of the arrays do not fit");
    if (k < 1)
        return PyErr_Format(PyExc_ValueError, "k must be at least 1");
    const Index index = {buffers[0].buf, buffers[1].buf, buffers[2].buf, buffers[3].buf, size};
    const int64_t *spans = buffers[4].buf;
    const float *weights = buffers[5].buf;

    Py_ssize_t tables = 0, total = 0;
    for (Py_ssize_t t = 0; t < count; t++) {
        const int64_t start = spans[2 * t], end = spans[2 * t + 1];
        if (start < 0 || start > end || end > postings)
            return PyErr_Format(PyExc_ValueError, "a term's postings lie outside the array");
        tables += end - start > TABLED * CODES;
        total = end - start > PY_SSIZE_T_MAX - total ? PY_SSIZE_T_MAX : total + (end - start);
    }
    Heap heap = {.limit = k};
    if (heap.limit > size)
        heap.limit = size;
    if (heap.limit > total)
        heap.limit = total;
    if (heap.limit == 0)
        return PyList_New(0);
    PyObject *result = NULL;
    heap.hits = PyMem_Malloc((size_t)heap.limit * sizeof *heap.hits);
    Term *terms = PyMem_Malloc((size_t)count * sizeof *terms);
    float *table = PyMem_Malloc((size_t)tables * TABLED * CODES * sizeof *table + 1);
    double *sums = PyMem_Calloc(WINDOW, sizeof *sums);
    if (heap.hits == NULL || terms == NULL || table == NULL || sums == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    float *free_table = table;
    for (Py_ssize_t t = 0; t < count; t++) {
        const int64_t start = spans[2 * t], end = spans[2 * t + 1];
        terms[t] = (Term){start, end, start, weights[t], NULL};
        if (end - start > TABLED * CODES) {
            terms[t].table = free_table;
            free_table += TABLED * CODES;
        }
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = rank_documents(&index, terms, count, sums, &heap);
    Py_END_ALLOW_THREADS
    if (failed)
        PyErr_Format(PyExc_ValueError, "document numbers are not ascending");
    else
        result = list_hits(&heap);
done:
    PyMem_Free(heap.hits);
    PyMem_Free(terms);
    PyMem_Free(table);
    PyMem_Free(sums);
    return result;
}

static PyObject *
rank_hits(PyObject *module, PyObject *args)
{
    Py_buffer buffers[6];
    Py_ssize_t k;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*n:rank_hits", &buffers[0], &buffers[1], &buffers[2], &buffers[3], &buffers[4],
                          &buffers[5], &k))
        return NULL;
    PyObject *result = rank_buffers(buffers, k);
    for (int i = 0; i < 6; i++)
        PyBuffer_Release(&buffers[i]);
    return result;
}

static PyMethodDef methods[] = {
    {"rank_hits", rank_hits, METH_VARARGS,
     "rank_hits(documents, counts, norms, factors, spans, weights, k)\n--\n\n"
     "Numbers and scores of the k best documents; see spear_envs.bm25.ranking.Rank."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_scatter",
    .m_doc = "The compiled loop of BM25.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__scatter(void)
{
    return PyModuleDef_Init(&definition);
}
