/* Matmul in bfloat16 on CPUs with AVX512_BF16: rows on the left, pre-packed weights on the right.
 *
 * Weights are pre-packed in panels of outputs, with pairs of inputs one after another in read order. A
 * few rows go through a panel together, with their sums in registers, while the next panel is
 * prefetched. Few rows, as in decoding, are limited by memory bandwidth, many by arithmetic.
 *
 * Sums are float32 in the order of the inputs, so a row is bit-identical whatever is beside it.
 */

#ifndef TINSMITH_MATMUL_H
#define TINSMITH_MATMUL_H

#include "vectors.h"
#include "rows.h"

#if defined(__AVX512BF16__)

#define WIDE 3            /* vectors of outputs per panel */
#define TALL 8            /* rows that go through a panel together */
#define STRIP 1024        /* pairs of inputs whose part of a panel stays in cache */
#define ROW_BLOCK 128     /* rows that go through a panel before the next one */
#define PANEL (WIDE * LANES)
#define FEW (1 << 16)     /* pairs of weights that fit in cache as a whole */

INLINE int64_t int_max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t int_min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil_div(int64_t whole, int64_t size) { return (whole + size - 1) / size; }
INLINE int64_t whole_vectors(int64_t numbers) { return ceil_div(numbers, LANES) * LANES; }

/* The left operand; strides in bytes, to the next row and the next pair of inputs. */
typedef struct {
    const char *at;
    int64_t row, pair;
} left_rows;

/* Where the sums go: scaled, plus a bias if there is one, as bfloat16 or float32. With `is_added` they
 * are added, once rounded, to what is there. `step` is the row stride in numbers. */
typedef struct {
    char *at;
    int64_t step;
    int is_bf16, is_added;
    const uint16_t *bias;
    float scale;
} matmul_output;

/* Loads and stores of up to LANES numbers */

INLINE vec load_some(const void *from, int64_t at, int count, int is_bf16) {
    if (count == LANES) return load_vec(from, at, is_bf16);
    float some[LANES] = {0};
    memcpy(some, (const char *)from + at * (is_bf16 ? 2 : 4), count * (is_bf16 ? 2 : 4));
    return load_vec(some, 0, is_bf16);
}

INLINE void store_some(void *to, int64_t at, vec x, int count, int is_bf16) {
    if (count == LANES) {
        store_vec(to, at, x, is_bf16);
        return;
    }
    float some[LANES];
    store_vec(some, 0, x, is_bf16);
    memcpy((char *)to + at * (is_bf16 ? 2 : 4), some, count * (is_bf16 ? 2 : 4));
}

INLINE vec rounded(vec x) {
    uint16_t half[LANES];
    store_vec(half, 0, x, 1);
    return load_vec(half, 0, 1);
}

/* Pre-packing of weights with a row per output */

/* `count` pairs of one output's weights: bfloat16, or float32 that is rounded and then scaled. */
INLINE uvec load_pairs(const char *weight, int count, int is_bf16, float scale) {
    uvec pairs = {0};
    if (is_bf16) {
        memcpy(&pairs, weight, count * 4);
        return pairs;
    }
    float numbers[2 * LANES] = {0};
    if (count < LANES) memcpy(numbers, weight, count * 8);
    const float *from = count < LANES ? numbers : (const float *)weight;
    __m512bh half = _mm512_cvtne2ps_pbh(load_vec(from, LANES, 0), load_vec(from, 0, 0));
    if (scale != 1.0f) {
        uint16_t rounded[2 * LANES];
        memcpy(rounded, &half, sizeof rounded);
        half = _mm512_cvtne2ps_pbh(load_vec(rounded, LANES, 1) * scale, load_vec(rounded, 0, 1) * scale);
    }
    memcpy(&pairs, &half, sizeof pairs);
    return pairs;
}

/* Up to LANES outputs and `count` pairs of inputs; missing outputs are 0. `width` is the number of
 * outputs in the panel. */
INLINE void prepack_some(
    const char *weight, int64_t step, int64_t outputs, int count, int64_t width, int is_bf16, float scale, uint32_t *to
) {
    uvec rows[LANES];
    for (int i = 0; i < LANES; i++)
        rows[i] = i < outputs ? load_pairs(weight + i * step, count, is_bf16, scale) : (uvec){0};
    transpose(rows);
    for (int i = 0; i < count; i++) memcpy(to + i * width, &rows[i], sizeof rows[i]);
}

