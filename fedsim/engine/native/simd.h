/* The floating-point type of all kernels, the SIMD vectors that hold it, and the arithmetic that gives the same bits on
   every processor.

   REAL (float or double) is chosen on the compiler's command line. Vectors are those of GCC's and clang's vector
   extension, so one source serves every instruction set; their size is that of the target's registers. No result
   depends on it: whatever is summed is summed in one order, and where a product is added to something, fused_add says
   whether it is rounded in between. Compilers must not decide that (-ffp-contract=off). */

#ifndef FEDSIM_SIMD_H
#define FEDSIM_SIMD_H

#include <stdint.h>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef REAL
#define REAL float
#endif
typedef REAL real;

#if defined(__AVX512F__)
enum { SIMD_BYTES = 64 };
#define INSTRUCTIONS "AVX-512"
#elif defined(__AVX__)
enum { SIMD_BYTES = 32 };
#if defined(__FMA__)
#define INSTRUCTIONS "AVX and FMA"
#else
#define INSTRUCTIONS "AVX"
#endif
#else
enum { SIMD_BYTES = 16 };
#if defined(__aarch64__)
#define INSTRUCTIONS "NEON"
#else
#define INSTRUCTIONS "portable"
#endif
#endif
enum { SIMD_WIDTH = SIMD_BYTES / sizeof(real) }; /* elements of a vector */

/* Needs no more than the alignment of its elements. */
typedef real vec __attribute__((vector_size(SIMD_BYTES), aligned(sizeof(real)), may_alias));

/* The result of comparing two vectors: all bits of an element are 1 where it is true. */
typedef __typeof__((vec){0} < (vec){0}) mask;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* a b + c, rounded once. Where the processor has no such instruction the C library computes it, slowly. */
INLINE real fused_add(real a, real b, real c)
{
    return _Generic(a, float: __builtin_fmaf, double: __builtin_fma)(a, b, c);
}

/* a b + c of each element of `b` and `c`, rounded once. */
INLINE vec fused_add_vec(real a, vec b, vec c)
{
    vec as = a - (vec){0};
#if defined(__AVX512F__)
    if (sizeof(real) == sizeof(float)) return (vec)_mm512_fmadd_ps((__m512)as, (__m512)b, (__m512)c);
    return (vec)_mm512_fmadd_pd((__m512d)as, (__m512d)b, (__m512d)c);
#elif defined(__AVX__) && defined(__FMA__)
    if (sizeof(real) == sizeof(float)) return (vec)_mm256_fmadd_ps((__m256)as, (__m256)b, (__m256)c);
    return (vec)_mm256_fmadd_pd((__m256d)as, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
    if (sizeof(real) == sizeof(float)) return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)as, (float32x4_t)b);
    return (vec)vfmaq_f64((float64x2_t)c, (float64x2_t)as, (float64x2_t)b);
#else
    UNROLL for (int i = 0; i < SIMD_WIDTH; i++) c[i] = fused_add(as[i], b[i], c[i]);
    return c;
#endif
}

/* The elements of x where the mask is true, else those of y. */
INLINE vec choose(mask condition, vec x, vec y) { return (vec)((condition & (mask)x) | (~condition & (mask)y)); }

#if defined(__AVX__) && !defined(__AVX512F__)
/* True for the first n elements. */
INLINE mask first_elements(int64_t n)
{
    mask index;
    UNROLL for (int i = 0; i < SIMD_WIDTH; i++) index[i] = i;
    return index < (__typeof__(index[0]))n;
}
#endif

/* The first n elements at x, n >= 1; n may be more than a vector has. The other elements are 0. */
INLINE vec load_first(const real *x, int64_t n)
{
    if (n >= SIMD_WIDTH) return *(const vec *)x;
#if defined(__AVX512F__)
    if (sizeof(real) == sizeof(float)) return (vec)_mm512_maskz_loadu_ps((1u << n) - 1, x);
    return (vec)_mm512_maskz_loadu_pd((1u << n) - 1, x);
#elif defined(__AVX__)
    if (sizeof(real) == sizeof(float)) return (vec)_mm256_maskload_ps((const void *)x, (__m256i)first_elements(n));
    return (vec)_mm256_maskload_pd((const void *)x, (__m256i)first_elements(n));
#else
    vec result = {0};
    for (int64_t i = 0; i < n; i++) result[i] = x[i];
    return result;
#endif
}

/* Writes the first n elements of a vector to x, n >= 1; n may be more than it has. */
INLINE void store_first(real *x, vec values, int64_t n)
{
    if (n >= SIMD_WIDTH) {
        *(vec *)x = values;
        return;
    }
#if defined(__AVX512F__)
    if (sizeof(real) == sizeof(float)) _mm512_mask_storeu_ps(x, (1u << n) - 1, (__m512)values);
    else _mm512_mask_storeu_pd(x, (1u << n) - 1, (__m512d)values);
#elif defined(__AVX__)
    if (sizeof(real) == sizeof(float)) _mm256_maskstore_ps((void *)x, (__m256i)first_elements(n), (__m256)values);
    else _mm256_maskstore_pd((void *)x, (__m256i)first_elements(n), (__m256d)values);
#else
    for (int64_t i = 0; i < n; i++) x[i] = values[i];
#endif
}

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
