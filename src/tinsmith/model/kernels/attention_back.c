/* The way back of attention in passes, in bfloat16: from the slopes of what rows took to those of
 * queries, keys and values.
 *
 * With w the weight of a key, which follows from its score and the logarithm of the row's sum:
 *
 *     dv = Σ w·dout      dw = dout·v      dscore = w·(dw - dout·out)      dq = Σ dscore·k      dk = Σ dscore·q
 *
 * each a product of blocks of rows and of keys. Sums are float32; what is multiplied is bfloat16.
 */

#include "products.h"

#if defined(__AVX512BF16__)

#include <omp.h>

#define BLOCK 64          /* queries, and keys, that are computed together */
#define MOST_SIZE 256     /* of a head */

/* Rows that follow each other in one sequence, and those before them that others follow too. */
typedef struct {
    int64_t row, rows, prefix, prefix_rows;
} stretch;

/* The rows of all, and the logarithms of their sums of weights: row, head. */
typedef struct {
    int64_t rows, heads, key_heads, size, threads;
    int64_t window; /* how many tokens a query sees at most, its own included; 0 for all */
    float scale;
    rows_of q, k, v, out, dout;
    const float *sums;
    rows_of dq, dk, dv;
} attention;

/* What a thread computes with, for one key head. Packed keys and values of a block; queries and what is
 * given for their results, each with those of the next row; scores and their slopes. */
typedef struct {
    uint32_t keys_turned[BLOCK * MOST_SIZE / 2], values_turned[BLOCK * MOST_SIZE / 2], keys[BLOCK * MOST_SIZE / 2];
    uint32_t queries[BLOCK * MOST_SIZE / 2], given[BLOCK * MOST_SIZE / 2];
    uint32_t weights_turned[BLOCK * BLOCK / 2], slopes_turned[BLOCK * BLOCK / 2];
    float scores[BLOCK * BLOCK], weight_slopes[BLOCK * BLOCK];
    uint16_t weights[BLOCK * BLOCK], slopes[BLOCK * BLOCK];
} desk;

/* How many floats a thread's room has, if the longest stretch has so many rows: the desk; slopes of all
 * keys and values; of a stretch's queries, and dout·out for each. */
int64_t tinsmith_attend_back_room(const attention *of, int64_t longest) {
    const int64_t group = of->heads / of->key_heads;
    return (int64_t)(sizeof(desk) / 4) + 2 * of->rows * of->size + longest * group * (of->size + 1);
}

INLINE rows_of at_row(rows_of all, int64_t row, int64_t head, int64_t size) {
    return (rows_of){all.at + (row * all.step + head * size) * 2, all.step};
}

INLINE left_rows as_left(rows_of rows) { return (left_rows){rows.at, rows.step * 2, 4}; }

INLINE sums_to as_sums(float *to, int64_t step, int is_added) {
    return (sums_to){(char *)to, step, 0, is_added, NULL, 1.0f};
}

/* The first lanes, so many of them. */
INLINE mask first_lanes(int64_t count) {
    return (mask)((1 << larger_of(0, smaller_of(count, LANES))) - 1);
}

/* Scores and slopes of weights become weights and slopes of scores, for a row's keys from `least` to
 * `end`; others up to `width` have none. */
INLINE void weigh_row(
    desk *on, int64_t row, int64_t least, int64_t end, int64_t width, float scale, float sum, float whole
) {
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t at = row * BLOCK + c;
        vec weight = {0}, slope = {0};
        if (end > c) {
            const mask is_seen = first_lanes(end - c) & (mask)~first_lanes(least - c);
            weight = choose(is_seen, power_of_e(read(on->scores, at, 0) * scale - sum), all(0.0f));
            slope = choose(is_seen, weight * (read(on->weight_slopes, at, 0) - whole) * scale, all(0.0f));
        }
        write(on->weights, at, weight, 1);
        write(on->slopes, at, slope, 1);
    }
}

/* A block of queries of one head and a block of keys, which are packed. The first query is `apart` tokens
 * behind the first key. */
INLINE void back_block(
    desk *on, const attention *of, int64_t head, int64_t row, int64_t queries, int64_t keys, int64_t apart,
    const float *wholes, int64_t whole_step, float *dq, int64_t dq_step, float *dk, float *dv
) {
    const int64_t size = of->size, pairs = size / 2, width = whole_vectors(keys);
    const rows_of q = at_row(of->q, row, head, size), dout = at_row(of->dout, row, head, size);
    product(queries, keys, pairs, 1, as_left(q), on->keys_turned, as_sums(on->scores, BLOCK, 0));
    product(queries, keys, pairs, 1, as_left(dout), on->values_turned, as_sums(on->weight_slopes, BLOCK, 0));
    for (int64_t i = 0; i < queries; i++) {
        const int64_t before = apart + i + 1, least = of->window ? before - of->window : 0;
        const float sum = of->sums[(row + i) * of->heads + head];
        weigh_row(on, i, least, smaller_of(before, keys), width, of->scale, sum, wholes[i * whole_step]);
    }
    const rows_of weights = {(char *)on->weights, BLOCK}, slopes = {(char *)on->slopes, BLOCK};
    product(queries, size, (keys + 1) / 2, 1, as_left(slopes), on->keys, as_sums(dq, dq_step, 1));
    pack_inputs(queries, keys, weights, 1, BLOCK, on->weights_turned);
    pack_inputs(queries, keys, slopes, 1, BLOCK, on->slopes_turned);
    pack_inputs(queries, size, q, 1, PANEL, on->queries);
    pack_inputs(queries, size, dout, 1, PANEL, on->given);
    const left_rows turned_weights = {(char *)on->weights_turned, 4, width * 4};
    const left_rows turned_slopes = {(char *)on->slopes_turned, 4, width * 4};
    product(keys, size, (queries + 1) / 2, 1, turned_weights, on->given, as_sums(dv, size, 1));
    product(keys, size, (queries + 1) / 2, 1, turned_slopes, on->queries, as_sums(dk, size, 1));
}

