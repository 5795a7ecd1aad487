// The few dense products used here and in calibration, on single-threaded BLAS: they are called
// from pool threads, parallel work happens outside. Matrices are row-major.
#pragma once

#include <cstddef>

namespace oscar::blas {

// gram [dim, dim], upper triangle += rows^T rows; rows [num_rows, dim].
void add_gram_upper(const double* rows, size_t num_rows, size_t dim, double* gram);

// out [m, n] = a [m, k] b [k, n].
void multiply(const double* a, const double* b, size_t m, size_t k, size_t n, double* out);

// out [m, n] = alpha a [m, k] b [n, k]^T, rows a_stride, b_stride and out_stride floats apart.
void multiply_transposed(const float* a, size_t a_stride, const float* b, size_t b_stride, size_t m,
                         size_t n, size_t k, float alpha, float* out, size_t out_stride);

// out [m, n] = a [m, k] b [k, n] + beta out.
void multiply(const float* a, size_t a_stride, const float* b, size_t b_stride, size_t m, size_t n,
              size_t k, float beta, float* out, size_t out_stride);

}  // namespace oscar::blas
