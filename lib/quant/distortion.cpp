#include "quant/distortion.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace oscar {
namespace {

double ratio(double numerator, double denominator) {
  return denominator == 0.0 ? 0.0 : numerator / denominator;
}

// v A v^T = sum_i pivot_i (sum_{j>=i} L_ji v_j)^2; half the work of the dense form.
double quadratic_form(const EncoderMetric& metric, const std::vector<double>& v,
                      std::vector<double>& projected) {
  const size_t size = v.size();
  std::fill(projected.begin(), projected.end(), 0.0);
  for (size_t j = 0; j < size; ++j) {
    const float* row = metric.l.data() + j * size;
    for (size_t i = 0; i <= j; ++i) projected[i] += static_cast<double>(row[i]) * v[j];
  }
  double sum = 0.0;
  for (size_t i = 0; i < size; ++i)
    sum += static_cast<double>(metric.pivot[i]) * projected[i] * projected[i];
  return sum;
}

double cosine(double xx, double yy, double xy) {
  if (xx == 0.0 && yy == 0.0) return 1.0;
  return xx == 0.0 || yy == 0.0 ? 0.0 : xy / std::sqrt(xx * yy);
}

}  // namespace

void Distortion::merge(const Distortion& other) {
  if (dim_error_sum.empty()) {
    dim_error_sum.assign(other.dim_error_sum.size(), 0.0);
    dim_error_square_sum.assign(other.dim_error_square_sum.size(), 0.0);
  }
  OSCAR_CHECK(other.dim_error_sum.empty() || other.dim_error_sum.size() == dim_error_sum.size(),
              "distortion: cannot merge head_dim ", other.dim_error_sum.size(), " into ",
              dim_error_sum.size());
  rows += other.rows;
  elements += other.elements;
  error_square_sum += other.error_square_sum;
  exact_square_sum += other.exact_square_sum;
  max_abs_error = std::max(max_abs_error, other.max_abs_error);
  projection_sum += other.projection_sum;
  projection_rows += other.projection_rows;
  cosine_sum += other.cosine_sum;
  metric_error_sum += other.metric_error_sum;
  metric_exact_sum += other.metric_exact_sum;
  for (size_t d = 0; d < other.dim_error_sum.size(); ++d) {
    dim_error_sum[d] += other.dim_error_sum[d];
    dim_error_square_sum[d] += other.dim_error_square_sum[d];
  }
}

double Distortion::mse() const { return ratio(error_square_sum, static_cast<double>(elements)); }
double Distortion::relative_mse() const { return ratio(error_square_sum, exact_square_sum); }
double Distortion::shrinkage() const {
  return projection_rows == 0 ? 0.0 : 1.0 - projection_sum / static_cast<double>(projection_rows);
}
double Distortion::mean_cosine() const { return ratio(cosine_sum, static_cast<double>(rows)); }
double Distortion::metric_error() const {
  return ratio(metric_error_sum, static_cast<double>(rows));
}
double Distortion::relative_metric_error() const {
  return ratio(metric_error_sum, metric_exact_sum);
}
double Distortion::bias_share() const {
  double constant = 0.0;
  for (const double sum : dim_error_sum) constant += sum * sum;
  return ratio(constant, static_cast<double>(rows) * error_square_sum);
}

Distortion measure_distortion(const float* exact, const float* decoded, size_t num_rows,
                              int head_dim, size_t exact_stride, size_t decoded_stride,
                              const EncoderMetric* metric) {
  OSCAR_CHECK(head_dim > 0, "distortion: head_dim must be positive, got ", head_dim);
  OSCAR_CHECK(metric == nullptr || metric->head_dim == head_dim, "distortion: metric of head_dim ",
              metric == nullptr ? 0 : metric->head_dim, " does not fit head_dim ", head_dim);
  const auto size = static_cast<size_t>(head_dim);
  Distortion result;
  result.rows = num_rows;
  result.elements = num_rows * size;
  result.dim_error_sum.assign(size, 0.0);
  result.dim_error_square_sum.assign(size, 0.0);
  std::vector<double> x(size), error(size), projected(size);
  for (size_t row = 0; row < num_rows; ++row) {
    double xx = 0.0, yy = 0.0, xy = 0.0;
    for (size_t d = 0; d < size; ++d) {
      x[d] = static_cast<double>(exact[row * exact_stride + d]);
      const double y = static_cast<double>(decoded[row * decoded_stride + d]);
      OSCAR_CHECK(std::isfinite(x[d]) && std::isfinite(y), "distortion: row ", row, " dim ", d,
                  " is not finite (exact ", x[d], ", decoded ", y, ")");
      error[d] = x[d] - y;
      xx += x[d] * x[d];
      yy += y * y;
      xy += x[d] * y;
      result.error_square_sum += error[d] * error[d];
      result.max_abs_error = std::max(result.max_abs_error, std::abs(error[d]));
      result.dim_error_sum[d] += error[d];
      result.dim_error_square_sum[d] += error[d] * error[d];
    }
    result.exact_square_sum += xx;
    result.cosine_sum += cosine(xx, yy, xy);
    if (xx > 0.0) {
      result.projection_sum += xy / xx;
      ++result.projection_rows;
    }
    if (metric == nullptr) continue;
    result.metric_error_sum += quadratic_form(*metric, error, projected);
    result.metric_exact_sum += quadratic_form(*metric, x, projected);
  }
  return result;
}

}  // namespace oscar
