/* What tensors are to the kernels. */

#ifndef TINSMITH_ROWS_H
#define TINSMITH_ROWS_H

#include <stdint.h>

/* Rows of a tensor: where the first is, and how many numbers from one to the next. */
typedef struct {
    char *at;
    int64_t step;
} rows_of;

/* Another thread sleeps until there is work for it, and takes some 50 µs to wake up: it is asked for
 * work that takes longer alone. Work is counted by numbers that are read and written, each of which
 * takes about as long as 16 products of pairs. */
#define ENOUGH_NUMBERS (1 << 18)
#define PRODUCTS_PER_NUMBER 16

static inline int threads_for(int64_t threads, int64_t numbers) { return numbers < ENOUGH_NUMBERS ? 1 : (int)threads; }

#define FOR_ROWS(index, count, threads) \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)") \
    for (int64_t index = 0; index < (count); index++)

/* What rows are normed by: each of their `parts` by itself. */
typedef struct {
    int64_t parts, size, x_half, out_half, threads;
    float epsilon;
} norm_shape;

#endif
