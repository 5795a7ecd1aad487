#include <immintrin.h>

#include "linalg/gram_kernels.h"

namespace oscar {
namespace {

// A tile of 8 x 16 results stays in 16 registers while all rows pass by.
void add_tile(const double* rows, size_t num_rows, size_t dim, size_t i, size_t j, double* gram) {
  __m512d sum[8][2];
#pragma GCC unroll 8
  for (size_t a = 0; a < 8; ++a) {
    sum[a][0] = _mm512_loadu_pd(gram + (i + a) * dim + j);
    sum[a][1] = _mm512_loadu_pd(gram + (i + a) * dim + j + 8);
  }
  for (size_t r = 0; r < num_rows; ++r) {
    const double* row = rows + r * dim;
    const __m512d left = _mm512_loadu_pd(row + j), right = _mm512_loadu_pd(row + j + 8);
#pragma GCC unroll 8
    for (size_t a = 0; a < 8; ++a) {
      const __m512d factor = _mm512_set1_pd(row[i + a]);
      sum[a][0] = _mm512_fmadd_pd(factor, left, sum[a][0]);
      sum[a][1] = _mm512_fmadd_pd(factor, right, sum[a][1]);
    }
  }
#pragma GCC unroll 8
  for (size_t a = 0; a < 8; ++a) {
    _mm512_storeu_pd(gram + (i + a) * dim + j, sum[a][0]);
    _mm512_storeu_pd(gram + (i + a) * dim + j + 8, sum[a][1]);
  }
}

}  // namespace

void convert_row_avx512(const float* source, size_t count, double factor, double* out) {
  const __m512d scale = _mm512_set1_pd(factor);
  for (size_t i = 0; i < count; i += 8)
    _mm512_storeu_pd(out + i, _mm512_mul_pd(scale, _mm512_cvtps_pd(_mm256_loadu_ps(source + i))));
}

void add_gram_avx512(const double* rows, size_t num_rows, size_t dim, double* gram) {
  for (size_t i = 0; i < dim; i += 8)
    for (size_t j = i / 16 * 16; j < dim; j += 16) add_tile(rows, num_rows, dim, i, j, gram);
}

}  // namespace oscar
