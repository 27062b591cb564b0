/* Forward attention over a KV cache; `attention.py` prepares the calls.
 *
 * Causal, in blocks of keys at fixed positions of the sequence. Each query goes through the same
 * operations in the same order whatever queries are computed beside it, so its result is
 * bit-identical. Scores and sums are float32. Where the CPU multiplies pairs of bfloat16, softmax
 * weights are rounded to bfloat16 before they are multiplied with the values; nothing else is
 * rounded.
 *
 * The keys of a block are transposed, so that the scores of many keys are sums of whole vectors.
 */

#include "vectors.h"
#include "rows.h"

#define BLOCK 64                    /* keys per block */
#define PARTS (BLOCK / LANES)       /* vectors of scores per block */
#define TOGETHER (LANES == 16 ? 4 : 2) /* queries whose sums fit into registers */
#define MOST_SIZE 256               /* maximum head size */
#define MOST_QUERIES 96             /* maximum queries per work unit */

/* Rows of one sequence: appended to its own KV buffer, optionally behind a shared one. */
typedef struct {
    int64_t row, rows;
    int64_t place;            /* tokens before it in its own buffer */
    char *own;                /* keys and values of all layers: layer, 2, head, position, dimension */
    int64_t own_head_bytes;   /* stride between heads */
    char *shared;             /* NULL if there is none */
    int64_t shared_head_bytes, shared_length;
} segment;

/* Parameters of a call. */
typedef struct {
    int64_t heads, key_heads, size, is_bf16, threads;
    int64_t window; /* sliding window, the own token included; 0 for none */
    float scale;
} shape;

/* Keys and values of one head. */
typedef struct {
    const char *keys, *values;
} pair;

/* A block of keys and values: float32, or pairs of bfloat16 where the CPU multiplies these. */
typedef struct {
    uint32_t transposed[MOST_SIZE][BLOCK];  /* keys: (pair of) dimensions × key */
    uint32_t values[BLOCK * MOST_SIZE]; /* (pair of) keys × dimension */
} block;

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Running softmax state of the queries of one key head. */
typedef struct {
    int64_t seen[MOST_QUERIES];      /* tokens of the sequence that each query sees */
    uint32_t query[MOST_QUERIES * MOST_SIZE]; /* query × dimension, in the format of the keys */
    float out[MOST_QUERIES * MOST_SIZE];
    float most[MOST_QUERIES], sum[MOST_QUERIES];
} queries;

/* Per-thread memory; too large for some threads' stacks. */
typedef struct {
    queries q;
    block keys;
} workspace;

/* Not inlined: if the compiler sees the address, the code is a sixth slower. */
static __attribute__((noinline)) workspace *thread_workspace(void) {
    static _Thread_local _Alignas(64) workspace kept;
    return &kept;
}

#if LANES == 16
#define FIRST_PLACES ((vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#else
#define FIRST_PLACES ((vec){0, 1, 2, 3, 4, 5, 6, 7})
#endif

/* Transpose LANES keys from dimension `d` on; keys from `count` on are 0. A pair of bfloat16 is
 * transposed as one 32-bit number. */
INLINE void transpose_keys(block *to, int first, int d, const pair *from, int count, int is_bf16) {
    uvec rows[LANES];
    for (int key = 0; key < LANES; key++) {
        if (key < count) memcpy(&rows[key], from[first + key].keys + d * (is_bf16 ? 2 : 4), sizeof(uvec));
        else rows[key] = (uvec){0};
    }
    transpose(rows);
    for (int i = 0; i < LANES; i++) {
        if (is_bf16 && HAS_PAIRS) {
            memcpy(&to->transposed[d / 2 + i][first], &rows[i], sizeof rows[i]);
        } else if (is_bf16) {
            uvec even = rows[i] << 16, odd = rows[i] & 0xffff0000u;
            memcpy(&to->transposed[d + 2 * i][first], &even, sizeof even);
            memcpy(&to->transposed[d + 2 * i + 1][first], &odd, sizeof odd);
        } else {
            memcpy(&to->transposed[d + i][first], &rows[i], sizeof rows[i]);
        }
    }
}

