/* Attention to kept keys and values, without a way back: `kernel_attention.py` says of what.
 *
 * Queries come in the order of the sequence and see what is not after them, in blocks of keys at
 * fixed places. A query's numbers go through the same operations in the same order whatever
 * queries are computed beside it, so its bits are its own. Sums and scores are float32. Where the
 * machine multiplies pairs of bfloat16, weights are rounded to it before they meet the values, and
 * else nothing is.
 *
 * Keys of a block are turned so that those of one dimension lie beside each other: scores of many
 * keys are then sums of whole vectors.
 */

#include "numbers.h"
#include "rows.h"

#define BLOCK 64                    /* keys that are looked at together */
#define PARTS (BLOCK / LANES)       /* vectors of a block's scores */
#define TOGETHER (LANES == 16 ? 4 : 2) /* queries whose sums fit into registers */
#define MOST_SIZE 256               /* of a head */
#define MOST_QUERIES 96             /* that a thread takes at a time */

/* Rows that are added to a run of keys and see it and, before it, a run that they share. */
typedef struct {
    int64_t row, rows;
    int64_t place;            /* how many tokens of its own run are before it */
    char *own;                /* keys and values of all layers: layer, 2, head, place, dimension */
    int64_t own_head_bytes;   /* from one head to the next */
    char *shared;             /* NULL if there is none */
    int64_t shared_head_bytes, shared_length;
} stretch;

/* What the layers' calls have in common. */
typedef struct {
    int64_t heads, key_heads, size, is_half, threads;
    int64_t window; /* how many tokens a query sees at most, its own included; 0 for all */
    float scale;
} shape;

/* Rows of keys and of values of one head. */
typedef struct {
    const char *keys, *values;
} pair;

/* Keys and values of a block are float32, or two numbers of sixteen bits in each of 32 where the
 * machine multiplies these. */
typedef struct {
    uint32_t turned[MOST_SIZE][BLOCK];  /* of keys: dimension or two of them, key */
    uint32_t values[BLOCK * MOST_SIZE]; /* key or two of them, dimension; a head's size apart */
} block;

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* What queries of one key head have gathered so far. */
typedef struct {
    int64_t seen[MOST_QUERIES];      /* how many tokens of the sequence each sees */
    uint32_t query[MOST_QUERIES * MOST_SIZE]; /* query, dimension; as those of keys */
    float found[MOST_QUERIES * MOST_SIZE];
    float most[MOST_QUERIES], sum[MOST_QUERIES];
} queries;

/* What a thread computes with: too much for the stacks that some threads have. */
typedef struct {
    queries q;
    block keys;
} desk;

/* Not inlined: with an address that compilers see through, a sixth more time is spent. */
static __attribute__((noinline)) desk *desk_of_thread(void) {
    static _Thread_local _Alignas(64) desk kept;
    return &kept;
}

#if LANES == 16
#define FIRST_PLACES ((vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#else
#define FIRST_PLACES ((vec){0, 1, 2, 3, 4, 5, 6, 7})
#endif

/* LANES keys from a dimension on, turned; those from `count` on are 0. Two numbers of sixteen bits
 * are turned as one of 32. */
INLINE void turn_keys(block *to, int first, int d, const pair *from, int count, int is_half) {
    uvec rows[LANES];
    for (int key = 0; key < LANES; key++) {
        if (key < count) memcpy(&rows[key], from[first + key].keys + d * (is_half ? 2 : 4), sizeof(uvec));
        else rows[key] = (uvec){0};
    }
    transpose(rows);
    for (int i = 0; i < LANES; i++) {
        if (is_half && HAS_PAIRS) {
            memcpy(&to->turned[d / 2 + i][first], &rows[i], sizeof rows[i]);
        } else if (is_half) {
            uvec even = rows[i] << 16, odd = rows[i] & 0xffff0000u;
            memcpy(&to->turned[d + 2 * i][first], &even, sizeof even);
            memcpy(&to->turned[d + 2 * i + 1][first], &odd, sizeof odd);
        } else {
            memcpy(&to->turned[d + i][first], &rows[i], sizeof rows[i]);
        }
    }
}

