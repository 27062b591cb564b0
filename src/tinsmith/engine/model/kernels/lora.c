/* Forward and backward of a LoRA adapter on one linear layer; lora.py has the formula.
 *
 * The factors change with every step, so they are rounded to bfloat16 and pre-packed each time. The
 * forward is bit-identical to `tinsmith_matmul` with frozen factors. Gradients are accumulated in
 * float32.
 */

#include "matmul.h"

#if defined(__AVX512BF16__)

#define MOST_PARTS 3
#define GRADIENT_BLOCK 256   /* outputs that are transposed at a time: as many as fit in cache */
#define GRADIENT_ROWS 1024   /* rows that are transposed at a time, to bound the scratch memory */

/* The factors of one layer in the flat vector of an adapter: A has `rank` rows for each part, and each
 * part has its own B. `starts` are the offsets of A and of each B. */
typedef struct {
    int64_t inputs, rank, parts, outputs[MOST_PARTS], starts[1 + MOST_PARTS];
    float scale;
} lora_shape;

INLINE row_pointer a_of(const lora_shape *f, const float *flat) { return (row_pointer){(char *)(flat + f->starts[0]), f->inputs}; }

INLINE row_pointer b_of(const lora_shape *f, const float *flat, int64_t part) {
    return (row_pointer){(char *)(flat + f->starts[1 + part]), f->rank};
}

/* Size of the scratch memory for `rows`, in 32-bit words. */
int64_t tinsmith_lora_scratch(const lora_shape *f, int64_t rows) {
    const int64_t inner = f->rank * f->parts, pairs = (int_min(rows, GRADIENT_ROWS) + 1) / 2;
    int64_t most = (whole_vectors(inner) * whole_vectors(f->inputs)) / 2;
    most = int_max(most, pairs * (whole_vectors(int_max(f->inputs, f->rank)) + GRADIENT_BLOCK));
    for (int64_t part = 0; part < f->parts; part++)
        most = int_max(most, (whole_vectors(f->outputs[part]) * whole_vectors(f->rank)) / 2);
    return most + rows * whole_vectors(inner);
}

/* t = x·Aᵀ; y += scale · t·Bᵀ; then t *= scale. */
void tinsmith_lora_forward(
    const lora_shape *f, const float *flat, int64_t rows, int64_t threads, row_pointer x, row_pointer y, row_pointer t, uint32_t *scratch
) {
    const int64_t inner = f->rank * f->parts;
    prepack(inner, f->inputs, a_of(f, flat), 0, 1.0f, scratch);
    matmul(
        rows, inner, f->inputs / 2, threads, (left_rows){x.at, x.step * 2, 4}, scratch,
        (matmul_output){t.at, t.step, 1, 0, NULL, 1.0f}
    );
    int64_t first = 0;
    for (int64_t part = 0; part < f->parts; part++) {
        const int64_t outputs = f->outputs[part];
        prepack(outputs, f->rank, b_of(f, flat, part), 0, f->scale, scratch);
        matmul(
            rows, outputs, f->rank / 2, threads, (left_rows){t.at + part * f->rank * 2, t.step * 2, 4}, scratch,
            (matmul_output){y.at + first * 2, y.step, 1, 1, NULL, 1.0f}
        );
        first += outputs;
    }
    if (f->scale == 1.0f) return;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t r = 0; r < inner; r += LANES) {
            const int count = (int)int_min(inner - r, LANES);
            const int64_t at = row * t.step + r;
            store_some(t.at, at, load_some(t.at, at, count, 1) * f->scale, count, 1);
        }
}

/* leftᵀ·right over some rows, in float32. */
INLINE void gradient_of_rows(
    int64_t rows, int64_t threads, row_pointer left, int64_t lefts, row_pointer right, int64_t rights, char *out, int is_added,
    uint32_t *scratch
) {
    const int64_t pairs = (rows + 1) / 2;
    uint32_t *transposed = scratch + pairs * whole_vectors(rights);
    prepack_inputs(rows, rights, right, 1, PANEL, scratch);
    for (int64_t first = 0; first < lefts; first += GRADIENT_BLOCK) {
        const int64_t some = int_min(lefts - first, GRADIENT_BLOCK), width = whole_vectors(some);
        prepack_inputs(rows, some, (row_pointer){left.at + first * 2, left.step}, 1, width, transposed);
        matmul(
            some, rights, pairs, threads, (left_rows){(char *)transposed, 4, width * 4}, scratch,
            (matmul_output){out + first * rights * 4, rights, 0, is_added, NULL, 1.0f}
        );
    }
}

/* leftᵀ·right over all rows; 0 for no rows. */
static void gradient(
    int64_t rows, int64_t threads, row_pointer left, int64_t lefts, row_pointer right, int64_t rights, char *out, int is_added,
    uint32_t *scratch
) {
    for (int64_t row = 0; row == 0 || row < rows; row += GRADIENT_ROWS) {
        const row_pointer some_left = {left.at + row * left.step * 2, left.step};
        const row_pointer some_right = {right.at + row * right.step * 2, right.step};
        const int64_t some = int_min(rows - row, GRADIENT_ROWS);
        gradient_of_rows(some, threads, some_left, lefts, some_right, rights, out, is_added || row, scratch);
    }
}

/* Given dy, and `t` from the forward: adds to dx, and writes the factors' gradients into `gradients`,
 * which has the layout of `flat`, unless it is NULL. With `is_added` they are added to its content. */
void tinsmith_lora_backward(
    const lora_shape *f, const float *flat, float *gradients, int64_t rows, int64_t threads, int64_t is_added, row_pointer dy,
    row_pointer x, row_pointer t, row_pointer dx, uint32_t *scratch
) {
    const int64_t inner = f->rank * f->parts;
    const row_pointer dt = {(char *)scratch, inner};
    scratch += rows * whole_vectors(inner);
    int64_t first = 0;
    for (int64_t part = 0; part < f->parts; part++) {
        const int64_t outputs = f->outputs[part];
        prepack_inputs(outputs, f->rank, b_of(f, flat, part), 0, PANEL, scratch);
        matmul(
            rows, f->rank, outputs / 2, threads, (left_rows){dy.at + first * 2, dy.step * 2, 4}, scratch,
            (matmul_output){dt.at + part * f->rank * 2, inner, 1, 0, NULL, f->scale}
        );
        first += outputs;
    }
    prepack_inputs(inner, f->inputs, a_of(f, flat), 0, PANEL, scratch);
    matmul(
        rows, f->inputs, inner / 2, threads, (left_rows){dt.at, inner * 2, 4}, scratch,
        (matmul_output){dx.at, dx.step, 1, 1, NULL, 1.0f}
    );
    if (!gradients) return;
    gradient(rows, threads, dt, inner, x, f->inputs, a_of(f, gradients).at, (int)is_added, scratch);
    first = 0;
    for (int64_t part = 0; part < f->parts; part++) {
        const row_pointer of_part = {t.at + part * f->rank * 2, t.step};
        const row_pointer dy_part = {dy.at + first * 2, dy.step};
        gradient(rows, threads, dy_part, f->outputs[part], of_part, f->rank, b_of(f, gradients, part).at, (int)is_added, scratch);
        first += f->outputs[part];
    }
}

#endif
