/* What an adapter's factors add to a linear layer, and the way back. See lora.py for the formula.
 *
 * Factors change with every step, so they are rounded to bfloat16 and packed each time. On the way in
 * each number is that of `tinsmith_product` with frozen factors, to the last bit. Slopes are summed up
 * in float32, where they stay.
 */

#include "products.h"

#if defined(__AVX512BF16__)

#define MOST_PARTS 3
#define SLOPE_BLOCK 256   /* outputs that are turned at a time: as many as caches hold */
#define SLOPE_ROWS 1024   /* rows that are turned at a time: room for all of a long text is much memory */

/* Those of one layer, in a vector of all: A has `rank` rows for each part, B is apart for each. `starts`
 * are that of A and those of each B. */
typedef struct {
    int64_t inputs, rank, parts, outputs[MOST_PARTS], starts[1 + MOST_PARTS];
    float scale;
} factors;

INLINE rows_of a_of(const factors *f, const float *flat) { return (rows_of){(char *)(flat + f->starts[0]), f->inputs}; }

INLINE rows_of b_of(const factors *f, const float *flat, int64_t part) {
    return (rows_of){(char *)(flat + f->starts[1 + part]), f->rank};
}

/* How many pairs of numbers the room for `rows` has to hold. */
int64_t tinsmith_factors_room(const factors *f, int64_t rows) {
    const int64_t inner = f->rank * f->parts, pairs = (smaller_of(rows, SLOPE_ROWS) + 1) / 2;
    int64_t most = (whole_vectors(inner) * whole_vectors(f->inputs)) / 2;
    most = larger_of(most, pairs * (whole_vectors(larger_of(f->inputs, f->rank)) + SLOPE_BLOCK));
    for (int64_t part = 0; part < f->parts; part++)
        most = larger_of(most, (whole_vectors(f->outputs[part]) * whole_vectors(f->rank)) / 2);
    return most + rows * whole_vectors(inner);
}

/* x·Aᵀ in `t`, and (x·Aᵀ)·Bᵀ added to `y`; `t` is then scaled. */
void tinsmith_factors_add(
    const factors *f, const float *flat, int64_t rows, int64_t threads, rows_of x, rows_of y, rows_of t, uint32_t *room
) {
    const int64_t inner = f->rank * f->parts;
    pack(inner, f->inputs, a_of(f, flat), 0, 1.0f, room);
    product(
        rows, inner, f->inputs / 2, threads, (left_rows){x.at, x.step * 2, 4}, room,
        (sums_to){t.at, t.step, 1, 0, NULL, 1.0f}
    );
    int64_t first = 0;
    for (int64_t part = 0; part < f->parts; part++) {
        const int64_t outputs = f->outputs[part];
        pack(outputs, f->rank, b_of(f, flat, part), 0, f->scale, room);
        product(
            rows, outputs, f->rank / 2, threads, (left_rows){t.at + part * f->rank * 2, t.step * 2, 4}, room,
            (sums_to){y.at + first * 2, y.step, 1, 1, NULL, 1.0f}
        );
        first += outputs;
    }
    if (f->scale == 1.0f) return;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t r = 0; r < inner; r += LANES) {
            const int count = (int)smaller_of(inner - r, LANES);
            const int64_t at = row * t.step + r;
            write_some(t.at, at, read_some(t.at, at, count, 1) * f->scale, count, 1);
        }
}

/* leftᵀ·right over some rows, in float32. */
INLINE void slopes_of_some(
    int64_t rows, int64_t threads, rows_of left, int64_t lefts, rows_of right, int64_t rights, char *out, int is_added,
    uint32_t *room
) {
    const int64_t pairs = (rows + 1) / 2;
    uint32_t *turned = room + pairs * whole_vectors(rights);
    pack_inputs(rows, rights, right, 1, PANEL, room);
    for (int64_t first = 0; first < lefts; first += SLOPE_BLOCK) {
        const int64_t some = smaller_of(lefts - first, SLOPE_BLOCK), width = whole_vectors(some);
        pack_inputs(rows, some, (rows_of){left.at + first * 2, left.step}, 1, width, turned);
        product(
            some, rights, pairs, threads, (left_rows){(char *)turned, 4, width * 4}, room,
            (sums_to){out + first * rights * 4, rights, 0, is_added, NULL, 1.0f}
        );
    }
}

/* The same over all rows; of none it is 0. */
static void slopes(
    int64_t rows, int64_t threads, rows_of left, int64_t lefts, rows_of right, int64_t rights, char *out, int is_added,
    uint32_t *room
) {
    for (int64_t row = 0; row == 0 || row < rows; row += SLOPE_ROWS) {
        const rows_of some_left = {left.at + row * left.step * 2, left.step};
        const rows_of some_right = {right.at + row * right.step * 2, right.step};
        const int64_t some = smaller_of(rows - row, SLOPE_ROWS);
        slopes_of_some(some, threads, some_left, lefts, some_right, rights, out, is_added || row, room);
    }
}

/* Given the outputs' slopes `dy`, and `t` as it came of the way in: what is added to the inputs' `dx`,
 * and the factors' own slopes, in a vector that lies as `flat` does if there is one: added to what is
 * there if `is_added`. */
void tinsmith_factors_back(
    const factors *f, const float *flat, float *gathered, int64_t rows, int64_t threads, int64_t is_added, rows_of dy,
    rows_of x, rows_of t, rows_of dx, uint32_t *room
) {
    const int64_t inner = f->rank * f->parts;
    const rows_of dt = {(char *)room, inner};
    room += rows * whole_vectors(inner);
    int64_t first = 0;
    for (int64_t part = 0; part < f->parts; part++) {
        const int64_t outputs = f->outputs[part];
        pack_inputs(outputs, f->rank, b_of(f, flat, part), 0, PANEL, room);
        product(
            rows, f->rank, outputs / 2, threads, (left_rows){dy.at + first * 2, dy.step * 2, 4}, room,
            (sums_to){dt.at + part * f->rank * 2, inner, 1, 0, NULL, f->scale}
        );
        first += outputs;
    }
    pack_inputs(inner, f->inputs, a_of(f, flat), 0, PANEL, room);
    product(
        rows, f->inputs, inner / 2, threads, (left_rows){dt.at, inner * 2, 4}, room,
        (sums_to){dx.at, dx.step, 1, 1, NULL, 1.0f}
    );
    if (!gathered) return;
    slopes(rows, threads, dt, inner, x, f->inputs, a_of(f, gathered).at, (int)is_added, room);
    first = 0;
    for (int64_t part = 0; part < f->parts; part++) {
        const rows_of of_part = {t.at + part * f->rank * 2, t.step};
        const rows_of dy_part = {dy.at + first * 2, dy.step};
        slopes(rows, threads, dy_part, f->outputs[part], of_part, f->rank, b_of(f, gathered, part).at, (int)is_added, room);
        first += f->outputs[part];
    }
}

#endif