/* Panels of outputs, the last perhaps narrower; each is pair of inputs × output. Outputs are padded with
 * zeros to whole vectors. */
INLINE void prepack(int64_t outputs, int64_t inputs, row_pointer weight, int is_bf16, float scale, uint32_t *prepacked) {
    const int64_t bytes = is_bf16 ? 2 : 4, pairs = inputs / 2, step = weight.step * bytes;
    const int64_t all_outputs = whole_vectors(outputs);
    for (int64_t first = 0; first < all_outputs; first += PANEL) {
        const int64_t width = int_min(all_outputs - first, PANEL);
        for (int64_t pair = 0; pair < pairs; pair += LANES)
            for (int64_t i = 0; i < width; i += LANES) {
                const char *from = weight.at + (first + i) * step + pair * 2 * bytes;
                uint32_t *to = prepacked + first * pairs + pair * width + i;
                const int64_t some = outputs - first - i, count = int_min(pairs - pair, LANES);
                if (some >= LANES && count == LANES) prepack_some(from, step, LANES, LANES, width, is_bf16, scale, to);
                else prepack_some(from, step, some, (int)count, width, is_bf16, scale, to);
            }
    }
}

/* Pre-packing of matrices with a row per input */

/* Numbers rounded to bfloat16, in the lower half of each lane. */
INLINE uvec load_bf16(const char *from, int64_t at, int count, int is_bf16) {
    uint16_t half[LANES] = {0};
    if (is_bf16) memcpy(half, from + at * 2, count * 2);
    else store_vec(half, 0, load_some(from, at, count, 0), 1);
    return load_bits(half, 0);
}

/* Some outputs of an input and, if there is one, of the next input. */
INLINE void prepack_pair(const char *from, int64_t step, int64_t at, int count, int has_second, int is_bf16, uint32_t *to) {
    uvec made = load_bf16(from, at, count, is_bf16);
    if (has_second) made |= load_bf16(from + step, at, count, is_bf16) << 16;
    memcpy(to, &made, sizeof made);
}

/* Like `prepack`, in panels of `panel` outputs. A last unpaired input is paired with 0. */
INLINE void prepack_inputs(int64_t inputs, int64_t outputs, row_pointer weight, int is_bf16, int64_t panel, uint32_t *prepacked) {
    const int64_t step = weight.step * (is_bf16 ? 2 : 4), pairs = (inputs + 1) / 2, all_outputs = whole_vectors(outputs);
    for (int64_t first = 0; first < all_outputs; first += panel) {
        const int64_t width = int_min(all_outputs - first, panel);
        for (int64_t pair = 0; pair < pairs; pair++) {
            const char *from = weight.at + 2 * pair * step;
            uint32_t *to = prepacked + first * pairs + pair * width;
            const int has_second = 2 * pair + 1 < inputs;
            for (int64_t i = 0; i < width; i += LANES) {
                const int64_t output = first + i, count = int_min(outputs - output, LANES);
                if (has_second && count == LANES) prepack_pair(from, step, output, LANES, 1, is_bf16, to + i);
                else prepack_pair(from, step, output, (int)count, has_second, is_bf16, to + i);
            }
        }
    }
}

/* Matmul */

/* Some rows through a strip of a panel; `sums` holds the sums of the previous strips. */
INLINE void multiply(
    left_rows x, int rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next, float *sums, int is_first
) {
    vec sum[TALL][WIDE];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = is_first ? (vec){0} : load_vec(sums, (r * WIDE + v) * LANES, 0);
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh weights[WIDE];
        for (int v = 0; v < vectors; v++) {
            memcpy(&weights[v], panel + (pair * vectors + v) * LANES, sizeof weights[v]);
            /* Few rows finish a panel sooner, so they want the next one in L1. */
            if (next && rows > 4) __builtin_prefetch(next + (pair * vectors + v) * 64, 0, 2);
            else if (next) __builtin_prefetch(next + (pair * vectors + v) * 64, 0, 3);
        }
        for (int r = 0; r < rows; r++) {
            int32_t number;
            memcpy(&number, x.at + r * x.row + pair * x.pair, 4);
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(number);
            for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], weights[v], factor);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store_vec(sums, (r * WIDE + v) * LANES, sum[r][v], 0);
}

