/* Matmul with frozen weights. */

#include "matmul.h"

#if defined(__AVX512BF16__)

void tinsmith_prepack(int64_t outputs, int64_t inputs, row_pointer weight, uint32_t *prepacked) {
    prepack(outputs, inputs, weight, 1, 1.0f, prepacked);
}

/* out = x·Wᵀ + bias, with pre-packed weights; `bias` may be NULL. */
void tinsmith_matmul(
    int64_t rows, int64_t outputs, int64_t inputs, int64_t threads, row_pointer x, const uint32_t *prepacked,
    const uint16_t *bias, row_pointer out
) {
    const left_rows left = {x.at, x.step * 2, 4};
    matmul(rows, outputs, inputs / 2, threads, left, prepacked, (matmul_output){out.at, out.step, 1, 0, bias, 1.0f});
}

#endif
