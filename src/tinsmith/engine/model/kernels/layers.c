/* RMS norm, RoPE and gated activations, forward and backward, row by row; see `layers.py`.
 *
 * Each row is read and written once, where separate tensor operations would traverse it several times.
 * Sums are float32, in an order that depends on the length of a row alone.
 */

#include "vectors.h"
#include "rows.h"

/* RMS norm */

INLINE float inverse_rms(const void *x, int64_t at, int64_t size, float epsilon, int is_bf16) {
    vec squares = {0};
    for (int64_t d = 0; d < size; d += LANES) {
        vec one = load_vec(x, at + d, is_bf16);
        squares += one * one;
    }
    return 1.0f / sqrtf(reduce_sum(squares) / (float)size + epsilon);
}

INLINE void rms_norm_row(row_pointer x, row_pointer out, const void *weight, int64_t row, const norm_shape *of, int x_is_bf16, int out_is_bf16) {
    for (int64_t part = 0; part < of->parts; part++) {
        const int64_t from = row * x.step + part * of->size, to = row * out.step + part * of->size;
        const float scale = inverse_rms(x.at, from, of->size, of->epsilon, x_is_bf16);
        for (int64_t d = 0; d < of->size; d += LANES)
            store_vec(out.at, to + d, load_vec(x.at, from + d, x_is_bf16) * scale * load_vec(weight, d, out_is_bf16), out_is_bf16);
    }
}

INLINE void add_row(row_pointer x, row_pointer added, int64_t row, int64_t size, int is_bf16) {
    for (int64_t d = 0; d < size; d += LANES)
        store_vec(x.at, row * x.step + d, load_vec(x.at, row * x.step + d, 0) + load_vec(added.at, row * added.step + d, is_bf16), 0);
}

/* out = x / rms(x) · weight; the weight has the type of the result. If `added` is given, it is first
 * added to x in place (float32 rows of one part). */
void tinsmith_rms_norm(const norm_shape *of, int64_t rows, row_pointer x, row_pointer added, const void *weight, row_pointer out) {
    const int threads = threads_for(of->threads, rows * of->parts * of->size), x_is_bf16 = (int)of->x_is_bf16, out_is_bf16 = (int)of->out_is_bf16;
    FOR_ROWS(row, rows, threads) {
        if (added.at) {
            if (out_is_bf16) add_row(x, added, row, of->size, 1);
            else add_row(x, added, row, of->size, 0);
        }
        if (x_is_bf16 && out_is_bf16) rms_norm_row(x, out, weight, row, of, 1, 1);
        else if (x_is_bf16) rms_norm_row(x, out, weight, row, of, 1, 0);
        else if (out_is_bf16) rms_norm_row(x, out, weight, row, of, 0, 1);
        else rms_norm_row(x, out, weight, row, of, 0, 0);
    }
}

INLINE void rms_norm_backward_row(
    row_pointer x, const void *weight, row_pointer dy, row_pointer dx, int64_t row, const norm_shape *of, int x_is_bf16, int out_is_bf16
) {
    for (int64_t part = 0; part < of->parts; part++) {
        const int64_t at = row * x.step + part * of->size, from = row * dy.step + part * of->size;
        const int64_t to = row * dx.step + part * of->size;
        const float scale = inverse_rms(x.at, at, of->size, of->epsilon, x_is_bf16);
        vec shared = {0};
        for (int64_t d = 0; d < of->size; d += LANES)
            shared += load_vec(dy.at, from + d, out_is_bf16) * load_vec(weight, d, out_is_bf16) * load_vec(x.at, at + d, x_is_bf16);
        const float projection = reduce_sum(shared) * scale * scale / (float)of->size;
        for (int64_t d = 0; d < of->size; d += LANES) {
            vec dscaled = load_vec(dy.at, from + d, out_is_bf16) * load_vec(weight, d, out_is_bf16);
            store_vec(dx.at, to + d, (dscaled - load_vec(x.at, at + d, x_is_bf16) * projection) * scale, x_is_bf16);
        }
    }
}

/* From dy to dx, which has the type of x. */
void tinsmith_rms_norm_backward(const norm_shape *of, int64_t rows, row_pointer x, const void *weight, row_pointer dy, row_pointer dx) {
    const int threads = threads_for(of->threads, rows * of->parts * of->size), x_is_bf16 = (int)of->x_is_bf16, out_is_bf16 = (int)of->out_is_bf16;
    FOR_ROWS(row, rows, threads) {
        if (x_is_bf16 && out_is_bf16) rms_norm_backward_row(x, weight, dy, dx, row, of, 1, 1);
        else if (x_is_bf16) rms_norm_backward_row(x, weight, dy, dx, row, of, 1, 0);
        else if (out_is_bf16) rms_norm_backward_row(x, weight, dy, dx, row, of, 0, 1);
        else rms_norm_backward_row(x, weight, dy, dx, row, of, 0, 0);
    }
}

