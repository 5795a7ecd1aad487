// The metric of the feedback encoder: normalisation, damping and factor A = L diag(pivot) L^T.
#include <cmath>
#include <vector>

#include "base/error.h"
#include "quant/codec.h"

namespace oscar {
namespace {

// Symmetrized, divided by the mean of its diagonal, damped; [D, D].
std::vector<double> normalized(const double* rotated_m, size_t size, double damping) {
  double trace = 0.0;
  for (size_t i = 0; i < size * size; ++i)
    OSCAR_CHECK(std::isfinite(rotated_m[i]), "encoder metric: entry [", i / size, ", ", i % size,
                "] is not finite");
  for (size_t i = 0; i < size; ++i) trace += rotated_m[i * size + i];
  const double mean = trace / static_cast<double>(size);
  OSCAR_CHECK(mean > 0.0, "encoder metric: the mean of the diagonal must be positive, got ", mean);
  std::vector<double> a(size * size);
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j < size; ++j)
      a[i * size + j] = 0.5 * (rotated_m[i * size + j] + rotated_m[j * size + i]) / mean;
    a[i * size + i] += damping;
  }
  return a;
}

}  // namespace

EncoderMetric make_encoder_metric(const double* rotated_m, int head_dim, double damping) {
  OSCAR_CHECK(head_dim >= 4 && head_dim % 4 == 0,
              "encoder metric: head_dim must be a positive multiple of 4, got ", head_dim);
  OSCAR_CHECK(damping >= 0.0 && std::isfinite(damping),
              "encoder metric: damping must be non-negative, got ", damping);
  const auto size = static_cast<size_t>(head_dim);
  const std::vector<double> a = normalized(rotated_m, size, damping);
  std::vector<double> l(size * size, 0.0), pivot(size);
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j <= i; ++j) {
      double sum = a[i * size + j];
      for (size_t k = 0; k < j; ++k) sum -= l[i * size + k] * l[j * size + k] * pivot[k];
      if (j < i) {
        l[i * size + j] = sum / pivot[j];
      } else {
        OSCAR_CHECK(sum > 0.0, "encoder metric: not positive semidefinite at dimension ", i,
                    " (pivot ", sum, " with damping ", damping, ")");
        pivot[i] = sum;
        l[i * size + i] = 1.0;
      }
    }
  }
  EncoderMetric metric;
  metric.head_dim = head_dim;
  metric.a.assign(a.begin(), a.end());
  metric.l.assign(l.begin(), l.end());
  metric.pivot.assign(pivot.begin(), pivot.end());
  return metric;
}

}  // namespace oscar
