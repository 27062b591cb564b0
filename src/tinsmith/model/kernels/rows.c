/* The steps between a transformer's matrices, each row by itself: `layers.py` says what they are.
 *
 * Rows are read once and written once, where tensor operations would go over them several times.
 * Sums are of float32, in an order that follows from the length of a row alone.
 */

#include "numbers.h"
#include "rows.h"

/* Norms */

INLINE float scale_of(const void *x, int64_t at, int64_t size, float epsilon, int is_half) {
    vec squares = {0};
    for (int64_t d = 0; d < size; d += LANES) {
        vec one = read(x, at + d, is_half);
        squares += one * one;
    }
    return 1.0f / sqrtf(sum_of(squares) / (float)size + epsilon);
}

INLINE void norm_row(rows_of x, rows_of out, const void *weight, int64_t row, const norm_shape *of, int x_half, int out_half) {
    for (int64_t part = 0; part < of->parts; part++) {
        const int64_t from = row * x.step + part * of->size, to = row * out.step + part * of->size;
        const float scale = scale_of(x.at, from, of->size, of->epsilon, x_half);
        for (int64_t d = 0; d < of->size; d += LANES)
            write(out.at, to + d, read(x.at, from + d, x_half) * scale * read(weight, d, out_half), out_half);
    }
}

INLINE void add_row(rows_of x, rows_of added, int64_t row, int64_t size, int is_half) {
    for (int64_t d = 0; d < size; d += LANES)
        write(x.at, row * x.step + d, read(x.at, row * x.step + d, 0) + read(added.at, row * added.step + d, is_half), 0);
}

/* Rows over the root of their mean square, times the weight, which has the type of the result. If
 * something is `added`, float32 rows of one part first become larger by it. */
void tinsmith_norm(const norm_shape *of, int64_t rows, rows_of x, rows_of added, const void *weight, rows_of out) {
    const int threads = threads_for(of->threads, rows * of->parts * of->size), x_half = (int)of->x_half, out_half = (int)of->out_half;
    FOR_ROWS(row, rows, threads) {
        if (added.at) {
            if (out_half) add_row(x, added, row, of->size, 1);
            else add_row(x, added, row, of->size, 0);
        }
        if (x_half && out_half) norm_row(x, out, weight, row, of, 1, 1);
        else if (x_half) norm_row(x, out, weight, row, of, 1, 0);
        else if (out_half) norm_row(x, out, weight, row, of, 0, 1);
        else norm_row(x, out, weight, row, of, 0, 0);
    }
}

INLINE void norm_back_row(
    rows_of x, const void *weight, rows_of dy, rows_of dx, int64_t row, const norm_shape *of, int x_half, int out_half
) {
    for (int64_t part = 0; part < of->parts; part++) {
        const int64_t at = row * x.step + part * of->size, from = row * dy.step + part * of->size;
        const int64_t to = row * dx.step + part * of->size;
        const float scale = scale_of(x.at, at, of->size, of->epsilon, x_half);
        vec shared = {0};
        for (int64_t d = 0; d < of->size; d += LANES)
            shared += read(dy.at, from + d, out_half) * read(weight, d, out_half) * read(x.at, at + d, x_half);
        const float along = sum_of(shared) * scale * scale / (float)of->size;
        for (int64_t d = 0; d < of->size; d += LANES) {
            vec slope = read(dy.at, from + d, out_half) * read(weight, d, out_half);
            write(dx.at, to + d, (slope - read(x.at, at + d, x_half) * along) * scale, x_half);
        }
    }
}

/* The way back: from the slopes of the result to those of x, which have its type. */
void tinsmith_norm_back(const norm_shape *of, int64_t rows, rows_of x, const void *weight, rows_of dy, rows_of dx) {
    const int threads = threads_for(of->threads, rows * of->parts * of->size), x_half = (int)of->x_half, out_half = (int)of->out_half;
    FOR_ROWS(row, rows, threads) {
        if (x_half && out_half) norm_back_row(x, weight, dy, dx, row, of, 1, 1);
        else if (x_half) norm_back_row(x, weight, dy, dx, row, of, 1, 0);
        else if (out_half) norm_back_row(x, weight, dy, dx, row, of, 0, 1);
        else norm_back_row(x, weight, dy, dx, row, of, 0, 0);
    }
}

/* Turned heads */