/* A block of keys and values, of which each has a place of its own; keys that are missing are 0. */
INLINE void take_block(block *to, const pair *from, int count, int size, int is_half) {
    const int step = is_half ? 2 * LANES : LANES;
    for (int first = 0; first < BLOCK; first += LANES)
        for (int d = 0; d < size; d += step) {
            if (count >= first + LANES) turn_keys(to, first, d, from, LANES, is_half);
            else turn_keys(to, first, d, from, count - first, is_half);
        }
    if (is_half && HAS_PAIRS) {
        for (int key = 0; key < count; key += 2)
            for (int d = 0; d < size; d += LANES) {
                uvec made = read_bits(from[key].values, d);
                if (key + 1 < count) made |= read_bits(from[key + 1].values, d) << 16;
                memcpy(&to->values[key / 2 * size + d], &made, sizeof made);
            }
        return;
    }
    for (int key = 0; key < count; key++)
        for (int d = 0; d < size; d += LANES)
            write(to->values, key * size + d, read(from[key].values, d, is_half), 0);
}

/* Memory is slow to answer: it is asked for the block after this one while this one is computed
 * with, a few lines at a time. They come to the second cache: the first one is full of what is
 * computed with. `line_bytes` is 0 if it was asked already. */
typedef struct {
    pair next;
    int64_t line_bytes;
} ahead;

INLINE void ask(const char *rows, int64_t line, int lines, int64_t line_bytes) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(rows + (line + i) * line_bytes, 0, 2);
}

/* Products of one number, or two, with those of keys or values, added to sums. */
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
    return sums + all(number) * read(numbers, 0, 0);
}

/* Scores of a block's keys for some queries beside each other. */
INLINE void score(
    const queries *q, const int *which, int count, const block *keys, int size, float scale, ahead after, int is_half,
    vec scores[][PARTS]
) {
    const int in_pairs = is_half && HAS_PAIRS, numbers = in_pairs ? size / 2 : size;
    const int lines = in_pairs || !is_half ? 4 : 2; /* for each number of a query */
    for (int part = 0; part < PARTS; part += 4) {
        vec sums[4][4] = {{{0}}};
        for (int d = 0; d < numbers; d++) {
            ask(after.next.keys, d * lines, lines, after.line_bytes);
            for (int i = 0; i < count; i++)
                for (int p = 0; p < 4; p++)
                    sums[i][p] = add_products(
                        sums[i][p], q->query[which[i] * numbers + d], &keys->turned[d][(part + p) * LANES], in_pairs
                    );
        }
        for (int i = 0; i < count; i++)
            for (int p = 0; p < 4; p++) scores[i][part + p] = sums[i][p] * scale;
    }
}

/* Scores become weights; what was found before is scaled down to them. `least` and `end` are the
 * keys of the block that the query sees. */
INLINE float weigh(queries *q, int which, vec scores[PARTS], int least, int end) {
    const float nothing = -INFINITY;
    vec most = all(nothing);
    for (int p = 0; p < PARTS; p++) {
        const vec place = FIRST_PLACES + (float)(p * LANES);
        if (end < (p + 1) * LANES) scores[p] = choose(is_below(place, all((float)end)), scores[p], all(nothing));
        if (least > p * LANES) scores[p] = choose(is_below(place, all((float)least)), all(nothing), scores[p]);
        most = larger(most, scores[p]);
    }
    float largest = largest_of(most);
    if (q->most[which] > largest) largest = q->most[which];
    vec sum = {0};
    for (int p = 0; p < PARTS; p++) {
        scores[p] = power_of_e(scores[p] - largest);
        sum += scores[p];
    }
    float scale = power_of_e(all(q->most[which] - largest))[0];
    q->most[which] = largest;
    q->sum[which] = q->sum[which] * scale + sum_of(sum);
    return scale;
}

/* Add the values, by their weights, to what was found; `parts` vectors of each from `d` on. */
INLINE void add_values(
    queries *q, const int *which, int count, const block *keys, int keys_count, int size, int d, int parts,
    uint32_t weights[][BLOCK], const float *scales, ahead after, int is_half
) {
    const int in_pairs = is_half && HAS_PAIRS, numbers = in_pairs ? (keys_count + 1) / 2 : keys_count;
    const int lines = parts * LANES * (in_pairs || !is_half ? 4 : 2) / 64; /* for each key, or two */
    const int64_t first_line = d * (is_half ? 2 : 4) / 64 * BLOCK;
    vec sums[4][4];
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++)
            sums[i][p] = read(q->found, which[i] * size + d + p * LANES, 0) * scales[i];
    for (int n = 0; n < numbers; n++) {
        ask(after.next.values, first_line + n * lines, lines, after.line_bytes);
        for (int i = 0; i < count; i++)
            for (int p = 0; p < parts; p++)
                sums[i][p] = add_products(sums[i][p], weights[i][n], &keys->values[n * size + d + p * LANES], in_pairs);
    }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) write(q->found, which[i] * size + d + p * LANES, sums[i][p], 0);
}