/* Load a block of keys and values; missing keys are 0. */
INLINE void load_block(block *to, const pair *from, int count, int size, int is_bf16) {
    const int step = is_bf16 ? 2 * LANES : LANES;
    for (int first = 0; first < BLOCK; first += LANES)
        for (int d = 0; d < size; d += step) {
            if (count >= first + LANES) transpose_keys(to, first, d, from, LANES, is_bf16);
            else transpose_keys(to, first, d, from, count - first, is_bf16);
        }
    if (is_bf16 && HAS_PAIRS) {
        for (int key = 0; key < count; key += 2)
            for (int d = 0; d < size; d += LANES) {
                uvec made = load_bits(from[key].values, d);
                if (key + 1 < count) made |= load_bits(from[key + 1].values, d) << 16;
                memcpy(&to->values[key / 2 * size + d], &made, sizeof made);
            }
        return;
    }
    for (int key = 0; key < count; key++)
        for (int d = 0; d < size; d += LANES)
            store_vec(to->values, key * size + d, load_vec(from[key].values, d, is_bf16), 0);
}

/* Prefetch of the next block while the current one is computed, a few cache lines at a time, into
 * L2: L1 is full of the current block. `line_bytes` is 0 once the block has been requested. */
typedef struct {
    pair next;
    int64_t line_bytes;
} ahead;

INLINE void prefetch_lines(const char *rows, int64_t line, int lines, int64_t line_bytes) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(rows + (line + i) * line_bytes, 0, 2);
}

/* sums + factor × numbers, where each may be a pair of bfloat16. */
INLINE vec add_products(vec sums, uint32_t factor, const uint32_t *numbers, int in_pairs) {
#if HAS_PAIRS
    if (in_pairs) {
        __m512bh pairs;
        memcpy(&pairs, numbers, sizeof pairs);
        return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32((int)factor), pairs);
    }
#endif
    (void)in_pairs;
    float number;
    memcpy(&number, &factor, sizeof number);
    return sums + broadcast(number) * load_vec(numbers, 0, 0);
}

/* Scores of a block of keys for a few queries. */
INLINE void score_block(
    const queries *q, const int *which, int count, const block *keys, int size, float scale, ahead after, int is_bf16,
    vec scores[][PARTS]
) {
    const int in_pairs = is_bf16 && HAS_PAIRS, numbers = in_pairs ? size / 2 : size;
    const int lines = in_pairs || !is_bf16 ? 4 : 2; /* per number of a query */
    for (int part = 0; part < PARTS; part += 4) {
        vec sums[4][4] = {{{0}}};
        for (int d = 0; d < numbers; d++) {
            prefetch_lines(after.next.keys, d * lines, lines, after.line_bytes);
            for (int i = 0; i < count; i++)
                for (int p = 0; p < 4; p++)
                    sums[i][p] = add_products(
                        sums[i][p], q->query[which[i] * numbers + d], &keys->transposed[d][(part + p) * LANES], in_pairs
                    );
        }
        for (int i = 0; i < count; i++)
            for (int p = 0; p < 4; p++) scores[i][part + p] = sums[i][p] * scale;
    }
}

/* Online softmax: turn scores into weights and return the factor for the previous output. The query
 * sees the keys from `least` to `end` of the block. */
