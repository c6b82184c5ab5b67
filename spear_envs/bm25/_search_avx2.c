/* _search.c for processors with AVX2, if the compiler can be told so. */

#include "_search.h"

#ifdef HAS_LEVELS
#pragma GCC target("avx2,bmi,bmi2,popcnt")
#define spear_search spear_search_avx2
#include "_search.c"
#endif
