/* Products in bfloat16, on processors that multiply pairs of it: rows on the left, packed weights on
 * the right.
 *
 * Weights lie in panels of outputs, pairs of inputs one behind the other, as they are read. A few
 * rows go through a panel together, their sums in registers; the panel after it is fetched from
 * memory meanwhile. Few rows, as samples have, are then limited by how fast memory is read, and many
 * by how fast numbers are multiplied.
 *
 * Sums are float32, in the order of the inputs: a row's bits are its own.
 */

#ifndef TINSMITH_PRODUCTS_H
#define TINSMITH_PRODUCTS_H

#include "numbers.h"
#include "rows.h"

#if defined(__AVX512BF16__)

#define WIDE 3            /* vectors of outputs in a panel */
#define TALL 8            /* rows that go through it together */
#define STRIP 1024        /* pairs of inputs, of which a panel's share stays in the cache */
#define ROW_BLOCK 128     /* rows that go through a panel before the next */
#define PANEL (WIDE * LANES)
#define FEW (1 << 16)     /* pairs of weights that stay in the cache as a whole */

INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t parts_of(int64_t whole, int64_t size) { return (whole + size - 1) / size; }
INLINE int64_t whole_vectors(int64_t numbers) { return parts_of(numbers, LANES) * LANES; }

/* Rows that are multiplied, by bytes: the next row, and the next pair of inputs. */
typedef struct {
    const char *at;
    int64_t row, pair;
} left_rows;

/* What becomes of the sums: times a scale, plus a bias if there is one, in bfloat16 or float32; and
 * added to what is there, once rounded, if `is_added`. `step` counts numbers. */
typedef struct {
    char *at;
    int64_t step;
    int is_half, is_added;
    const uint16_t *bias;
    float scale;
} sums_to;

/* Reading and writing, where there are perhaps fewer numbers than a vector has */

INLINE vec read_some(const void *from, int64_t at, int count, int is_half) {
    if (count == LANES) return read(from, at, is_half);
    float some[LANES] = {0};
    memcpy(some, (const char *)from + at * (is_half ? 2 : 4), count * (is_half ? 2 : 4));
    return read(some, 0, is_half);
}

INLINE void write_some(void *to, int64_t at, vec x, int count, int is_half) {
    if (count == LANES) {
        write(to, at, x, is_half);
        return;
    }
    float some[LANES];
    write(some, 0, x, is_half);
    memcpy((char *)to + at * (is_half ? 2 : 4), some, count * (is_half ? 2 : 4));
}

INLINE vec rounded(vec x) {
    uint16_t half[LANES];
    write(half, 0, x, 1);
    return read(half, 0, 1);
}

/* Packing weights of which each output has its own row */

/* `count` pairs of one output's weights: bfloat16, or float32 that is rounded and then scaled. */
INLINE uvec read_pairs(const char *weight, int count, int is_half, float scale) {
    uvec pairs = {0};
    if (is_half) {
        memcpy(&pairs, weight, count * 4);
        return pairs;
    }
    float numbers[2 * LANES] = {0};
    if (count < LANES) memcpy(numbers, weight, count * 8);
    const float *from = count < LANES ? numbers : (const float *)weight;
    __m512bh half = _mm512_cvtne2ps_pbh(read(from, LANES, 0), read(from, 0, 0));
    if (scale != 1.0f) {
        uint16_t rounded[2 * LANES];
        memcpy(rounded, &half, sizeof rounded);
        half = _mm512_cvtne2ps_pbh(read(rounded, LANES, 1) * scale, read(rounded, 0, 1) * scale);
    }
    memcpy(&pairs, &half, sizeof pairs);
    return pairs;
}

/* Up to LANES outputs and `count` pairs of inputs; outputs that are missing are 0. `width` is how
 * many outputs the panel has. */
INLINE void pack_some(
    const char *weight, int64_t step, int64_t outputs, int count, int64_t width, int is_half, float scale, uint32_t *to
) {
    uvec rows[LANES];
    for (int i = 0; i < LANES; i++)
        rows[i] = i < outputs ? read_pairs(weight + i * step, count, is_half, scale) : (uvec){0};
    transpose(rows);
    for (int i = 0; i < count; i++) memcpy(to + i * width, &rows[i], sizeof rows[i]);
}

/* Outputs in panels, the last perhaps of fewer vectors; in each: pair of inputs, output. Outputs are
 * filled up with zeros to whole vectors. */
INLINE void pack(int64_t outputs, int64_t inputs, rows_of weight, int is_half, float scale, uint32_t *packed) {
    const int64_t bytes = is_half ? 2 : 4, pairs = inputs / 2, step = weight.step * bytes;
    const int64_t all_outputs = whole_vectors(outputs);
    for (int64_t first = 0; first < all_outputs; first += PANEL) {
        const int64_t width = smaller_of(all_outputs - first, PANEL);
        for (int64_t pair = 0; pair < pairs; pair += LANES)
            for (int64_t i = 0; i < width; i += LANES) {
                const char *from = weight.at + (first + i) * step + pair * 2 * bytes;
                uint32_t *to = packed + first * pairs + pair * width + i;
                const int64_t some = outputs - first - i, count = smaller_of(pairs - pair, LANES);
                if (some >= LANES && count == LANES) pack_some(from, step, LANES, LANES, width, is_half, scale, to);
                else pack_some(from, step, some, (int)count, width, is_half, scale, to);
            }
    }
}

/* Packing what has a row for each input */

/* Numbers, rounded to bfloat16, in the lower half of each lane. */
INLINE uvec read_halves(const char *from, int64_t at, int count, int is_half) {
    uint16_t half[LANES] = {0};
    if (is_half) memcpy(half, from + at * 2, count * 2);
    else write(half, 0, read_some(from, at, count, 0), 1);
    return read_bits(half, 0);
}