INLINE float softmax_block(queries *q, int which, vec scores[PARTS], int least, int end) {
    const float nothing = -INFINITY;
    vec most = broadcast(nothing);
    for (int p = 0; p < PARTS; p++) {
        const vec place = FIRST_PLACES + (float)(p * LANES);
        if (end < (p + 1) * LANES) scores[p] = blend(less_than(place, broadcast((float)end)), scores[p], broadcast(nothing));
        if (least > p * LANES) scores[p] = blend(less_than(place, broadcast((float)least)), broadcast(nothing), scores[p]);
        most = vec_max(most, scores[p]);
    }
    float largest = reduce_max(most);
    if (q->most[which] > largest) largest = q->most[which];
    vec sum = {0};
    for (int p = 0; p < PARTS; p++) {
        scores[p] = exp_vec(scores[p] - largest);
        sum += scores[p];
    }
    float scale = exp_vec(broadcast(q->most[which] - largest))[0];
    q->most[which] = largest;
    q->sum[which] = q->sum[which] * scale + reduce_sum(sum);
    return scale;
}

/* Add the weighted values to the output: `parts` vectors from dimension `d` on. */
INLINE void add_values(
    queries *q, const int *which, int count, const block *keys, int keys_count, int size, int d, int parts,
    uint32_t weights[][BLOCK], const float *scales, ahead after, int is_bf16
) {
    const int in_pairs = is_bf16 && HAS_PAIRS, numbers = in_pairs ? (keys_count + 1) / 2 : keys_count;
    const int lines = parts * LANES * (in_pairs || !is_bf16 ? 4 : 2) / 64; /* per key or pair of keys */
    const int64_t first_line = d * (is_bf16 ? 2 : 4) / 64 * BLOCK;
    vec sums[4][4];
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++)
            sums[i][p] = load_vec(q->out, which[i] * size + d + p * LANES, 0) * scales[i];
    for (int n = 0; n < numbers; n++) {
        prefetch_lines(after.next.values, first_line + n * lines, lines, after.line_bytes);
        for (int i = 0; i < count; i++)
            for (int p = 0; p < parts; p++)
                sums[i][p] = add_products(sums[i][p], weights[i][n], &keys->values[n * size + d + p * LANES], in_pairs);
    }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) store_vec(q->out, which[i] * size + d + p * LANES, sums[i][p], 0);
}

INLINE void attend_block(
    queries *q, const int *which, int count, const block *keys, int size, float scale, const int *least, const int *end,
    int keys_count, ahead after, int is_bf16
) {
    vec scores[4][PARTS];
    uint32_t weights[4][BLOCK]; /* of a key or a pair of keys */
    float scales[4];
    score_block(q, which, count, keys, size, scale, after, is_bf16, scores);
    for (int i = 0; i < count; i++) {
        scales[i] = softmax_block(q, which[i], scores[i], least[i], end[i]);
        for (int p = 0; p < PARTS; p++) store_vec(weights[i], p * LANES, scores[i][p], is_bf16 && HAS_PAIRS);
    }
    int d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES)
        add_values(q, which, count, keys, keys_count, size, d, 4, weights, scales, after, is_bf16);
    for (; d < size; d += LANES) add_values(q, which, count, keys, keys_count, size, d, 1, weights, scales, after, is_bf16);
}

INLINE pair pair_of(const char *run, int64_t head_bytes, int64_t layer, int64_t head, const shape *of) {
    const char *keys = run + (layer * 2 * of->key_heads + head) * head_bytes;
    return (pair){keys, keys + of->key_heads * head_bytes};
}

/* The tokens of a sequence for one key head: the shared ones, then its own. */
typedef struct {
    pair shared, own;
    int64_t shared_length, bytes; /* stride between tokens */
} tokens;

INLINE pair token_at(const tokens *of, int64_t place) {
    const pair run = place < of->shared_length ? of->shared : of->own;
    const int64_t at = (place < of->shared_length ? place : place - of->shared_length) * of->bytes;
    return (pair){run.keys + at, run.values + at};
}

