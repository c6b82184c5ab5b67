/* Python's side of the compiled loop of BM25: what is given is checked, and the search is done by _search.c. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_search.h"

#define BUFFERS 8

static int
compare_peaks(const void *a, const void *b)
{
    const float one = (*(Term *const *)a)->peak, other = (*(Term *const *)b)->peak;
    return (one > other) - (one < other);
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
        PyErr_Format(PyExc_ValueError, "%s is not an array of %zu-byte numbers", name, size);
        return -1;
    }
    return buffer->len / (Py_ssize_t)size;
}

/* What a search works with; `release_work` frees it. */
typedef struct {
    Search search;
    Heap heap;
    Term *terms;
} Work;

static void
release_work(Work *work)
{
    PyMem_Free(work->search.ordered);
    PyMem_Free(work->search.lists);
    PyMem_Free(work->search.maps);
    PyMem_Free(work->search.rests);
    PyMem_Free(work->search.sums);
    PyMem_Free(work->search.steps);
    PyMem_Free(work->search.scores);
    PyMem_Free(work->search.totals);
    PyMem_Free(work->heap.hits);
    PyMem_Free(work->terms);
}

static int
prepare_work(Work *work, const Index *index, const int64_t *spans, const float *weights, Py_ssize_t count)
{
    Search *search = &work->search;
    const size_t size = (size_t)count;
    Py_ssize_t map_count = 0;
    for (Py_ssize_t t = 0; t < count; t++)
        map_count += spans[4 * t + 3] >= 0;
    search->ordered = PyMem_Calloc(size, sizeof *search->ordered);
    search->lists = PyMem_Calloc(size, sizeof *search->lists);
    search->maps = PyMem_Calloc(size, sizeof *search->maps);
    search->rests = PyMem_Calloc(size + 1, sizeof *search->rests);
    search->sums = PyMem_Calloc(WINDOW, sizeof *search->sums);
    search->steps = PyMem_Malloc((size_t)map_count * (WINDOW / SPAN) + 1);
    search->scores = PyMem_Malloc(BATCH * size * sizeof *search->scores);
    search->totals = PyMem_Malloc(WINDOW * sizeof *search->totals);
    work->heap.hits = PyMem_Malloc((size_t)work->heap.limit * sizeof *work->heap.hits);
    search->terms = work->terms = PyMem_Calloc(size, sizeof *work->terms);
    if (search->ordered == NULL || search->lists == NULL || search->maps == NULL || search->rests == NULL
        || search->sums == NULL || search->steps == NULL || search->scores == NULL || search->totals == NULL
        || work->heap.hits == NULL || work->terms == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t t = 0; t < count; t++) {
        const int64_t first = spans[4 * t], map = spans[4 * t + 3];
        Term *term = &work->terms[t];
        term->lasts = index->lasts + first;
        term->blocks = index->blocks + first;
        term->map = map >= 0 ? index->maps + map * index->map_words : NULL;
        term->frequency = spans[4 * t + 1];
        term->block_count = (term->frequency + BLOCK - 1) / BLOCK;
        term->weight = weights[t];
        term->peak = score_bound(weights[t], (unsigned)spans[4 * t + 2]);
        search->total += term->peak;
        search->map_total += map >= 0 ? term->peak : 0;
        search->ordered[t] = term;
    }
    search->index = index;
    search->heap = &work->heap;
    search->count = count;
    search->slack = 1e-9 * search->total;
    qsort(search->ordered, size, sizeof *search->ordered, compare_peaks);
    for (Py_ssize_t t = 0; t < count; t++) {
        Term *term = search->ordered[t];
        if (term->map)
            search->maps[search->map_count++] = term;
        else {
            search->rests[search->list_count + 1] = search->rests[search->list_count] + term->peak;
            search->lists[search->list_count++] = term;
        }
    }
    for (Py_ssize_t t = 0; t < count / 2; t++) {
        Term *term = search->ordered[t];
        search->ordered[t] = search->ordered[count - 1 - t];
        search->ordered[count - 1 - t] = term;
    }
    return 0;
}

