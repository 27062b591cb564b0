/* Products of rows with frozen weights, in bfloat16 on processors that multiply pairs of it.
 *
 * Weights lie in panels of outputs, pairs of inputs one behind the other, as they are read. A few
 * rows go through a panel together, their sums in registers; the panel after it is fetched from
 * memory meanwhile. Few rows, as samples have, are then limited by how fast memory is read, and many
 * by how fast numbers are multiplied.
 *
 * Sums are float32, in the order of the inputs: a row's bits are its own.
 */

#include "numbers.h"
#include "rows.h"

#if defined(__AVX512BF16__)

#define WIDE 3            /* vectors of outputs in a panel */
#define TALL 8            /* rows that go through it together */
#define STRIP 1024        /* pairs of inputs, of which a panel's share stays in the cache */
#define ROW_BLOCK 128     /* rows that go through a panel before the next */
#define PANEL (WIDE * LANES)

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

INLINE void pack(
    int64_t outputs, int64_t inputs, rows_of weight, int is_half, float scale, uint32_t *packed
) {
    const int64_t bytes = is_half ? 2 : 4, pairs = inputs / 2, step = weight.step * bytes;
    const int64_t all_outputs = (outputs + LANES - 1) / LANES * LANES;
    for (int64_t first = 0; first < all_outputs; first += PANEL) {
        const int64_t width = all_outputs - first < PANEL ? all_outputs - first : PANEL;
        for (int64_t pair = 0; pair < pairs; pair += LANES)
            for (int64_t i = 0; i < width; i += LANES) {
                const char *from = weight.at + (first + i) * step + pair * 2 * bytes;
                uint32_t *to = packed + first * pairs + pair * width + i;
                const int64_t some = outputs - first - i;
                if (pairs - pair >= LANES && some >= LANES)
                    pack_some(from, step, LANES, LANES, width, is_half, scale, to);
                else
                    pack_some(from, step, some, pairs - pair < LANES ? (int)(pairs - pair) : LANES, width, is_half, scale, to);
            }
    }
}

/* Outputs in panels, the last perhaps of fewer vectors; in each: pair of inputs, output. Outputs are
 * filled up with zeros to whole vectors. */
void tinsmith_pack(int64_t outputs, int64_t inputs, rows_of weight, uint32_t *packed) {
    pack(outputs, inputs, weight, 1, 1.0f, packed);
}

/* Some rows through a strip of a panel: `sums` has those of the strips before it. */
INLINE void multiply(
    const char *x, int64_t step, int rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next,
    float *sums, int is_first
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
            memcpy(&number, x + r * step + pair * 4, 4);
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(number);
            for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], weights[v], factor);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) write(sums, (r * WIDE + v) * LANES, sum[r][v], 0);
}

#define ROWS_CASE(count) \
    case count: \
        if (next) multiply(x, step, count, panel, vectors, pairs, next, sums, is_first); \
        else multiply(x, step, count, panel, vectors, pairs, NULL, sums, is_first); \
        break;

INLINE void multiply_some(
    const char *x, int64_t step, int rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next,
    float *sums, int is_first
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

/* Numbers of bfloat16, perhaps fewer than a vector has. */
INLINE vec read_some(const void *from, int64_t at, int count) {
    if (count == LANES) return read(from, at, 1);
    uint16_t some[LANES] = {0};
    memcpy(some, (const uint16_t *)from + at, count * 2);
    return read(some, 0, 1);
}

INLINE void write_some(void *to, int64_t at, vec x, int count) {
    if (count == LANES) {
        write(to, at, x, 1);
        return;
    }
    uint16_t some[LANES];
    write(some, 0, x, 1);
    memcpy((uint16_t *)to + at, some, count * 2);
}

INLINE vec rounded(vec x) {
    uint16_t half[LANES];
    write(half, 0, x, 1);
    return read(half, 0, 1);
}

/* All rows of a block through one panel. */
INLINE void through_panel(
    rows_of x, int64_t first_row, int64_t rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next,
    const uint16_t *bias, rows_of out, int64_t first, int64_t outputs, int is_added
) {
    float sums[ROW_BLOCK * PANEL];
    for (int64_t strip = 0; strip < pairs; strip += STRIP) {
        const int64_t some = pairs - strip < STRIP ? pairs - strip : STRIP, at = strip * vectors * LANES;
        for (int64_t row = 0; row < rows; row += TALL) {
            const int count = rows - row < TALL ? (int)(rows - row) : TALL;
            multiply_some(
                x.at + ((first_row + row) * x.step + 2 * strip) * 2, x.step * 2, count, panel + at, vectors, some,
                row ? NULL : next + at * 4, sums + row * PANEL, strip == 0
            );
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) {
            const int64_t output = first + v * LANES, at = (first_row + row) * out.step + output;
            const int count = outputs - output < LANES ? (int)(outputs - output) : LANES;
            vec sum = read(sums, row * PANEL + v * LANES, 0);
            if (bias) sum += read_some(bias, output, count);
            if (is_added) sum = rounded(sum) + read_some(out.at, at, count);
            write_some(out.at, at, sum, count);
        }
}

INLINE void product(
    int64_t rows, int64_t outputs, int64_t inputs, int threads, rows_of x, const uint32_t *packed,
    const uint16_t *bias, rows_of out, int is_added
) {
    const int64_t pairs = inputs / 2, panels = (outputs + PANEL - 1) / PANEL;
    for (int64_t first_row = 0; first_row < rows; first_row += ROW_BLOCK) {
        const int64_t some = rows - first_row < ROW_BLOCK ? rows - first_row : ROW_BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = p * PANEL;
            const int vectors = outputs - first < PANEL ? (int)(outputs - first + LANES - 1) / LANES : WIDE;
            const uint32_t *panel = packed + first * pairs;
            const char *next = (const char *)(p + 1 < panels ? panel + PANEL * pairs : packed);
            if (vectors == 3) through_panel(x, first_row, some, panel, 3, pairs, next, bias, out, first, outputs, is_added);
            else if (vectors == 2) through_panel(x, first_row, some, panel, 2, pairs, next, bias, out, first, outputs, is_added);
            else through_panel(x, first_row, some, panel, 1, pairs, next, bias, out, first, outputs, is_added);
        }
    }
}

/* Rows times packed weights, plus a bias if there is one. */
void tinsmith_product(
    int64_t rows, int64_t outputs, int64_t inputs, int64_t threads, rows_of x, const uint32_t *packed,
    const uint16_t *bias, rows_of out
) {
    product(rows, outputs, inputs, (int)threads, x, packed, bias, out, 0);
}

/* Rows times weights that change too often to be kept packed: float32, or bfloat16 if `is_half`. As if
 * they had been rounded, scaled and packed, and their product added in bfloat16 if `is_added`. `room`
 * is for the packed ones. */
void tinsmith_product_once(
    int64_t rows, int64_t outputs, int64_t inputs, int64_t threads, rows_of x, rows_of weight, int64_t is_half,
    float scale, int64_t is_added, uint32_t *room, rows_of out
) {
    if (is_half) pack(outputs, inputs, weight, 1, 1.0f, room);
    else pack(outputs, inputs, weight, 0, scale, room);
    product(rows, outputs, inputs, (int)threads, x, room, NULL, out, (int)is_added);
}

#endif
