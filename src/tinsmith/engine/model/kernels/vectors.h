/* Vectors of float32, and loads and stores of float32 and bfloat16.
 *
 * Uses the vector types of GCC and Clang; the build compiles everything once per instruction set (see
 * hatch_build.py).
 */

#ifndef TINSMITH_VECTORS_H
#define TINSMITH_VECTORS_H

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

INLINE vec broadcast(float x) { return x - (vec){0}; }

/* Operations that compilers do not derive from vector types. If an argument is NaN, `vec_max` and
 * `vec_min` return the second. */

#if defined(__AVX512F__)
typedef __mmask16 mask;
INLINE mask less_than(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vec blend(mask which, vec yes, vec no) { return _mm512_mask_blend_ps(which, no, yes); }
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
#else
typedef ivec mask;
INLINE mask less_than(vec a, vec b) { return a < b; }
INLINE vec blend(mask which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }
#if defined(__AVX__)
INLINE vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }
#else
INLINE vec vec_max(vec a, vec b) { return blend(less_than(b, a), a, b); }
INLINE vec vec_min(vec a, vec b) { return blend(less_than(a, b), a, b); }
#endif
#endif

/* `is_bf16` is a constant at every call: bfloat16, or else float32. */

INLINE float load_one(const void *from, int64_t at, int is_bf16) {
    if (!is_bf16) return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* 16-bit numbers, in the lower half of each lane. */
INLINE uvec load_bits(const void *from, int64_t at) {
    hvec half;
    memcpy(&half, (const uint16_t *)from + at, sizeof half);
    return __builtin_convertvector(half, uvec);
}

INLINE vec load_vec(const void *from, int64_t at, int is_bf16) {
    if (!is_bf16) {
        vec x;
        memcpy(&x, (const float *)from + at, sizeof x);
        return x;
    }
    return (vec)(load_bits(from, at) << 16);
}

INLINE void store_vec(void *to, int64_t at, vec x, int is_bf16) {
    if (!is_bf16) {
        memcpy((float *)to + at, &x, sizeof x);
        return;
    }
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh(x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* round to nearest even */
    uvec is_number = (uvec)(x == x);
    rounded = (rounded & is_number) | (((bits >> 16) | 0x40) & ~is_number); /* NaN stays NaN */
    hvec half = __builtin_convertvector(rounded, hvec);
#endif
    memcpy((uint16_t *)to + at, &half, sizeof half);
}

INLINE void store_one(void *to, int64_t at, float x, int is_bf16) {
    uint16_t some[2 * LANES];
    store_vec(some, 0, broadcast(x), is_bf16);
    memcpy((char *)to + at * (is_bf16 ? 2 : 4), some, is_bf16 ? 2 : 4);
}

/* Reductions over lanes, in a fixed order. */

#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else /* GCC has the former only since version 12 */
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

INLINE float reduce_sum(vec x) {
    if (LANES == 16) x += SWAPPED_8(x);
    x += SWAPPED_4(x);
    x += SWAPPED_2(x);
    x += SWAPPED_1(x);
    return x[0];
}

INLINE float reduce_max(vec x) {
    if (LANES == 16) x = vec_max(x, SWAPPED_8(x));
    x = vec_max(x, SWAPPED_4(x));
    x = vec_max(x, SWAPPED_2(x));
    x = vec_max(x, SWAPPED_1(x));
    return x[0];
}

/* Transpose LANES × LANES numbers. */
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

/* exp(x), to within 2 ulp. 0 below -87 (-104 with AVX-512), infinity above 88, NaN for NaN.
 *
 * x = n·ln 2 + r with |r| <= ln 2 / 2; exp(r) by its series, and n goes into the exponent. */
INLINE vec exp_vec(vec x) {
#if defined(__AVX512F__)
    vec bounded = vec_min(broadcast(89.0f), vec_max(broadcast(-104.0f), x));
    vec n = _mm512_roundscale_ps(bounded * 1.44269504088896341f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float least = -87.0f, magic = 12582912.0f; /* 1.5 · 2^23: adding it rounds to an integer */
    vec bounded = vec_min(broadcast(88.7f), vec_max(broadcast(least), x));
    vec n = (bounded * 1.44269504088896341f + magic) - magic;
#endif
    vec r = bounded - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec sum = broadcast(1.0f / 5040.0f);
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
    /* In two steps, as 2^n alone may overflow. */
    ivec whole = (ivec)(n + magic) - (ivec)broadcast(magic), part = whole >> 1;
    vec power = sum * (vec)((part + 127) << 23) * (vec)((whole - part + 127) << 23);
    return blend(less_than(x, broadcast(least)), broadcast(0.0f), blend(less_than(broadcast(88.7f), x), x * INFINITY, power));
#endif
}

#endif
