#include "linalg/blas.h"

#include <cblas.h>

namespace oscar::blas {
namespace {

// OpenBLAS must not start threads of its own inside our pool.
void require_single_thread() {
  static const bool done = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  (void)done;
}

blasint to_int(size_t value) { return static_cast<blasint>(value); }

}  // namespace

void add_gram_upper(const double* rows, size_t num_rows, size_t dim, double* gram) {
  require_single_thread();
  cblas_dsyrk(CblasRowMajor, CblasUpper, CblasTrans, to_int(dim), to_int(num_rows), 1.0, rows,
              to_int(dim), 1.0, gram, to_int(dim));
}

void multiply(const double* a, const double* b, size_t m, size_t k, size_t n, double* out) {
  require_single_thread();
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, to_int(m), to_int(n), to_int(k), 1.0, a,
              to_int(k), b, to_int(n), 0.0, out, to_int(n));
}

void multiply_transposed(const float* a, size_t a_stride, const float* b, size_t b_stride, size_t m,
                         size_t n, size_t k, float alpha, float* out, size_t out_stride) {
  require_single_thread();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, to_int(m), to_int(n), to_int(k), alpha, a,
              to_int(a_stride), b, to_int(b_stride), 0.0F, out, to_int(out_stride));
}

void multiply(const float* a, size_t a_stride, const float* b, size_t b_stride, size_t m, size_t n,
              size_t k, float beta, float* out, size_t out_stride) {
  require_single_thread();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, to_int(m), to_int(n), to_int(k), 1.0F, a,
              to_int(a_stride), b, to_int(b_stride), beta, out, to_int(out_stride));
}

}  // namespace oscar::blas