#define ROWS_CASE(count) \
    case count: \
        if (next) multiply(x, count, panel, vectors, pairs, next, sums, is_first); \
        else multiply(x, count, panel, vectors, pairs, NULL, sums, is_first); \
        break;

INLINE void multiply_some(
    left_rows x, int rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next, float *sums, int is_first
) {
    switch (rows) {
        ROWS_CASE(1)
        ROWS_CASE(2)
        ROWS_CASE(3)
        ROWS_CASE(4)
        ROWS_CASE(5)
        ROWS_CASE(6)
        ROWS_CASE(7)
        ROWS_CASE(8)
    }
}

INLINE void write_sum(matmul_output out, int64_t row, int64_t output, vec sum, int count) {
    const int64_t at = row * out.step + output;
    sum *= out.scale;
    if (out.bias) sum += load_some(out.bias, output, count, 1);
    if (out.is_bf16) {
        if (out.is_added) sum = rounded(sum) + load_some(out.at, at, count, 1);
        store_some(out.at, at, sum, count, 1);
    } else {
        if (out.is_added) sum += load_some(out.at, at, count, 0);
        store_some(out.at, at, sum, count, 0);
    }
}

/* All rows of a block through one panel, then store the sums. */
INLINE void matmul_panel(
    left_rows x, int64_t rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next, matmul_output out,
    int64_t first_row, int64_t first, int64_t outputs
) {
    float sums[ROW_BLOCK * PANEL];
    x.at += first_row * x.row;
    for (int64_t strip = 0; strip == 0 || strip < pairs; strip += STRIP) { /* without inputs the sum is 0 */
        const int64_t some = int_min(pairs - strip, STRIP), at = strip * vectors * LANES;
        for (int64_t row = 0; row < rows; row += TALL) {
            const int count = (int)int_min(rows - row, TALL);
            const left_rows here = {x.at + row * x.row + strip * x.pair, x.row, x.pair};
            multiply_some(
                here, count, panel + at, vectors, some, row || !next ? NULL : next + at * 4, sums + row * PANEL, strip == 0
            );
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) {
            const int64_t output = first + v * LANES;
            const int count = (int)int_min(outputs - output, LANES);
            write_sum(out, first_row + row, output, load_vec(sums, row * PANEL + v * LANES, 0), count);
        }
}

/* Small weights stay in cache while all rows pass; of large ones, a panel does. The prefetch also covers
 * what follows the last panel, which is probably the next matrix. */
static void matmul(
    int64_t rows, int64_t outputs, int64_t pairs, int64_t threads_wanted, left_rows x, const uint32_t *prepacked, matmul_output out
) {
    const int threads = threads_for(threads_wanted, rows * outputs * pairs / PRODUCTS_PER_NUMBER);
    const int64_t panels = ceil_div(outputs, PANEL);
    const int are_few = outputs * pairs <= FEW;
    /* Blocks of rows have about the same size, as threads get equal numbers of blocks. */
    const int64_t talls = ceil_div(rows, TALL), least = ceil_div(talls, are_few ? 1 : ROW_BLOCK / TALL);
    const int64_t block = TALL * ceil_div(talls, int_max(least, 1)), blocks = ceil_div(rows, int_max(block, 1));
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = p * PANEL, first_row = b * block;
            const int64_t some = int_min(rows - first_row, block);
            const int vectors = (int)(whole_vectors(int_min(outputs - first, PANEL)) / LANES);
            const uint32_t *panel = prepacked + first * pairs;
            const int is_again = p + 1 == panels && b + 1 < blocks;
            const char *next = are_few ? NULL : (const char *)(is_again ? prepacked : panel + PANEL * pairs);
            if (vectors == 3) matmul_panel(x, some, panel, 3, pairs, next, out, first_row, first, outputs);
            else if (vectors == 2) matmul_panel(x, some, panel, 2, pairs, next, out, first_row, first, outputs);
            else matmul_panel(x, some, panel, 1, pairs, next, out, first_row, first, outputs);
        }
}

#endif
#endif
