/* Softmax over rows of logits, and its backward.
 *
 * exp(logit - max) is summed in blocks in float32, and over the blocks in float64, so sampling and
 * training get bit-identical totals.
 */

#include "vectors.h"
#include "rows.h"

INLINE float largest_logit(const char *logits, int64_t from, int64_t vocabulary, int is_bf16) {
    const int64_t whole = vocabulary - vocabulary % LANES;
    vec largest = broadcast(-INFINITY);
    for (int64_t v = 0; v < whole; v += LANES) largest = vec_max(largest, load_vec(logits, from + v, is_bf16));
    float top = reduce_max(largest);
    for (int64_t v = whole; v < vocabulary; v++) {
        const float one = load_one(logits, from + v, is_bf16);
        if (one > top) top = one;
    }
    return top;
}

/* exp((logit - top) · inverse_temperature) of the tokens from `v` on; 0 beyond the vocabulary. */
INLINE vec exp_logits_at(const char *logits, int64_t from, int64_t v, int64_t vocabulary, float top, float inverse_temperature, int is_bf16) {
    vec one = broadcast(-INFINITY);
    if (v + LANES <= vocabulary) one = load_vec(logits, from + v, is_bf16);
    else
        for (int lane = 0; lane < LANES && v + lane < vocabulary; lane++)
            one[lane] = load_one(logits, from + v + lane, is_bf16);
    return exp_vec((one - top) * inverse_temperature);
}

/* Stores the exponentials unless `exp_logits` is NULL, and either the cumulative sums of all blocks
 * (`has_all_sums`) or the total. */
INLINE void exp_logits_row(
    row_pointer logits, float *exp_logits, double *sums, int has_all_sums, float *maxima, int64_t row, int64_t vocabulary,
    int64_t block, float inverse_temperature, int is_bf16
) {
    const int64_t from = row * logits.step, blocks = (vocabulary + block - 1) / block;
    const float top = largest_logit(logits.at, from, vocabulary, is_bf16);
    maxima[row] = top;
    double total = 0.0;
    for (int64_t b = 0; b < blocks; b++) {
        vec sum = {0};
        for (int64_t v = b * block; v < (b + 1) * block; v += LANES) {
            const vec one = exp_logits_at(logits.at, from, v, vocabulary, top, inverse_temperature, is_bf16);
            if (exp_logits) store_vec(exp_logits, v, one, 0);
            sum += one;
        }
        total += (double)reduce_sum(sum);
        if (has_all_sums) sums[row * blocks + b] = total;
    }
    if (!has_all_sums) sums[row] = total;
}

/* Exponentials at each row's temperature, padded with zeros to whole blocks, and their cumulative sums. */
void tinsmith_exp_logits(
    int64_t rows, int64_t vocabulary, int64_t block, int64_t is_bf16, int64_t threads_wanted, row_pointer logits,
    const float *inverse_temperature, row_pointer exp_logits, double *sums, float *maxima
) {
    const int threads = threads_for(threads_wanted, rows * vocabulary);
    FOR_ROWS(row, rows, threads) {
        float *to = (float *)exp_logits.at + row * exp_logits.step;
        if (is_bf16) exp_logits_row(logits, to, sums, 1, maxima, row, vocabulary, block, inverse_temperature[row], 1);
        else exp_logits_row(logits, to, sums, 1, maxima, row, vocabulary, block, inverse_temperature[row], 0);
    }
}

/* The total of each row, at temperature 1. */
void tinsmith_exp_totals(
    int64_t rows, int64_t vocabulary, int64_t block, int64_t is_bf16, int64_t threads_wanted, row_pointer logits,
    double *exp_totals, float *maxima
) {
    const int threads = threads_for(threads_wanted, rows * vocabulary);
    FOR_ROWS(row, rows, threads) {
        if (is_bf16) exp_logits_row(logits, NULL, exp_totals, 0, maxima, row, vocabulary, block, 1.0f, 1);
        else exp_logits_row(logits, NULL, exp_totals, 0, maxima, row, vocabulary, block, 1.0f, 0);
    }
}

/* dloss/dlogits of a row: exp(logit - top) · factor, plus dlp at its targets. A token may occur more than
 * once among the targets. */
INLINE void gradient_row(
    row_pointer logits, float top, float factor, int64_t targets, const int64_t *tokens, const float *dlp, row_pointer out,
    int64_t row, int64_t vocabulary, int is_bf16
) {
    const int64_t from = row * logits.step, to = row * out.step, whole = vocabulary - vocabulary % LANES;
    for (int64_t v = 0; v < whole; v += LANES)
        store_vec(out.at, to + v, exp_logits_at(logits.at, from, v, vocabulary, top, 1.0f, is_bf16) * factor, is_bf16);
    if (whole < vocabulary) {
        const vec last = exp_logits_at(logits.at, from, whole, vocabulary, top, 1.0f, is_bf16) * factor;
        for (int64_t v = whole; v < vocabulary; v++) store_one(out.at, to + v, last[v - whole], is_bf16);
    }
    for (int64_t k = 0; k < targets; k++) {
        float dlp_sum = 0.0f;
        for (int64_t other = 0; other < targets; other++) dlp_sum += tokens[other] == tokens[k] ? dlp[other] : 0.0f;
        const vec exp_logit = exp_logits_at(logits.at, from, tokens[k], tokens[k] + 1, top, 1.0f, is_bf16);
        store_one(out.at, to + tokens[k], exp_logit[0] * factor + dlp_sum, is_bf16);
    }
}

void tinsmith_logit_gradients(
    int64_t rows, int64_t vocabulary, int64_t is_bf16, int64_t threads_wanted, row_pointer logits, const float *maxima,
    const float *factors, int64_t targets, const int64_t *tokens, const float *dlp, row_pointer out
) {
    const int threads = threads_for(threads_wanted, rows * vocabulary);
    FOR_ROWS(row, rows, threads) {
        const int64_t *row_tokens = tokens + row * targets;
        const float *row_dlp = dlp + row * targets;
        if (is_bf16) gradient_row(logits, maxima[row], factors[row], targets, row_tokens, row_dlp, out, row, vocabulary, 1);
        else gradient_row(logits, maxima[row], factors[row], targets, row_tokens, row_dlp, out, row, vocabulary, 0);
    }
}
