/* What tensors are to the kernels. */

#ifndef TINSMITH_ROWS_H
#define TINSMITH_ROWS_H

#include <stdint.h>

/* Rows of a tensor: where the first is, and how many numbers from one to the next. */
typedef struct {
    char *at;
    int64_t step;
} rows_of;

/* What rows are normed by: each of their `parts` by itself. */
typedef struct {
    int64_t parts, size, x_half, out_half, threads;
    float epsilon;
} norm_shape;

#endif
