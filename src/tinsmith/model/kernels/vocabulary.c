/* Rows of logits: tokens' shares of them, and the way back from log-probabilities.
 *
 * A token's share is e to the power of how far its logit is below the largest of the row. Shares are
 * added up in blocks, and the blocks' sums in float64: whoever asks gets the same total, bit for bit.
 */

#include "numbers.h"
#include "rows.h"

INLINE float largest_logit(const char *logits, int64_t from, int64_t vocabulary, int is_half) {
    const int64_t whole = vocabulary - vocabulary % LANES;
    vec largest = all(-INFINITY);
    for (int64_t v = 0; v < whole; v += LANES) largest = larger(largest, read(logits, from + v, is_half));
    float top = largest_of(largest);
    for (int64_t v = whole; v < vocabulary; v++) {
        const float one = read_one(logits, from + v, is_half);
        if (one > top) top = one;
    }
    return top;
}

/* The shares of the tokens from `v` on; 0 behind the vocabulary. */
INLINE vec shares_at(const char *logits, int64_t from, int64_t v, int64_t vocabulary, float top, float colder, int is_half) {
    vec one = all(-INFINITY);
    if (v + LANES <= vocabulary) one = read(logits, from + v, is_half);
    else
        for (int lane = 0; lane < LANES && v + lane < vocabulary; lane++)
            one[lane] = read_one(logits, from + v + lane, is_half);
    return power_of_e((one - top) * colder);
}

/* Shares, if there is where to put them, and sums: of each block and all before it, if there is where
 * to put them, and else of all. */
INLINE void share_row(
    rows_of logits, float *shares, double *sums, int has_all_sums, float *most, int64_t row, int64_t vocabulary,
    int64_t block, float colder, int is_half
) {
    const int64_t from = row * logits.step, blocks = (vocabulary + block - 1) / block;
    const float top = largest_logit(logits.at, from, vocabulary, is_half);
    most[row] = top;
    double total = 0.0;
    for (int64_t b = 0; b < blocks; b++) {
        vec sum = {0};
        for (int64_t v = b * block; v < (b + 1) * block; v += LANES) {
            const vec one = shares_at(logits.at, from, v, vocabulary, top, colder, is_half);
            if (shares) write(shares, v, one, 0);
            sum += one;
        }
        total += (double)sum_of(sum);
        if (has_all_sums) sums[row * blocks + b] = total;
    }
    if (!has_all_sums) sums[row] = total;
}

/* Each share is taken to the power that `colder` has for its row; behind the vocabulary there are
 * zeros, up to a whole number of blocks. */
void tinsmith_shares(
    int64_t rows, int64_t vocabulary, int64_t block, int64_t is_half, int64_t threads_wanted, rows_of logits,
    const float *colder, rows_of shares, double *sums, float *most
) {
    const int threads = threads_for(threads_wanted, rows * vocabulary);
    FOR_ROWS(row, rows, threads) {
        float *to = (float *)shares.at + row * shares.step;
        if (is_half) share_row(logits, to, sums, 1, most, row, vocabulary, block, colder[row], 1);
        else share_row(logits, to, sums, 1, most, row, vocabulary, block, colder[row], 0);
    }
}

/* The sum of each row's shares alone. */
void tinsmith_totals(
    int64_t rows, int64_t vocabulary, int64_t block, int64_t is_half, int64_t threads_wanted, rows_of logits,
    double *totals, float *most
) {
    const int threads = threads_for(threads_wanted, rows * vocabulary);
    FOR_ROWS(row, rows, threads) {
        if (is_half) share_row(logits, NULL, totals, 0, most, row, vocabulary, block, 1.0f, 1);
        else share_row(logits, NULL, totals, 0, most, row, vocabulary, block, 1.0f, 0);
    }
}

/* What a loss changes by with each logit of a row: all shares times what `factors` has for the row, and
 * at its targets the slopes besides. A token may be a target more than once. */
INLINE void slope_row(
    rows_of logits, float top, float factor, int64_t targets, const int64_t *tokens, const float *slopes, rows_of out,
    int64_t row, int64_t vocabulary, int is_half
) {
    const int64_t from = row * logits.step, to = row * out.step, whole = vocabulary - vocabulary % LANES;
    for (int64_t v = 0; v < whole; v += LANES)
        write(out.at, to + v, shares_at(logits.at, from, v, vocabulary, top, 1.0f, is_half) * factor, is_half);
    if (whole < vocabulary) {
        const vec last = shares_at(logits.at, from, whole, vocabulary, top, 1.0f, is_half) * factor;
        for (int64_t v = whole; v < vocabulary; v++) write_one(out.at, to + v, last[v - whole], is_half);
    }
    for (int64_t k = 0; k < targets; k++) {
        float slope = 0.0f;
        for (int64_t other = 0; other < targets; other++) slope += tokens[other] == tokens[k] ? slopes[other] : 0.0f;
        const vec share = shares_at(logits.at, from, tokens[k], tokens[k] + 1, top, 1.0f, is_half);
        write_one(out.at, to + tokens[k], share[0] * factor + slope, is_half);
    }
}

void tinsmith_logit_slopes(
    int64_t rows, int64_t vocabulary, int64_t is_half, int64_t threads_wanted, rows_of logits, const float *most,
    const float *factors, int64_t targets, const int64_t *tokens, const float *slopes, rows_of out
) {
    const int threads = threads_for(threads_wanted, rows * vocabulary);
    FOR_ROWS(row, rows, threads) {
        const int64_t *of_row = tokens + row * targets;
        const float *theirs = slopes + row * targets;
        if (is_half) slope_row(logits, most[row], factors[row], targets, of_row, theirs, out, row, vocabulary, 1);
        else slope_row(logits, most[row], factors[row], targets, of_row, theirs, out, row, vocabulary, 0);
    }
}