INLINE void look_together(
    queries *q, const int *which, int count, const block *keys, int size, float scale, const int *least, const int *end,
    int keys_count, ahead after, int is_half
) {
    vec scores[4][PARTS];
    uint32_t weights[4][BLOCK]; /* of a key, or of two */
    float scales[4];
    score(q, which, count, keys, size, scale, after, is_half, scores);
    for (int i = 0; i < count; i++) {
        scales[i] = weigh(q, which[i], scores[i], least[i], end[i]);
        for (int p = 0; p < PARTS; p++) write(weights[i], p * LANES, scores[i][p], is_half && HAS_PAIRS);
    }
    int d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES)
        add_values(q, which, count, keys, keys_count, size, d, 4, weights, scales, after, is_half);
    for (; d < size; d += LANES) add_values(q, which, count, keys, keys_count, size, d, 1, weights, scales, after, is_half);
}

INLINE pair pair_of(const char *run, int64_t head_bytes, int64_t layer, int64_t head, const shape *of) {
    const char *keys = run + (layer * 2 * of->key_heads + head) * head_bytes;
    return (pair){keys, keys + of->key_heads * head_bytes};
}

/* The tokens of a sequence for one key head: those of the run that it shares, and then its own. */
typedef struct {
    pair shared, own;
    int64_t shared_length, bytes; /* of a token's keys */
} tokens;

INLINE pair token_at(const tokens *of, int64_t place) {
    const pair run = place < of->shared_length ? of->shared : of->own;
    const int64_t at = (place < of->shared_length ? place : place - of->shared_length) * of->bytes;
    return (pair){run.keys + at, run.values + at};
}

/* Some queries look at the tokens from one place, where a block begins, to another. */
INLINE void look(
    queries *q, int first, int last, block *keys, const tokens *seen, int64_t from, int64_t to, pair next,
    const shape *of, int is_half
) {
    const int size = (int)of->size;
    int64_t oldest = 0; /* that any of them sees */
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
        take_block(keys, rows, count, size, is_half);
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
                if (some == 1) look_together(q, which, 1, keys, size, of->scale, least, end, count, after, is_half);
                else if (some == 2) look_together(q, which, 2, keys, size, of->scale, least, end, count, after, is_half);
                else if (some == 3) look_together(q, which, 3, keys, size, of->scale, least, end, count, after, is_half);
                else look_together(q, which, 4, keys, size, of->scale, least, end, count, after, is_half);
                some = 0;
                after.line_bytes = 0;
            }
        }
    }
}

INLINE void take_query(queries *q, int which, const char *asked, int64_t from, int size, int is_half) {
    for (int d = 0; d < size; d += LANES) {
        if (!(is_half && HAS_PAIRS)) write(q->query, which * size + d, read(asked, from + d, is_half), 0);
        write(q->found, which * size + d, (vec){0}, 0);
    }
    if (is_half && HAS_PAIRS) memcpy(&q->query[which * (size / 2)], asked + from * 2, size * 2);
}

