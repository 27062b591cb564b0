/* Products of rows with frozen weights. */

#include "products.h"

#if defined(__AVX512BF16__)

void tinsmith_pack(int64_t outputs, int64_t inputs, rows_of weight, uint32_t *packed) {
    pack(outputs, inputs, weight, 1, 1.0f, packed);
}

/* Rows times packed weights, plus a bias if there is one. */
void tinsmith_product(
    int64_t rows, int64_t outputs, int64_t inputs, int64_t threads, rows_of x, const uint32_t *packed,
    const uint16_t *bias, rows_of out
) {
    const left_rows left = {x.at, x.step * 2, 4};
    product(rows, outputs, inputs / 2, threads, left, packed, (sums_to){out.at, out.step, 1, 0, bias, 1.0f});
}

#endif