INLINE void turn_row(
    rows_of x, const float *cosines, const float *sines, rows_of out, int64_t row, int64_t heads, int64_t size, int is_half
) {
    const int64_t half = size / 2;
    for (int64_t head = 0; head < heads; head++) {
        const int64_t from = row * x.step + head * size, to = row * out.step + head * size;
        for (int64_t d = 0; d < half; d += LANES) {
            const vec low = read(x.at, from + d, is_half), high = read(x.at, from + half + d, is_half);
            const int64_t at = row * size + d;
            write(out.at, to + d, low * read(cosines, at, 0) + high * read(sines, at, 0), is_half);
            write(out.at, to + half + d, high * read(cosines, at + half, 0) + low * read(sines, at + half, 0), is_half);
        }
    }
}

/* Each half of a head times the cosines, plus the other half times the sines of its place. */
void tinsmith_turn(
    int64_t rows, int64_t heads, int64_t size, int64_t is_half, int64_t threads_wanted, rows_of x, const float *cosines,
    const float *sines, rows_of out
) {
    const int threads = threads_for(threads_wanted, rows * heads * size);
    FOR_ROWS(row, rows, threads) {
        if (is_half) turn_row(x, cosines, sines, out, row, heads, size, 1);
        else turn_row(x, cosines, sines, out, row, heads, size, 0);
    }
}

/* Gates */

INLINE vec logistic(vec x) { return 1.0f / (1.0f + power_of_e(-x)); }

/* GELU by tanh: half of x·(1 + tanh u) is x times the logistic of 2u, which loses nothing. */
INLINE vec twice_bent(vec x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }

INLINE vec activation(vec x, int is_gelu) { return x * logistic(is_gelu ? twice_bent(x) : x); }

INLINE vec slope(vec x, int is_gelu) {
    const vec share = logistic(is_gelu ? twice_bent(x) : x);
    const vec steeper = is_gelu ? 1.5957691216057308f * (1.0f + 3.0f * 0.044715f * x * x) : all(1.0f);
    return share + x * share * (1.0f - share) * steeper;
}

INLINE void gate_row(rows_of x, rows_of out, int64_t row, int64_t inner, int is_gelu, int is_half) {
    const int64_t from = row * x.step, to = row * out.step;
    for (int64_t d = 0; d < inner; d += LANES) {
        vec gate = activation(read(x.at, from + d, is_half), is_gelu);
        write(out.at, to + d, gate * read(x.at, from + inner + d, is_half), is_half);
    }
}

/* The activation of the first half of a row, times the second half. */
void tinsmith_gate(
    int64_t rows, int64_t inner, int64_t is_gelu, int64_t is_half, int64_t threads_wanted, rows_of x, rows_of out
) {
    const int threads = threads_for(threads_wanted, rows * inner);
    FOR_ROWS(row, rows, threads) {
        if (is_gelu && is_half) gate_row(x, out, row, inner, 1, 1);
        else if (is_gelu) gate_row(x, out, row, inner, 1, 0);
        else if (is_half) gate_row(x, out, row, inner, 0, 1);
        else gate_row(x, out, row, inner, 0, 0);
    }
}

INLINE void gate_back_row(rows_of x, rows_of dy, rows_of dx, int64_t row, int64_t inner, int is_gelu, int is_half) {
    const int64_t from = row * x.step, to = row * dx.step;
    for (int64_t d = 0; d < inner; d += LANES) {
        vec gate = read(x.at, from + d, is_half), up = read(x.at, from + inner + d, is_half);
        vec given = read(dy.at, row * dy.step + d, is_half);
        write(dx.at, to + d, given * up * slope(gate, is_gelu), is_half);
        write(dx.at, to + inner + d, given * activation(gate, is_gelu), is_half);
    }
}

/* The way back: from the slopes of the result to those of both halves. */
void tinsmith_gate_back(
    int64_t rows, int64_t inner, int64_t is_gelu, int64_t is_half, int64_t threads_wanted, rows_of x, rows_of dy,
    rows_of dx
) {
    const int threads = threads_for(threads_wanted, rows * inner);
    FOR_ROWS(row, rows, threads) {
        if (is_gelu && is_half) gate_back_row(x, dy, dx, row, inner, 1, 1);
        else if (is_gelu) gate_back_row(x, dy, dx, row, inner, 1, 0);
        else if (is_half) gate_back_row(x, dy, dx, row, inner, 0, 1);
        else gate_back_row(x, dy, dx, row, inner, 0, 0);
    }
}
