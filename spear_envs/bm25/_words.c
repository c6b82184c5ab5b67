/* The words of texts as numbers of terms: the loop of `number_with_python` in postings.py, with the same result.

   Texts are cut at ASCII blanks, over which no token reaches. A table knows each word's terms by its UTF-8; Python is
   asked only for a word that is new to the call. Nothing outlives a call. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define FIRST_SLOTS (1 << 16)   /* a power of two; the table is at most half full */

/* An array that grows. */
typedef struct {
    char *items;
    size_t size, room;   /* bytes */
} Buffer;

typedef struct {
    uint64_t hash;
    size_t key, length;      /* the word, in `keys`; no word is empty, so that a slot of length 0 is free */
    size_t numbers, count;   /* its terms, in `numbers` */
} Word;

typedef struct {
    Word *slots;
    size_t slot_count, word_count;   /* slot_count is a power of two */
    Buffer keys, numbers;
} Table;

static int
append(Buffer *buffer, const void *items, size_t size)
{
    if (buffer->room - buffer->size < size) {
        size_t room = buffer->room + buffer->room / 2 + size + 4096;
        char *grown = room < size ? NULL : PyMem_Realloc(buffer->items, room);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        buffer->items = grown;
        buffer->room = room;
    }
    if (size)
        memcpy(buffer->items + buffer->size, items, size);
    buffer->size += size;
    return 0;
}

static uint64_t
hash_word(const char *word, size_t length)
{
    uint64_t hash = length * UINT64_C(0x9E3779B97F4A7C15);
    for (; length >= 8; word += 8, length -= 8) {
        uint64_t part;
        memcpy(&part, word, 8);
        hash = (hash ^ part) * UINT64_C(0xD6E8FEB86659FD93);
        hash ^= hash >> 32;
    }
    uint64_t part = 0;
    memcpy(&part, word, length);
    hash = (hash ^ part) * UINT64_C(0xD6E8FEB86659FD93);
    return hash ^ hash >> 32;
}

/* The slot of a word, or the free one where it belongs. */
static Word *
find_slot(const Table *table, uint64_t hash, const char *word, size_t length)
{
    const size_t mask = table->slot_count - 1;
    for (size_t at = (size_t)hash & mask;; at = (at + 1) & mask) {
        Word *slot = &table->slots[at];
        if (slot->length == 0
            || (slot->hash == hash && slot->length == length && memcmp(table->keys.items + slot->key, word, length) == 0))
            return slot;
    }
}

static int
grow_table(Table *table)
{
    Table grown = *table;
    grown.slot_count = table->slot_count ? 2 * table->slot_count : FIRST_SLOTS;
    grown.slots = PyMem_Calloc(grown.slot_count, sizeof *grown.slots);
    if (grown.slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t at = 0; at < table->slot_count; at++) {
        const Word *word = &table->slots[at];
        if (word->length)
            *find_slot(&grown, word->hash, grown.keys.items + word->key, word->length) = *word;
    }
    PyMem_Free(table->slots);
    *table = grown;
    return 0;
}

/* Ask Python for the numbers of a new word and keep them in its slot. */
static int
learn_word(Table *table, Word *slot, uint64_t hash, const char *word, size_t length, PyObject *find_numbers)
{
    PyObject *text = PyUnicode_DecodeUTF8(word, (Py_ssize_t)length, "surrogatepass");
    PyObject *found = text == NULL ? NULL : PyObject_CallFunctionObjArgs(find_numbers, text, NULL);
    Py_XDECREF(text);
    if (found == NULL)
        return -1;
    Word made = {hash, table->keys.size, length, table->numbers.size, 0};
    int failed = append(&table->keys, word, length);
    if (!failed && !PyTuple_Check(found)) {
        PyErr_SetString(PyExc_TypeError, "a tuple of numbers is needed");
        failed = -1;
    }
    for (; !failed && made.count < (size_t)PyTuple_GET_SIZE(found); made.count++) {
        const unsigned long number = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(found, (Py_ssize_t)made.count));
        const uint32_t kept = (uint32_t)number;
        if (number == (unsigned long)-1 && PyErr_Occurred())
            failed = -1;
        else
            failed = append(&table->numbers, &kept, sizeof kept);
    }
    Py_DECREF(found);
    if (!failed) {
        *slot = made;
        table->word_count++;
    }
    return failed;
}

static int
is_blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static int
number_text(Table *table, const char *text, size_t length, PyObject *find_numbers, Buffer *occurrences)
{
    for (size_t at = 0; at < length;) {
        if (is_blank(text[at])) {
            at++;
            continue;
        }
        const char *word = text + at;
        while (at < length && !is_blank(text[at]))
            at++;
        const size_t size = (size_t)(text + at - word);
        const uint64_t hash = hash_word(word, size);
        if (2 * table->word_count >= table->slot_count && grow_table(table) < 0)
            return -1;
        Word *slot = find_slot(table, hash, word, size);
        if (slot->length == 0 && learn_word(table, slot, hash, word, size, find_numbers) < 0)
            return -1;
        if (append(occurrences, table->numbers.items + slot->numbers, slot->count * sizeof(uint32_t)) < 0)
            return -1;
    }
    return 0;
}

/* Number one text, given as Python's string. */
static int
number_string(Table *table, PyObject *text, PyObject *find_numbers, Buffer *occurrences)
{
    if (!PyUnicode_Check(text)) {
        PyErr_SetString(PyExc_TypeError, "a text is not a str");
        return -1;
    }
    PyObject *encoded = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    if (encoded == NULL)
        return -1;
    const int failed = number_text(table, PyBytes_AS_STRING(encoded), (size_t)PyBytes_GET_SIZE(encoded), find_numbers,
                                   occurrences);
    Py_DECREF(encoded);
    return failed;
}

static PyObject *
number_words(PyObject *module, PyObject *args)
{
    PyObject *texts, *find_numbers, *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:number_words", &texts, &find_numbers))
        return NULL;
    PyObject *iterator = PyObject_GetIter(texts);
    if (iterator == NULL)
        return NULL;
    Table table = {0};
    Buffer occurrences = {0}, ends = {0};
    PyObject *text;
    int failed = 0;
    while (!failed && (text = PyIter_Next(iterator)) != NULL) {
        failed = number_string(&table, text, find_numbers, &occurrences);
        Py_DECREF(text);
        const int64_t end = (int64_t)(occurrences.size / sizeof(uint32_t));
        if (!failed)
            failed = append(&ends, &end, sizeof end);
    }
    if (!failed && !PyErr_Occurred())
        result = Py_BuildValue("(NN)", PyByteArray_FromStringAndSize(occurrences.items, (Py_ssize_t)occurrences.size),
                               PyByteArray_FromStringAndSize(ends.items, (Py_ssize_t)ends.size));
    Py_DECREF(iterator);
    PyMem_Free(table.slots);
    PyMem_Free(table.keys.items);
    PyMem_Free(table.numbers.items);
    PyMem_Free(occurrences.items);
    PyMem_Free(ends.items);
    return result;
}

static PyMethodDef methods[] = {
    {"number_words", number_words, METH_VARARGS,
     "number_words(texts, find_numbers)\n--\n\nSee spear_envs.bm25.postings.NumberWords."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_words",
    .m_doc = "The compiled loop over the words of texts.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__words(void)
{
    return PyModuleDef_Init(&definition);
}
