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

/* LANES outputs and `count` pairs of inputs; `width` is how many outputs the panel has. */
INLINE void pack_some(const char *weight, int64_t step, int count, int64_t width, uint32_t *to) {
    uvec rows[LANES];
    for (int i = 0; i < LANES; i++) {
        if (count < LANES) rows[i] = (uvec){0};
        memcpy(&rows[i], weight + i * step, count * 4);
    }
    transpose(rows);
    for (int i = 0; i < count; i++) memcpy(to + i * width, &rows[i], sizeof rows[i]);
}

/* Outputs in panels, the last perhaps of fewer vectors; in each: pair of inputs, output. */
void tinsmith_pack(int64_t outputs, int64_t inputs, rows_of weight, uint32_t *packed) {
    const int64_t pairs = inputs / 2, step = weight.step * 2;
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t width = outputs - first < PANEL ? outputs - first : PANEL;
        for (int64_t pair = 0; pair < pairs; pair += LANES)
            for (int64_t i = 0; i < width; i += LANES) {
                const char *from = weight.at + (first + i) * step + pair * 4;
                uint32_t *to = packed + first * pairs + pair * width + i;
                if (pairs - pair >= LANES) pack_some(from, step, LANES, width, to);
                else pack_some(from, step, (int)(pairs - pair), width, to);
            }
    }
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

/* All rows of a block through one panel. */
INLINE void through_panel(
    rows_of x, int64_t first_row, int64_t rows, const uint32_t *panel, int vectors, int64_t pairs, const char *next,
    const uint16_t *bias, rows_of out, int64_t first
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
            vec sum = read(sums, row * PANEL + v * LANES, 0);
            if (bias) sum += read(bias, first + v * LANES, 1);
            write(out.at, (first_row + row) * out.step + first + v * LANES, sum, 1);
        }
}

/* Rows times packed weights, plus a bias if there is one. */
void tinsmith_product(
    int64_t rows, int64_t outputs, int64_t inputs, int64_t threads_wanted, rows_of x, const uint32_t *packed,
    const uint16_t *bias, rows_of out
) {
    const int threads = (int)threads_wanted;
    const int64_t pairs = inputs / 2, panels = (outputs + PANEL - 1) / PANEL;
    for (int64_t first_row = 0; first_row < rows; first_row += ROW_BLOCK) {
        const int64_t some = rows - first_row < ROW_BLOCK ? rows - first_row : ROW_BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = p * PANEL;
            const int vectors = (int)((outputs - first < PANEL ? outputs - first : PANEL) / LANES);
            const uint32_t *panel = packed + first * pairs;
            const char *next = (const char *)(p + 1 < panels ? panel + PANEL * pairs : packed);
            if (vectors == 3) through_panel(x, first_row, some, panel, 3, pairs, next, bias, out, first);
            else if (vectors == 2) through_panel(x, first_row, some, panel, 2, pairs, next, bias, out, first);
            else through_panel(x, first_row, some, panel, 1, pairs, next, bias, out, first);
        }
    }
}

#endif
