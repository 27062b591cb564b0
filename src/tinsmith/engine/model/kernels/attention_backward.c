/* Backward of attention in training, in bfloat16: from dout to dq, dk and dv.
 *
 * With w the softmax weight of a key, computed from its score and the row's log-sum-exp:
 *
 *     dv = Σ w·dout      dw = dout·v      dscore = w·(dw - dout·out)      dq = Σ dscore·k      dk = Σ dscore·q
 *
 * computed as matmuls of blocks of queries and keys: bfloat16 inputs, float32 accumulation.
 */

#include "matmul.h"

#if defined(__AVX512BF16__)

#include <omp.h>

#define BLOCK 64          /* queries, and keys, per block */
#define MOST_SIZE 256     /* maximum head size */

/* Consecutive rows of one sequence, and the rows of the prefix that they share with others. */
typedef struct {
    int64_t row, rows, prefix, prefix_rows;
} segment;

/* Inputs and outputs; `lse` is row × head. */
typedef struct {
    int64_t rows, heads, key_heads, size, threads;
    int64_t window; /* sliding window, the own token included; 0 for none */
    float scale;
    row_pointer q, k, v, out, dout;
    const float *lse;
    row_pointer dq, dk, dv;
} attention;

/* Per-thread memory for one key head: pre-packed keys and values of a block, queries and douts in
 * pairs of rows, scores and their gradients. */
typedef struct {
    uint32_t keys_transposed[BLOCK * MOST_SIZE / 2], values_transposed[BLOCK * MOST_SIZE / 2], keys[BLOCK * MOST_SIZE / 2];
    uint32_t queries[BLOCK * MOST_SIZE / 2], douts[BLOCK * MOST_SIZE / 2];
    uint32_t weights_transposed[BLOCK * BLOCK / 2], dscores_transposed[BLOCK * BLOCK / 2];
    float scores[BLOCK * BLOCK], dweights[BLOCK * BLOCK];
    uint16_t weights[BLOCK * BLOCK], dscores[BLOCK * BLOCK];
} workspace;

/* Floats of scratch memory per thread, given the rows of the longest segment: the workspace, dk and dv
 * of all rows, dq of a segment, and dout·out for each of its queries. */
int64_t tinsmith_attend_backward_scratch(const attention *of, int64_t longest) {
    const int64_t group = of->heads / of->key_heads;
    return (int64_t)(sizeof(workspace) / 4) + 2 * of->rows * of->size + longest * group * (of->size + 1);
}

INLINE row_pointer at_row(row_pointer rows, int64_t row, int64_t head, int64_t size) {
    return (row_pointer){rows.at + (row * rows.step + head * size) * 2, rows.step};
}

INLINE left_rows as_left(row_pointer rows) { return (left_rows){rows.at, rows.step * 2, 4}; }

INLINE matmul_output as_sums(float *to, int64_t step, int is_added) {
    return (matmul_output){(char *)to, step, 0, is_added, NULL, 1.0f};
}

/* A mask of the first `count` lanes. */
INLINE mask first_lanes(int64_t count) {
    return (mask)((1 << int_max(0, int_min(count, LANES))) - 1);
}

/* From scores and dweights to weights and dscores, for a row's keys from `least` to `end`; the others
 * up to `width` become 0. */
INLINE void softmax_row(
    workspace *on, int64_t row, int64_t least, int64_t end, int64_t width, float scale, float row_lse, float dot_out
) {
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t at = row * BLOCK + c;
        vec weight = {0}, dscore = {0};
        if (end > c) {
            const mask is_seen = first_lanes(end - c) & (mask)~first_lanes(least - c);
            weight = blend(is_seen, exp_vec(load_vec(on->scores, at, 0) * scale - row_lse), broadcast(0.0f));
            dscore = blend(is_seen, weight * (load_vec(on->dweights, at, 0) - dot_out) * scale, broadcast(0.0f));
        }
        store_vec(on->weights, at, weight, 1);
        store_vec(on->dscores, at, dscore, 1);
    }
}

/* A block of queries of one head and a pre-packed block of keys. The first query is `apart` tokens
 * after the first key. */
INLINE void backward_block(
    workspace *on, const attention *of, int64_t head, int64_t row, int64_t queries, int64_t keys, int64_t apart,
    const float *dots, int64_t dots_step, float *dq, int64_t dq_step, float *dk, float *dv
) {
    const int64_t size = of->size, pairs = size / 2, width = whole_vectors(keys);
    const row_pointer q = at_row(of->q, row, head, size), dout = at_row(of->dout, row, head, size);
    matmul(queries, keys, pairs, 1, as_left(q), on->keys_transposed, as_sums(on->scores, BLOCK, 0));
    matmul(queries, keys, pairs, 1, as_left(dout), on->values_transposed, as_sums(on->dweights, BLOCK, 0));
    for (int64_t i = 0; i < queries; i++) {
        const int64_t before = apart + i + 1, least = of->window ? before - of->window : 0;
        const float row_lse = of->lse[(row + i) * of->heads + head];
        softmax_row(on, i, least, int_min(before, keys), width, of->scale, row_lse, dots[i * dots_step]);
    }
    const row_pointer weights = {(char *)on->weights, BLOCK}, dscores = {(char *)on->dscores, BLOCK};
    matmul(queries, size, (keys + 1) / 2, 1, as_left(dscores), on->keys, as_sums(dq, dq_step, 1));
    prepack_inputs(queries, keys, weights, 1, BLOCK, on->weights_transposed);
    prepack_inputs(queries, keys, dscores, 1, BLOCK, on->dscores_transposed);
    prepack_inputs(queries, size, q, 1, PANEL, on->queries);
    prepack_inputs(queries, size, dout, 1, PANEL, on->douts);
    const left_rows transposed_weights = {(char *)on->weights_transposed, 4, width * 4};
    const left_rows transposed_dscores = {(char *)on->dscores_transposed, 4, width * 4};
    matmul(keys, size, (queries + 1) / 2, 1, transposed_weights, on->douts, as_sums(dv, size, 1));
    matmul(keys, size, (queries + 1) / 2, 1, transposed_dscores, on->queries, as_sums(dk, size, 1));
}

