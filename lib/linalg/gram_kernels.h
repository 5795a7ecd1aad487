// Inner loops of second moments for AVX-512 (8 doubles a register); other machines use BLAS.
#pragma once

#include <cstddef>

namespace oscar {

// out[i] = factor * source[i], i < count; count a multiple of 16.
void convert_row_avx512(const float* source, size_t count, double factor, double* out);

// gram [dim, dim] += rows^T rows for rows [num_rows, dim]; dim a multiple of 16. Only the upper
// triangle of the result is meaningful. num_rows x dim doubles should fit the first-level cache.
void add_gram_avx512(const double* rows, size_t num_rows, size_t dim, double* gram);

}  // namespace oscar
