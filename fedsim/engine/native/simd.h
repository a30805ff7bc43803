/* The floating-point type of all kernels and the SIMD vectors that hold it.

   REAL (float or double) is chosen on the compiler's command line. Vectors are those of GCC's and clang's vector
   extension, so one source serves every instruction set; their size is that of the target's registers. */

#ifndef FEDSIM_SIMD_H
#define FEDSIM_SIMD_H

#include <stdint.h>

#ifndef REAL
#define REAL float
#endif
typedef REAL real;

#if defined(__AVX512F__)
enum { SIMD_BYTES = 64 };
#elif defined(__AVX__)
enum { SIMD_BYTES = 32 };
#else
enum { SIMD_BYTES = 16 };
#endif
enum { SIMD_WIDTH = SIMD_BYTES / sizeof(real) }; /* elements of a vector */

/* Needs no more than the alignment of its elements. */
typedef real vec __attribute__((vector_size(SIMD_BYTES), aligned(sizeof(real)), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE int64_t min_int(int64_t x, int64_t y) { return y < x ? y : x; }

INLINE int64_t max_int(int64_t x, int64_t y) { return y > x ? y : x; }

/* The leading dimension of a matrix with n columns: n rounded up to whole vectors, plus one vector where rows would be
   a multiple of 2048 bytes apart and so compete for few cache sets. */
static inline int64_t leading_dimension(int64_t n)
{
    int64_t ld = (n + SIMD_WIDTH - 1) / SIMD_WIDTH * SIMD_WIDTH;
    return ld * sizeof(real) % 2048 ? ld : ld + SIMD_WIDTH;
}

#endif