/* Some outputs of an input and, if there is one, of that after it. */
INLINE void pack_pair(const char *from, int64_t step, int64_t at, int count, int has_second, int is_half, uint32_t *to) {
    uvec made = read_halves(from, at, count, is_half);
    if (has_second) made |= read_halves(from + step, at, count, is_half) << 16;
    memcpy(to, &made, sizeof made);
}

/* As `pack` does it, in panels of so many outputs. A last input without another is paired with 0. */
INLINE void pack_inputs(int64_t inputs, int64_t outputs, rows_of weight, int is_half, int64_t panel, uint32_t *packed) {
    const int64_t step = weight.step * (is_half ? 2 : 4), pairs = (inputs + 1) / 2, all_outputs = whole_vectors(outputs);
    for (int64_t first = 0; first < all_outputs; first += panel) {
        const int64_t width = smaller_of(all_outputs - first, panel);
        for (int64_t pair = 0; pair < pairs; pair++) {
            const char *from = weight.at + 2 * pair * step;
            uint32_t *to = packed + first * pairs + pair * width;
            const int has_second = 2 * pair + 1 < inputs;
            for (int64_t i = 0; i < width; i += LANES) {
                const int64_t output = first + i, count = smaller_of(outputs - output, LANES);
                if (has_second && count == LANES) pack_pair(from, step, output, LANES, 1, is_half, to + i);
                else pack_pair(from, step, output, (int)count, has_second, is_half, to + i);
            }
        }
    }
}

/* Multiplying */

/* Some rows through a strip of a panel: `sums` has those of the strips before it. */
INLINE void multiply(
    left_rows x, int rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next, float *sums, int is_first
) {
    vec sum[TALL][WIDE];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = is_first ? (vec){0} : read(sums, (r * WIDE + v) * LANES, 0);
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh weights[WIDE];
        for (int v = 0; v < vectors; v++) {
            memcpy(&weights[v], panel + (pair * vectors + v) * LANES, sizeof weights[v]);
            /* Few rows are soon done with a panel, and want the next one nearer. */
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
        for (int v = 0; v < vectors; v++) write(sums, (r * WIDE + v) * LANES, sum[r][v], 0);
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

INLINE void write_sum(sums_to out, int64_t row, int64_t output, vec sum, int count) {
    const int64_t at = row * out.step + output;
    sum *= out.scale;
    if (out.bias) sum += read_some(out.bias, output, count, 1);
    if (out.is_half) {
        if (out.is_added) sum = rounded(sum) + read_some(out.at, at, count, 1);
        write_some(out.at, at, sum, count, 1);
    } else {
        if (out.is_added) sum += read_some(out.at, at, count, 0);
        write_some(out.at, at, sum, count, 0);
    }
}

/* All rows of a block through one panel, and on to where the sums go. */
INLINE void through_panel(
    left_rows x, int64_t rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next, sums_to out,
    int64_t first_row, int64_t first, int64_t outputs
) {
    float sums[ROW_BLOCK * PANEL];
    x.at += first_row * x.row;
    for (int64_t strip = 0; strip == 0 || strip < pairs; strip += STRIP) { /* a sum of nothing is 0 */
        const int64_t some = smaller_of(pairs - strip, STRIP), at = strip * vectors * LANES;
        for (int64_t row = 0; row < rows; row += TALL) {
            const int count = (int)smaller_of(rows - row, TALL);
            const left_rows here = {x.at + row * x.row + strip * x.pair, x.row, x.pair};
            multiply_some(
                here, count, panel + at, vectors, some, row || !next ? NULL : next + at * 4, sums + row * PANEL, strip == 0
            );
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) {
            const int64_t output = first + v * LANES;
            const int count = (int)smaller_of(outputs - output, LANES);
            write_sum(out, first_row + row, output, read(sums, row * PANEL + v * LANES, 0), count);
        }
}

/* Few weights stay where they are while row after row goes through them; of many, a panel does. What
 * lies behind the last panel is fetched too: it is likely the matrix that is wanted next. */
static void product(
    int64_t rows, int64_t outputs, int64_t pairs, int64_t threads_wanted, left_rows x, const uint32_t *packed, sums_to out
) {
    const int threads = threads_for(threads_wanted, rows * outputs * pairs / PRODUCTS_PER_NUMBER);
    const int64_t panels = parts_of(outputs, PANEL);
    const int are_few = outputs * pairs <= FEW;
    /* Blocks of rows are about alike, as threads have equal numbers of them. */
    const int64_t talls = parts_of(rows, TALL), least = parts_of(talls, are_few ? 1 : ROW_BLOCK / TALL);
    const int64_t block = TALL * parts_of(talls, larger_of(least, 1)), blocks = parts_of(rows, larger_of(block, 1));
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = p * PANEL, first_row = b * block;
            const int64_t some = smaller_of(rows - first_row, block);
            const int vectors = (int)(whole_vectors(smaller_of(outputs - first, PANEL)) / LANES);
            const uint32_t *panel = packed + first * pairs;
            const int is_again = p + 1 == panels && b + 1 < blocks;
            const char *next = are_few ? NULL : (const char *)(is_again ? packed : panel + PANEL * pairs);
            if (vectors == 3) through_panel(x, some, panel, 3, pairs, next, out, first_row, first, outputs);
            else if (vectors == 2) through_panel(x, some, panel, 2, pairs, next, out, first_row, first, outputs);
            else through_panel(x, some, panel, 1, pairs, next, out, first_row, first, outputs);
        }
}

#endif
#endif