/* All queries of a stretch and some of the keys that they see: its own, or those of its prefix. */
INLINE void back_keys(
    desk *on, const attention *of, const stretch *s, int64_t key_head, int64_t first, int64_t all_keys, int is_own,
    const float *wholes, float *dq, float *dk, float *dv
) {
    const int64_t size = of->size, group = of->heads / of->key_heads;
    for (int64_t start = 0; start < all_keys; start += BLOCK) {
        const int64_t keys = smaller_of(all_keys - start, BLOCK), key = first + start;
        const rows_of k = at_row(of->k, key, key_head, size), v = at_row(of->v, key, key_head, size);
        pack(keys, size, k, 1, 1.0f, on->keys_turned);
        pack(keys, size, v, 1, 1.0f, on->values_turned);
        pack_inputs(keys, size, k, 1, PANEL, on->keys);
        for (int64_t row = is_own ? start : 0; row < s->rows; row += BLOCK) {
            const int64_t queries = smaller_of(s->rows - row, BLOCK);
            const int64_t apart = (is_own ? 0 : s->prefix_rows) + row - start;
            if (of->window && apart - of->window + 1 >= keys) break; /* all others are farther still */
            for (int64_t h = 0; h < group; h++)
                back_block(
                    on, of, key_head * group + h, s->row + row, queries, keys, apart, wholes + row * group + h, group,
                    dq + (row * group + h) * size, group * size, dk + key * size, dv + key * size
                );
        }
    }
}

INLINE float product_of(rows_of a, rows_of b, int64_t size) {
    vec sum = {0};
    for (int64_t d = 0; d < size; d += LANES) sum += read(a.at, d, 1) * read(b.at, d, 1);
    return sum_of(sum);
}

INLINE void write_rows(rows_of to, int64_t row, int64_t head, int64_t size, const float *from) {
    const rows_of here = at_row(to, row, head, size);
    for (int64_t d = 0; d < size; d += LANES) write(here.at, d, read(from, d, 0), 1);
}

/* One key head, and the heads of queries that share it. */
static void back_head(const attention *of, const stretch *stretches, int64_t count, int64_t key_head, float *room) {
    const int64_t size = of->size, group = of->heads / of->key_heads;
    desk *on = (desk *)room;
    float *dk = room + sizeof(desk) / 4, *dv = dk + of->rows * size, *dq = dv + of->rows * size;
    memset(dk, 0, 2 * of->rows * size * sizeof *dk);
    for (const stretch *s = stretches; s < stretches + count; s++) {
        float *wholes = dq + s->rows * group * size;
        memset(dq, 0, s->rows * group * size * sizeof *dq);
        for (int64_t i = 0; i < s->rows * group; i++) {
            const int64_t row = s->row + i / group, head = key_head * group + i % group;
            wholes[i] = product_of(at_row(of->dout, row, head, size), at_row(of->out, row, head, size), size);
        }
        back_keys(on, of, s, key_head, s->prefix, s->prefix_rows, 0, wholes, dq, dk, dv);
        back_keys(on, of, s, key_head, s->row, s->rows, 1, wholes, dq, dk, dv);
        for (int64_t i = 0; i < s->rows * group; i++)
            write_rows(of->dq, s->row + i / group, key_head * group + i % group, size, dq + i * size);
    }
    for (const stretch *s = stretches; s < stretches + count; s++)
        for (int64_t row = s->row; row < s->row + s->rows; row++) {
            write_rows(of->dk, row, key_head, size, dk + row * size);
            write_rows(of->dv, row, key_head, size, dv + row * size);
        }
}

/* `room` has `room_step` floats for each thread. Rows that are in no stretch are left as they are. */
void tinsmith_attend_back(
    const attention *of, const stretch *stretches, int64_t count, float *room, int64_t room_step
) {
    int64_t products = 0; /* of each dimension */
    for (const stretch *s = stretches; s < stretches + count; s++)
        products += 5 * s->rows * (s->prefix_rows + s->rows) / 2 * of->heads;
    const int threads = threads_for(of->threads, of->size * products / PRODUCTS_PER_NUMBER);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t head = 0; head < of->key_heads; head++)
        back_head(of, stretches, count, head, room + omp_get_thread_num() * room_step);
}

#endif