/* The searches that there are, each for processors with more commands than the one before. */
static int (*const levels[])(Search *) = {
    spear_search,
#ifdef HAS_LEVELS
    spear_search_avx2,
    spear_search_avx512,
#endif
};

/* The last of them that this processor can do. */
static int
find_level(void)
{
#ifdef HAS_LEVELS
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("bmi2"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt"))
        return 1;
#endif
    return 0;
}

/* Whether a search with these numbers stays inside the arrays; an exception if not. Returns the pairs of the terms. */
static int64_t
check_numbers(const int64_t *spans, const float *weights, Py_ssize_t count, Py_ssize_t blocks, Py_ssize_t maps,
              const Index *index)
{
    int64_t total = 0;
    for (int code = 0; code < CODES; code++)
        if (!(index->factors[code] > 0 && isfinite(index->factors[code]))) {
            PyErr_SetString(PyExc_ValueError, "a factor is not above 0");
            return -1;
        }
    for (Py_ssize_t t = 0; t < count; t++) {
        const int64_t first = spans[4 * t], frequency = spans[4 * t + 1], peak = spans[4 * t + 2], map = spans[4 * t + 3];
        if (first < 0 || frequency < 1 || frequency > index->size || first > blocks
            || (frequency + BLOCK - 1) / BLOCK > blocks - first || peak < 0 || peak > 255 || map >= maps) {
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
rank_buffers(Py_buffer *buffers, Py_ssize_t k, int level)
{
    static const char *const names[] = {"lasts", "blocks", "data", "norms", "maps", "factors", "spans", "weights"};
    static const size_t sizes[BUFFERS] = {4, 8, 1, 1, 8, 4, 8, 4};
    Py_ssize_t items[BUFFERS];
    for (int i = 0; i < BUFFERS; i++)
        if ((items[i] = count_items(&buffers[i], sizes[i], names[i])) < 0)
            return NULL;
    const Py_ssize_t count = items[7], words = (items[3] + SPAN - 1) / SPAN * (SPAN / GROUP);
    if (items[1] != items[0] || items[5] != CODES || items[6] % 4 || items[6] / 4 != count || items[3] > UINT32_MAX
        || (words ? items[4] % words : items[4]))
        return PyErr_Format(PyExc_ValueError, "the lengths of the arrays do not fit");
    if (k < 1)
        return PyErr_Format(PyExc_ValueError, "k must be at least 1");
    if (level < 0 || level > find_level())
        return PyErr_Format(PyExc_ValueError, "this processor has no level %d", level);
    const Index index = {buffers[0].buf, buffers[1].buf, buffers[2].buf, buffers[3].buf, buffers[4].buf,
                         buffers[5].buf, items[2], items[3], words};
    const int64_t *spans = buffers[6].buf;
    const float *weights = buffers[7].buf;
    const int64_t total = check_numbers(spans, weights, count, items[0], words ? items[4] / words : 0, &index);
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
        failed = levels[level](&work.search);
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
    Py_buffer buffers[BUFFERS];
    Py_ssize_t k;
    int level = find_level();
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*y*n|i:rank_hits", &buffers[0], &buffers[1], &buffers[2], &buffers[3],
                          &buffers[4], &buffers[5], &buffers[6], &buffers[7], &k, &level))
        return NULL;
    PyObject *result = rank_buffers(buffers, k, level);
    for (int i = 0; i < BUFFERS; i++)
        PyBuffer_Release(&buffers[i]);
    return result;
}

static PyMethodDef methods[] = {
    {"rank_hits", rank_hits, METH_VARARGS,
     "rank_hits(lasts, blocks, data, norms, maps, factors, spans, weights, k, level=...)\n--\n\n"
     "Numbers and scores of the k best documents; see spear_envs.bm25.index.Rank. A level below the processor's gives\n"
     "the same with fewer of its commands."},
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
