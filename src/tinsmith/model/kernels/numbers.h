/* Vectors of float32, and how numbers of either type are read into them and written from them.
 *
 * Written with the vector types of GCC and Clang, which compile to whatever the machine has: the
 * build compiles everything once for each kind of machine (see hatch_build.py).
 */

#ifndef TINSMITH_NUMBERS_H
#define TINSMITH_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));

INLINE vec all(float x) { return x - (vec){0}; }

/* What compilers do not make of vector types by themselves. Where one number is a NaN, `larger` and
 * `smaller` give the second. */

#if defined(__AVX512F__)
typedef __mmask16 mask;
INLINE mask is_below(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vec choose(mask which, vec yes, vec no) { return _mm512_mask_blend_ps(which, no, yes); }
INLINE vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec smaller(vec a, vec b) { return _mm512_min_ps(a, b); }
#else
typedef ivec mask;
INLINE mask is_below(vec a, vec b) { return a < b; }
INLINE vec choose(mask which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }
#if defined(__AVX__)
INLINE vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec smaller(vec a, vec b) { return _mm256_min_ps(a, b); }
#else
INLINE vec larger(vec a, vec b) { return choose(is_below(b, a), a, b); }
INLINE vec smaller(vec a, vec b) { return choose(is_below(a, b), a, b); }
#endif
#endif

/* `is_half` is a constant wherever these are called: bfloat16 if so, else float32. */

INLINE float read_one(const void *from, int64_t at, int is_half) {
    if (!is_half) return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Numbers of sixteen bits, in the lower half of each lane. */
INLINE uvec read_bits(const void *from, int64_t at) {
    hvec half;
    memcpy(&half, (const uint16_t *)from + at, sizeof half);
    return __builtin_convertvector(half, uvec);
}

INLINE vec read(const void *from, int64_t at, int is_half) {
    if (!is_half) {
        vec x;
        memcpy(&x, (const float *)from + at, sizeof x);
        return x;
    }
    return (vec)(read_bits(from, at) << 16);
}

INLINE void write(void *to, int64_t at, vec x, int is_half) {
    if (!is_half) {
        memcpy((float *)to + at, &x, sizeof x);
        return;
    }
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh(x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to the nearest, ties to even */
    uvec is_number = (uvec)(x == x);
    rounded = (rounded & is_number) | (((bits >> 16) | 0x40) & ~is_number); /* a NaN stays one */
    hvec half = __builtin_convertvector(rounded, hvec);
#endif
    memcpy((uint16_t *)to + at, &half, sizeof half);
}

INLINE void write_one(void *to, int64_t at, float x, int is_half) {
    uint16_t some[2 * LANES];
    write(some, 0, all(x), is_half);
    memcpy((char *)to + at * (is_half ? 2 : 4), some, is_half ? 2 : 4);
}

/* Lanes are added up, and compared, in a fixed order. */

#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else /* GCC has that one since version 12 alone */
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

#if LANES == 16
#define SWAPPED_8(x) SHUFFLED(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define SWAPPED_4(x) SHUFFLED(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAPPED_2(x) SHUFFLED(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAPPED_1(x) SHUFFLED(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define LOW(a, b) SHUFFLED(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) SHUFFLED(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define SWAPPED_8(x) (x)
#define SWAPPED_4(x) SHUFFLED(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
#define SWAPPED_2(x) SHUFFLED(x, x, 2, 3, 0, 1, 6, 7, 4, 5)
#define SWAPPED_1(x) SHUFFLED(x, x, 1, 0, 3, 2, 5, 4, 7, 6)
#define LOW(a, b) SHUFFLED(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLED(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#endif

INLINE float sum_of(vec x) {
    if (LANES == 16) x += SWAPPED_8(x);
    x += SWAPPED_4(x);
    x += SWAPPED_2(x);
    x += SWAPPED_1(x);
    return x[0];
}

INLINE float largest_of(vec x) {
    if (LANES == 16) x = larger(x, SWAPPED_8(x));
    x = larger(x, SWAPPED_4(x));
    x = larger(x, SWAPPED_2(x));
    x = larger(x, SWAPPED_1(x));
    return x[0];
}

/* As many rows as there are lanes become columns. */
INLINE void transpose(uvec rows[LANES]) {
    for (int stage = 1; stage < LANES; stage *= 2) {
        uvec made[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            made[2 * i] = LOW(rows[i], rows[i + LANES / 2]);
            made[2 * i + 1] = HIGH(rows[i], rows[i + LANES / 2]);
        }
        memcpy(rows, made, sizeof made);
    }
}

/* e to the power of each, to two units in the last place. 0 of what is below -87 in most builds and
 * below -104 in others, infinity above 88, NaN of NaN.
 *
 * x = n·ln 2 + r with |r| <= ln 2 / 2; e^r by its series, and n goes into the exponent. */
INLINE vec power_of_e(vec x) {
#if defined(__AVX512F__)
    vec bounded = smaller(all(89.0f), larger(all(-104.0f), x));
    vec n = _mm512_roundscale_ps(bounded * 1.44269504088896341f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float least = -87.0f, magic = 12582912.0f; /* 1.5 · 2^23: adding it rounds to a whole number */
    vec bounded = smaller(all(88.7f), larger(all(least), x));
    vec n = (bounded * 1.44269504088896341f + magic) - magic;
#endif
    vec r = bounded - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec sum = all(1.0f / 5040.0f);
    sum = sum * r + 1.0f / 720.0f;
    sum = sum * r + 1.0f / 120.0f;
    sum = sum * r + 1.0f / 24.0f;
    sum = sum * r + 1.0f / 6.0f;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
#if defined(__AVX512F__)
    return _mm512_scalef_ps(sum, n);
#else
    /* In two steps, as the power of two alone may be too large. */
    ivec whole = (ivec)(n + magic) - (ivec)all(magic), part = whole >> 1;
    vec power = sum * (vec)((part + 127) << 23) * (vec)((whole - part + 127) << 23);
    return choose(is_below(x, all(least)), all(0.0f), choose(is_below(all(88.7f), x), x * INFINITY, power));
#endif
}

#endif