/* Stretches that share a run, or have none, for one key head. */
INLINE void attend_unit(
    const stretch *first, int64_t stretches, int64_t head, int64_t layer, pair next, const shape *of, rows_of asked,
    rows_of found, float *sums, int is_half
) {
    const int group = (int)(of->heads / of->key_heads), size = (int)of->size;
    desk *mine = desk_of_thread();
    queries *q = &mine->q;
    block *keys = &mine->keys;
    int count = 0;
    for (const stretch *s = first; s < first + stretches; s++)
        for (int64_t row = 0; row < s->rows; row++)
            for (int h = 0; h < group; h++, count++) {
                int64_t from = (s->row + row) * asked.step + (head * group + h) * size;
                take_query(q, count, asked.at, from, size, is_half);
                q->seen[count] = s->shared_length + s->place + row + 1;
                q->most[count] = -INFINITY;
                q->sum[count] = 0.0f;
            }
    tokens seen = {{NULL, NULL}, pair_of(first->own, first->own_head_bytes, layer, head, of), first->shared_length,
                   of->size * (is_half ? 2 : 4)};
    /* Blocks begin at the same places of a sequence whatever of it is shared: one that is shared in
     * part belongs to each stretch by itself. */
    const int64_t whole = first->shared_length - first->shared_length % BLOCK;
    if (first->shared) {
        seen.shared = pair_of(first->shared, first->shared_head_bytes, layer, head, of);
        look(q, 0, count, keys, &seen, 0, whole, seen.own, of, is_half);
    }
    int at = 0;
    for (const stretch *s = first; s < first + stretches; s++) {
        const int end = at + (int)s->rows * group, is_last = s + 1 == first + stretches;
        const pair after = is_last ? next : pair_of(s[1].own, s[1].own_head_bytes, layer, head, of);
        look(q, at, end, keys, &seen, whole, s->shared_length + s->place + s->rows, after, of, is_half);
        at = end;
        seen.own = after;
    }
    at = 0;
    for (const stretch *s = first; s < first + stretches; s++)
        for (int64_t row = 0; row < s->rows; row++)
            for (int h = 0; h < group; h++, at++) {
                const int64_t to = (s->row + row) * found.step + (head * group + h) * size;
                if (sums) sums[(s->row + row) * of->heads + head * group + h] = q->most[at] + logf(q->sum[at]);
                for (int d = 0; d < size; d += LANES)
                    write(found.at, to + d, read(q->found, at * size + d, 0) / q->sum[at], is_half);
            }
}

/* Copy the rows of new keys and values to their places in the run. */
INLINE void keep(const stretch *s, rows_of keys, rows_of values, int64_t layer, const shape *of) {
    const int64_t width = of->is_half ? 2 : 4, bytes = of->size * width;
    for (int64_t head = 0; head < of->key_heads; head++) {
        const pair run = pair_of(s->own, s->own_head_bytes, layer, head, of);
        for (int64_t row = 0; row < s->rows; row++) {
            const int64_t to = (s->place + row) * bytes;
            memcpy((char *)run.keys + to, keys.at + ((s->row + row) * keys.step + head * of->size) * width, bytes);
            memcpy((char *)run.values + to, values.at + ((s->row + row) * values.step + head * of->size) * width, bytes);
        }
    }
}

/* What is looked at first in the i-th place: units by key heads. */
INLINE pair first_of(const stretch *stretches, const int64_t *starts, int64_t i, int64_t layer, const shape *of) {
    const stretch *first = stretches + starts[i / of->key_heads];
    const int64_t head = i % of->key_heads;
    if (first->shared) return pair_of(first->shared, first->shared_head_bytes, layer, head, of);
    return pair_of(first->own, first->own_head_bytes, layer, head, of);
}

/* Keep the keys and values of new rows, then let each row attend to what it sees.
 *
 * `starts` has the first stretch of each unit, and behind the last the number of all stretches: a
 * unit's stretches have one shared run or none, and it has no more than MOST_QUERIES queries of a
 * key head. `sums`, if not NULL, is told the logarithm of each row's and head's sum of weights. */
void tinsmith_attend(
    const shape *of, int64_t layer, const stretch *stretches, const int64_t *starts, int64_t units, rows_of asked,
    rows_of keys, rows_of values, rows_of found, float *sums
) {
    const int64_t all_stretches = starts[units], all_units = units * of->key_heads;
    int64_t taken = 0, products = 0; /* of each dimension */
    for (const stretch *s = stretches; s < stretches + all_stretches; s++) {
        const int64_t tokens = s->shared_length + s->place + s->rows;
        taken += 2 * tokens * of->key_heads;
        products += 2 * tokens * s->rows * of->heads;
    }
    const int threads = threads_for(of->threads, of->size * (taken + products / PRODUCTS_PER_NUMBER));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < all_stretches; i++) keep(stretches + i, keys, values, layer, of);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < all_units; i++) {
        const int64_t unit = i / of->key_heads, head = i % of->key_heads;
        const stretch *first = stretches + starts[unit];
        const int64_t count = starts[unit + 1] - starts[unit];
        const pair next = first_of(stretches, starts, i + 1 < all_units ? i + 1 : i, layer, of);
        if (of->is_half) attend_unit(first, count, head, layer, next, of, asked, found, sums, 1);
        else attend_unit(first, count, head, layer, next, of, asked, found, sums, 0);
    }
}