/* Some queries attend to the tokens `from … to`; `from` is the start of a block. */
INLINE void attend_tokens(
    queries *q, int first, int last, block *keys, const tokens *seen, int64_t from, int64_t to, pair next,
    const shape *of, int is_bf16
) {
    const int size = (int)of->size;
    int64_t oldest = 0; /* first token that any of the queries sees */
    if (of->window) {
        oldest = INT64_MAX;
        for (int i = first; i < last; i++)
            if (q->seen[i] - of->window < oldest) oldest = q->seen[i] - of->window;
    }
    for (int64_t start = from; start < to; start += BLOCK) {
        const int count = to - start < BLOCK ? (int)(to - start) : BLOCK;
        if (start + count <= oldest) continue;
        pair rows[BLOCK];
        for (int key = 0; key < count; key++) rows[key] = token_at(seen, start + key);
        load_block(keys, rows, count, size, is_bf16);
        ahead after = {start + BLOCK < to ? token_at(seen, start + BLOCK) : next, 64};
        int which[4], least[4], end[4], some = 0;
        for (int i = first; i < last; i++) {
            const int64_t before = q->seen[i] - start, oldest_seen = of->window ? before - of->window : 0;
            if (before > 0 && oldest_seen < count) {
                which[some] = i;
                least[some] = oldest_seen > 0 ? (int)oldest_seen : 0;
                end[some] = before < count ? (int)before : count;
                some++;
            }
            if (some == TOGETHER || (some && i + 1 == last)) {
                if (some == 1) attend_block(q, which, 1, keys, size, of->scale, least, end, count, after, is_bf16);
                else if (some == 2) attend_block(q, which, 2, keys, size, of->scale, least, end, count, after, is_bf16);
                else if (some == 3) attend_block(q, which, 3, keys, size, of->scale, least, end, count, after, is_bf16);
                else attend_block(q, which, 4, keys, size, of->scale, least, end, count, after, is_bf16);
                some = 0;
                after.line_bytes = 0;
            }
        }
    }
}

INLINE void load_query(queries *q, int which, const char *query_rows, int64_t from, int size, int is_bf16) {
    for (int d = 0; d < size; d += LANES) {
        if (!(is_bf16 && HAS_PAIRS)) store_vec(q->query, which * size + d, load_vec(query_rows, from + d, is_bf16), 0);
        store_vec(q->out, which * size + d, (vec){0}, 0);
    }
    if (is_bf16 && HAS_PAIRS) memcpy(&q->query[which * (size / 2)], query_rows + from * 2, size * 2);
}

/* One work unit: segments with the same shared buffer, or none, for one key head. */
INLINE void attend_unit(
    const segment *first, int64_t segments, int64_t head, int64_t layer, pair next, const shape *of, row_pointer query_rows,
    row_pointer out, float *lse, int is_bf16
) {
    const int group = (int)(of->heads / of->key_heads), size = (int)of->size;
    workspace *mine = thread_workspace();
    queries *q = &mine->q;
    block *keys = &mine->keys;
    int count = 0;
    for (const segment *s = first; s < first + segments; s++)
        for (int64_t row = 0; row < s->rows; row++)
            for (int h = 0; h < group; h++, count++) {
                int64_t from = (s->row + row) * query_rows.step + (head * group + h) * size;
                load_query(q, count, query_rows.at, from, size, is_bf16);
                q->seen[count] = s->shared_length + s->place + row + 1;
                q->most[count] = -INFINITY;
                q->sum[count] = 0.0f;
            }
    tokens seen = {{NULL, NULL}, pair_of(first->own, first->own_head_bytes, layer, head, of), first->shared_length,
                   of->size * (is_bf16 ? 2 : 4)};
    /* Blocks start at the same positions however much is shared: a block that is partly shared is
     * computed for each segment. */
    const int64_t whole = first->shared_length - first->shared_length % BLOCK;
    if (first->shared) {
        seen.shared = pair_of(first->shared, first->shared_head_bytes, layer, head, of);
        attend_tokens(q, 0, count, keys, &seen, 0, whole, seen.own, of, is_bf16);
    }
    int at = 0;
    for (const segment *s = first; s < first + segments; s++) {
        const int end = at + (int)s->rows * group, is_last = s + 1 == first + segments;
        const pair after = is_last ? next : pair_of(s[1].own, s[1].own_head_bytes, layer, head, of);
        attend_tokens(q, at, end, keys, &seen, whole, s->shared_length + s->place + s->rows, after, of, is_bf16);
        at = end;
        seen.own = after;
    }
    at = 0;
    for (const segment *s = first; s < first + segments; s++)
        for (int64_t row = 0; row < s->rows; row++)
            for (int h = 0; h < group; h++, at++) {
                const int64_t to = (s->row + row) * out.step + (head * group + h) * size;
                if (lse) lse[(s->row + row) * of->heads + head * group + h] = q->most[at] + logf(q->sum[at]);
                for (int d = 0; d < size; d += LANES)
                    store_vec(out.at, to + d, load_vec(q->out, at * size + d, 0) / q->sum[at], is_bf16);
            }
}

