/* _search.c for processors with AVX-512, if the compiler can be told so. */

#include "_search.h"

#ifdef HAS_LEVELS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,bmi,bmi2,popcnt")
#define spear_search spear_search_avx512
#include "_search.c"
#endif
