/* What tensors are to the kernels. */

#ifndef TINSMITH_ROWS_H
#define TINSMITH_ROWS_H

#include <stdint.h>

/* Rows of a tensor: where the first is, and how many numbers from one to the next. */
typedef struct {
    char *at;
    int64_t step;
} rows_of;

#define FOR_ROWS(index, count, threads) \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)") \
    for (int64_t index = 0; index < (count); index++)

/* What rows are normed by: each of their `parts` by itself. */
typedef struct {
    int64_t parts, size, x_half, out_half, threads;
    float epsilon;
} norm_shape;

#endif
