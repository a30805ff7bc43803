/* Whether numbers are finite; exponential and logarithm, from additions, multiplications and divisions that are rounded
   as IEEE 754 says: the same bits with every compiler, C library and processor, within one unit in the last place of
   the exact values. */

#ifndef FEDSIM_ELEMENTARY_H
#define FEDSIM_ELEMENTARY_H

#include <stdint.h>
#include <string.h>

#include "simd.h"

/* A number's bits as an integer, and its format. */
#define IS_FLOAT (sizeof(real) == sizeof(float))
typedef __typeof__(_Generic((real)0, float: (int32_t)0, double: (int64_t)0)) bits;
enum { MANTISSA_BITS = IS_FLOAT ? 23 : 52, EXPONENT_BIAS = IS_FLOAT ? 127 : 1023 };

INLINE bits bits_of(real x)
{
    bits result;
    memcpy(&result, &x, sizeof(x));
    return result;
}

INLINE real real_of(bits x)
{
    real result;
    memcpy(&result, &x, sizeof(x));
    return result;
}

/* Whether no value is NaN or infinite. */
static inline int are_finite(const real *values, int64_t count)
{
    bits bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= values[i] - values[i] != 0;
    return !bad;
}

/* 2^n for a normal result. */
INLINE real power_of_two(bits n) { return real_of((n + EXPONENT_BIAS) << MANTISSA_BITS); }

/* ln 2 = LN2_HIGH + LN2_LOW, where products of LN2_HIGH and an exponent are exact. */
static const real LN2_HIGH = IS_FLOAT ? 0x1.62ep-1 : 0x1.62e42fefap-1;
static const real LN2_LOW = IS_FLOAT ? 0x1.0bfbe8e7bcd5ep-15 : 0x1.cf79abc9e3b39p-40;

/* e^x for x <= 0 or NaN: 2^n e^r with |r| <= ln 2 / 2, and Taylor's series for e^r. */
INLINE real exponential(real x)
{
    const real lowest = IS_FLOAT ? -104 : -746; /* smaller ones give 0, too */
    const real round = IS_FLOAT ? 0x1.8p23 : 0x1.8p52; /* what is added to it has no bits for fractions */
    static const double inverse_factorials[] = {1, 1, 1 / 2., 1 / 6., 1 / 24., 1 / 120., 1 / 720., 1 / 5040., 1 / 40320.,
                                                1 / 362880., 1 / 3628800., 1 / 39916800., 1 / 479001600.,
                                                1 / 6227020800.};
    real bounded = x > lowest ? x : lowest, sum = 0;
    real shifted = fused_add(bounded, (real)1.44269504088896340736, round), n = shifted - round;
    real r = fused_add(n, -LN2_LOW, fused_add(n, -LN2_HIGH, bounded));
    UNROLL for (int i = IS_FLOAT ? 7 : 13; i >= 0; i--) sum = fused_add(sum, r, (real)inverse_factorials[i]);
    bits exponent = bits_of(shifted) - bits_of(round), half = exponent / 2; /* 2^n may be too small for a number */
    sum = sum * power_of_two(half) * power_of_two(exponent - half);
    return x == x ? sum : x;
}

/* The natural logarithm of a normal x >= 1, or of NaN: x = 2^n m with m near 1, and the series of
   ln m = 2 atanh(s), s = (m - 1) / (m + 1). */
INLINE real logarithm(real x)
{
    const bits root_half = bits_of((real)0.70710678118654752440); /* m is in root_half..2 root_half */
    bits exponent = (bits_of(x) - root_half) >> MANTISSA_BITS;
    real n = exponent, f = real_of(bits_of(x) - exponent * ((bits)1 << MANTISSA_BITS)) - 1;
    real s = f / (2 + f), z = s * s, sum = 0;
    for (int i = IS_FLOAT ? 5 : 11; i >= 1; i--) sum = fused_add(sum, z, (real)2 / (2 * i + 1));
    /* 2 s = f - s f: of the terms only f, which is exact, is large */
    real rest = fused_add(z * s, sum, n * LN2_LOW) - s * f;
    real result = fused_add(n, LN2_HIGH, f + rest);
    return x == x ? result : x;
}

#endif