/* Append the new keys and values to the buffer. */
INLINE void store_kv(const segment *s, row_pointer keys, row_pointer values, int64_t layer, const shape *of) {
    const int64_t width = of->is_bf16 ? 2 : 4, bytes = of->size * width;
    for (int64_t head = 0; head < of->key_heads; head++) {
        const pair run = pair_of(s->own, s->own_head_bytes, layer, head, of);
        for (int64_t row = 0; row < s->rows; row++) {
            const int64_t to = (s->place + row) * bytes;
            memcpy((char *)run.keys + to, keys.at + ((s->row + row) * keys.step + head * of->size) * width, bytes);
            memcpy((char *)run.values + to, values.at + ((s->row + row) * values.step + head * of->size) * width, bytes);
        }
    }
}

/* The first tokens of the i-th pair of unit and key head. */
INLINE pair first_block_of(const segment *segments, const int64_t *starts, int64_t i, int64_t layer, const shape *of) {
    const segment *first = segments + starts[i / of->key_heads];
    const int64_t head = i % of->key_heads;
    if (first->shared) return pair_of(first->shared, first->shared_head_bytes, layer, head, of);
    return pair_of(first->own, first->own_head_bytes, layer, head, of);
}

/* Append the keys and values of new rows to the KV cache, then compute attention for each row.
 *
 * `starts` has the first segment of each unit, followed by the number of segments. The segments of
 * a unit have the same shared buffer or none, and at most MOST_QUERIES queries per key head. `lse`,
 * if not NULL, receives the log-sum-exp of each row and head. */
void tinsmith_attend(
    const shape *of, int64_t layer, const segment *segments, const int64_t *starts, int64_t units, row_pointer query_rows,
    row_pointer keys, row_pointer values, row_pointer out, float *lse
) {
    const int64_t all_segments = starts[units], all_units = units * of->key_heads;
    int64_t taken = 0, products = 0; /* per dimension */
    for (const segment *s = segments; s < segments + all_segments; s++) {
        const int64_t tokens = s->shared_length + s->place + s->rows;
        taken += 2 * tokens * of->key_heads;
        products += 2 * tokens * s->rows * of->heads;
    }
    const int threads = threads_for(of->threads, of->size * (taken + products / PRODUCTS_PER_NUMBER));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < all_segments; i++) store_kv(segments + i, keys, values, layer, of);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < all_units; i++) {
        const int64_t unit = i / of->key_heads, head = i % of->key_heads;
        const segment *first = segments + starts[unit];
        const int64_t count = starts[unit + 1] - starts[unit];
        const pair next = first_block_of(segments, starts, i + 1 < all_units ? i + 1 : i, layer, of);
        if (of->is_bf16) attend_unit(first, count, head, layer, next, of, query_rows, out, lse, 1);
        else attend_unit(first, count, head, layer, next, of, query_rows, out, lse, 0);
    }
}
