/* How tensors are passed to the kernels. */

#ifndef TINSMITH_ROWS_H
#define TINSMITH_ROWS_H

#include <stdint.h>

/* The rows of a tensor: the first, and the row stride in numbers. */
typedef struct {
    char *at;
    int64_t step;
} row_pointer;

/* Waking a thread takes some 50 µs, so small calls stay on one. Work is measured in numbers read and
 * written; one takes about as long as 16 products of pairs. */
#define ENOUGH_NUMBERS (1 << 18)
#define PRODUCTS_PER_NUMBER 16

static inline int threads_for(int64_t threads, int64_t numbers) { return numbers < ENOUGH_NUMBERS ? 1 : (int)threads; }

#define FOR_ROWS(index, count, threads) \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)") \
    for (int64_t index = 0; index < (count); index++)

/* Parameters of a norm; each of the `parts` of a row is normalised by itself. */
typedef struct {
    int64_t parts, size, x_is_bf16, out_is_bf16, threads;
    float epsilon;
} norm_shape;

#endif