/* All queries of a segment, and either its own keys or its prefix's. */
INLINE void backward_keys(
    workspace *on, const attention *of, const segment *s, int64_t key_head, int64_t first, int64_t all_keys, int is_own,
    const float *dots, float *dq, float *dk, float *dv
) {
    const int64_t size = of->size, group = of->heads / of->key_heads;
    for (int64_t start = 0; start < all_keys; start += BLOCK) {
        const int64_t keys = int_min(all_keys - start, BLOCK), key = first + start;
        const row_pointer k = at_row(of->k, key, key_head, size), v = at_row(of->v, key, key_head, size);
        prepack(keys, size, k, 1, 1.0f, on->keys_transposed);
        prepack(keys, size, v, 1, 1.0f, on->values_transposed);
        prepack_inputs(keys, size, k, 1, PANEL, on->keys);
        for (int64_t row = is_own ? start : 0; row < s->rows; row += BLOCK) {
            const int64_t queries = int_min(s->rows - row, BLOCK);
            const int64_t apart = (is_own ? 0 : s->prefix_rows) + row - start;
            if (of->window && apart - of->window + 1 >= keys) break; /* later queries are even farther away */
            for (int64_t h = 0; h < group; h++)
                backward_block(
                    on, of, key_head * group + h, s->row + row, queries, keys, apart, dots + row * group + h, group,
                    dq + (row * group + h) * size, group * size, dk + key * size, dv + key * size
                );
        }
    }
}

INLINE float dot(row_pointer a, row_pointer b, int64_t size) {
    vec sum = {0};
    for (int64_t d = 0; d < size; d += LANES) sum += load_vec(a.at, d, 1) * load_vec(b.at, d, 1);
    return reduce_sum(sum);
}

INLINE void write_rows(row_pointer to, int64_t row, int64_t head, int64_t size, const float *from) {
    const row_pointer here = at_row(to, row, head, size);
    for (int64_t d = 0; d < size; d += LANES) store_vec(here.at, d, load_vec(from, d, 0), 1);
}

/* One key head and the query heads that share it. */
static void backward_head(const attention *of, const segment *segments, int64_t count, int64_t key_head, float *scratch) {
    const int64_t size = of->size, group = of->heads / of->key_heads;
    workspace *on = (workspace *)scratch;
    float *dk = scratch + sizeof(workspace) / 4, *dv = dk + of->rows * size, *dq = dv + of->rows * size;
    memset(dk, 0, 2 * of->rows * size * sizeof *dk);
    for (const segment *s = segments; s < segments + count; s++) {
        float *dots = dq + s->rows * group * size;
        memset(dq, 0, s->rows * group * size * sizeof *dq);
        for (int64_t i = 0; i < s->rows * group; i++) {
            const int64_t row = s->row + i / group, head = key_head * group + i % group;
            dots[i] = dot(at_row(of->dout, row, head, size), at_row(of->out, row, head, size), size);
        }
        backward_keys(on, of, s, key_head, s->prefix, s->prefix_rows, 0, dots, dq, dk, dv);
        backward_keys(on, of, s, key_head, s->row, s->rows, 1, dots, dq, dk, dv);
        for (int64_t i = 0; i < s->rows * group; i++)
            write_rows(of->dq, s->row + i / group, key_head * group + i % group, size, dq + i * size);
    }
    for (const segment *s = segments; s < segments + count; s++)
        for (int64_t row = s->row; row < s->row + s->rows; row++) {
            write_rows(of->dk, row, key_head, size, dk + row * size);
            write_rows(of->dv, row, key_head, size, dv + row * size);
        }
}

/* `scratch` has `scratch_step` floats per thread. Rows that are in no segment are not written. */
void tinsmith_attend_backward(
    const attention *of, const segment *segments, int64_t count, float *scratch, int64_t scratch_step
) {
    int64_t products = 0; /* per dimension */
    for (const segment *s = segments; s < segments + count; s++)
        products += 5 * s->rows * (s->prefix_rows + s->rows) / 2 * of->heads;
    const int threads = threads_for(of->threads, of->size * products / PRODUCTS_PER_NUMBER);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t head = 0; head < of->key_heads; head++)
        backward_head(of, segments, count, head, scratch + omp_get_thread_num() * scratch_step);
}

#endif
