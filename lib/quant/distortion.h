// Statistics of quantization error over rows: what was lost, how it lies along the row, and what a
// metric sees of it.
#pragma once

#include <cstddef>
#include <vector>

#include "quant/codec.h"

namespace oscar {

// Sums over rows; partial results add up with merge(). Errors are exact - decoded.
struct Distortion {
  size_t rows = 0;
  size_t elements = 0;
  double error_square_sum = 0.0;  // sum of e^2
  double exact_square_sum = 0.0;  // sum of x^2
  double max_abs_error = 0.0;
  double projection_sum = 0.0;  // over rows with x != 0: (x . y) / (x . x)
  size_t projection_rows = 0;   // rows with x != 0
  double cosine_sum = 0.0;      // over rows: cosine of x and y (1 for two rows of zeros, 0 for one)
  double metric_error_sum = 0.0;             // sum of e A e^T, 0 without a metric
  double metric_exact_sum = 0.0;             // sum of x A x^T, 0 without a metric
  std::vector<double> dim_error_sum;         // [D]: sum over rows of e_d
  std::vector<double> dim_error_square_sum;  // [D]: sum over rows of e_d^2

  void merge(const Distortion& other);

  double mse() const;           // mean square error per element
  double relative_mse() const;  // sum e^2 / sum x^2
  double shrinkage() const;     // 1 - mean projection: > 0 when decoded rows are too short
  double mean_cosine() const;
  double metric_error() const;           // mean e A e^T per row
  double relative_metric_error() const;  // sum e A e^T / sum x A x^T
  double bias_share() const;  // share of the error's energy that is constant over the rows
};

// exact, decoded: [rows, D], rows row_stride floats apart. metric may be null; else its head_dim is
// D. Throws Error when D does not fit or a value is not finite (row and dim in the message).
Distortion measure_distortion(const float* exact, const float* decoded, size_t num_rows,
                              int head_dim, size_t exact_stride, size_t decoded_stride,
                              const EncoderMetric* metric = nullptr);

}  // namespace oscar
