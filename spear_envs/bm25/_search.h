/* What _ranking.c gives to a search and takes from it. For _search.c and _ranking.c alone. */

#ifndef SPEAR_SEARCH_H
#define SPEAR_SEARCH_H

#include <stddef.h>

#include "_blocks.h"

#define WINDOW 16384   /* documents: 16 KiB of sums */
#define GROUP 64       /* documents of a word of a map */
#define SPAN 256       /* documents that share a bound of a term with a map */
#define BATCH 64       /* candidates that are scored together */

/* Whether the compiler can be told in the source which commands a processor has. */
#if defined __x86_64__ && defined __GNUC__ && !defined __clang__
#define HAS_LEVELS
#endif

typedef struct {
    float score;
    uint32_t document;
} Hit;

typedef struct {
    Hit *hits;
    ptrdiff_t size, limit;
    float least;  /* of the hits, once there are `limit`; 0 before */
} Heap;

typedef struct {
    const Index *index;
    Heap *heap;
    Term *terms;         /* in the order of the query */
    Term **ordered;      /* all, in descending order of peaks */
    Term **lists;        /* those with gaps, in ascending order of peaks */
    Term **maps;         /* those with maps */
    ptrdiff_t count, list_count, map_count;
    double total, map_total, slack;   /* the sum of all peaks, that of the maps, and more than its rounding */
    double *rests;       /* (list_count + 1): the sum of the peaks of the lists before each */
    /* The first pass goes through these; `rest` is what a document can have of the other terms. */
    ptrdiff_t lead, passed_maps;   /* lists from `lead` on; maps before */
    double rest;
    uint32_t base, width;
    double unit;         /* of the bytes: so many of it are what a document must have */
    uint8_t *sums;       /* (WINDOW) */
    uint8_t *steps;      /* (map_count, WINDOW / SPAN): what a document of the span has of the term at most */
    float *scores;       /* (BATCH, count) */
    double *totals;      /* (WINDOW) */
} Search;

/* Each returns 0, or -1 if a block is damaged. All are the same code, compiled for more of the processor's commands. */
int spear_search(Search *search);
int spear_search_avx2(Search *search);
int spear_search_avx512(Search *search);

static inline int
is_worse(Hit a, Hit b)
{
    return a.score < b.score || (a.score == b.score && a.document > b.document);
}

#endif