/* RoPE */

INLINE void rope_row(
    row_pointer x, const float *cosines, const float *sines, row_pointer out, int64_t row, int64_t heads, int64_t size, int is_bf16
) {
    const int64_t half = size / 2;
    for (int64_t head = 0; head < heads; head++) {
        const int64_t from = row * x.step + head * size, to = row * out.step + head * size;
        for (int64_t d = 0; d < half; d += LANES) {
            const vec low = load_vec(x.at, from + d, is_bf16), high = load_vec(x.at, from + half + d, is_bf16);
            const int64_t at = row * size + d;
            store_vec(out.at, to + d, low * load_vec(cosines, at, 0) + high * load_vec(sines, at, 0), is_bf16);
            store_vec(out.at, to + half + d, high * load_vec(cosines, at + half, 0) + low * load_vec(sines, at + half, 0), is_bf16);
        }
    }
}

/* Each half of a head times the cosines, plus the other half times the sines of its position. */
void tinsmith_rope(
    int64_t rows, int64_t heads, int64_t size, int64_t is_bf16, int64_t threads_wanted, row_pointer x, const float *cosines,
    const float *sines, row_pointer out
) {
    const int threads = threads_for(threads_wanted, rows * heads * size);
    FOR_ROWS(row, rows, threads) {
        if (is_bf16) rope_row(x, cosines, sines, out, row, heads, size, 1);
        else rope_row(x, cosines, sines, out, row, heads, size, 0);
    }
}

/* Gated activations */

INLINE vec logistic(vec x) { return 1.0f / (1.0f + exp_vec(-x)); }

/* Tanh GELU: ½·x·(1 + tanh u) equals x · logistic(2u), without cancellation. */
INLINE vec gelu_argument(vec x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }

INLINE vec activation(vec x, int is_gelu) { return x * logistic(is_gelu ? gelu_argument(x) : x); }

INLINE vec activation_gradient(vec x, int is_gelu) {
    const vec share = logistic(is_gelu ? gelu_argument(x) : x);
    const vec steeper = is_gelu ? 1.5957691216057308f * (1.0f + 3.0f * 0.044715f * x * x) : broadcast(1.0f);
    return share + x * share * (1.0f - share) * steeper;
}

INLINE void gate_row(row_pointer x, row_pointer out, int64_t row, int64_t inner, int is_gelu, int is_bf16) {
    const int64_t from = row * x.step, to = row * out.step;
    for (int64_t d = 0; d < inner; d += LANES) {
        vec gate = activation(load_vec(x.at, from + d, is_bf16), is_gelu);
        store_vec(out.at, to + d, gate * load_vec(x.at, from + inner + d, is_bf16), is_bf16);
    }
}

/* The activation of the first half of a row, times the second half. */
void tinsmith_gate(
    int64_t rows, int64_t inner, int64_t is_gelu, int64_t is_bf16, int64_t threads_wanted, row_pointer x, row_pointer out
) {
    const int threads = threads_for(threads_wanted, rows * inner);
    FOR_ROWS(row, rows, threads) {
        if (is_gelu && is_bf16) gate_row(x, out, row, inner, 1, 1);
        else if (is_gelu) gate_row(x, out, row, inner, 1, 0);
        else if (is_bf16) gate_row(x, out, row, inner, 0, 1);
        else gate_row(x, out, row, inner, 0, 0);
    }
}

INLINE void gate_backward_row(row_pointer x, row_pointer dy, row_pointer dx, int64_t row, int64_t inner, int is_gelu, int is_bf16) {
    const int64_t from = row * x.step, to = row * dx.step;
    for (int64_t d = 0; d < inner; d += LANES) {
        vec gate = load_vec(x.at, from + d, is_bf16), up = load_vec(x.at, from + inner + d, is_bf16);
        vec given = load_vec(dy.at, row * dy.step + d, is_bf16);
        store_vec(dx.at, to + d, given * up * activation_gradient(gate, is_gelu), is_bf16);
        store_vec(dx.at, to + inner + d, given * activation(gate, is_gelu), is_bf16);
    }
}

/* From dy to the gradients of both halves. */
void tinsmith_gate_backward(
    int64_t rows, int64_t inner, int64_t is_gelu, int64_t is_bf16, int64_t threads_wanted, row_pointer x, row_pointer dy,
    row_pointer dx
) {
    const int threads = threads_for(threads_wanted, rows * inner);
    FOR_ROWS(row, rows, threads) {
        if (is_gelu && is_bf16) gate_backward_row(x, dy, dx, row, inner, 1, 1);
        else if (is_gelu) gate_backward_row(x, dy, dx, row, inner, 1, 0);
        else if (is_bf16) gate_backward_row(x, dy, dx, row, inner, 0, 1);
        else gate_backward_row(x, dy, dx, row, inner, 0, 0);
    }
}
