// The feedback encoder as the method is written down: one row, dense metric, double arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/float16.h"
#include "quant/codec.h"

namespace oscar_test {

// One encoded row: value = code * scale + low.
struct ReferenceRow {
  double scale = 0.0, low = 0.0, cost = HUGE_VAL;
  std::vector<int> codes;
  double value(size_t d) const { return scale * codes[d] + low; }
};

class FeedbackReference {
 public:
  FeedbackReference(const oscar::EncoderMetric& metric, const oscar::FeedbackOptions& options)
      : metric_(metric), options_(options), size_(static_cast<size_t>(metric.head_dim)) {}

  // fp16 scale and minimum, 2 bits, no gain.
  ReferenceRow encode(const float* row) const {
    std::vector<double> x(row, row + size_);
    double scale = 0.0, low = 0.0;
    options_.start == oscar::StartRange::kClip ? start_clip(x, scale, low)
                                               : start_grid(x, scale, low);
    ReferenceRow best;
    for (int round = 0; round <= options_.refits; ++round) {
      if (round > 0) refit(x, best, scale, low);
      for (const double factor : round == 0 ? options_.multipliers : options_.refit_multipliers) {
        ReferenceRow trial = attempt(x, factor, scale, low);
        if (trial.cost < best.cost) best = trial;
      }
    }
    for (int sweep = 0; sweep < options_.sweeps; ++sweep) descend(x, best);
    best.cost = cost(x, values(best));
    return best;
  }

  // e A e^T of the values of one row.
  double cost(const std::vector<double>& x, const std::vector<double>& values) const {
    double sum = 0.0;
    for (size_t i = 0; i < size_; ++i)
      for (size_t j = 0; j < size_; ++j) sum += (x[i] - values[i]) * a(i, j) * (x[j] - values[j]);
    return sum;
  }
  double product(const std::vector<double>& x, const std::vector<double>& y) const {
    double sum = 0.0;
    for (size_t i = 0; i < size_; ++i)
      for (size_t j = 0; j < size_; ++j) sum += x[i] * a(i, j) * y[j];
    return sum;
  }

 private:
  double a(size_t i, size_t j) const { return static_cast<double>(metric_.a[i * size_ + j]); }
  double l(size_t i, size_t j) const { return static_cast<double>(metric_.l[i * size_ + j]); }
  static int round_code(double position) {
    return static_cast<int>(std::clamp(std::floor(position + 0.5), 0.0, 3.0));
  }
  std::vector<double> values(const ReferenceRow& row) const {
    std::vector<double> y(size_);
    for (size_t d = 0; d < size_; ++d) y[d] = row.value(d);
    return y;
  }

  void start_clip(const std::vector<double>& x, double& scale, double& low) const {
    std::vector<double> magnitudes(size_);
    for (size_t d = 0; d < size_; ++d) magnitudes[d] = std::abs(x[d]);
    std::sort(magnitudes.begin(), magnitudes.end());
    const auto index = static_cast<size_t>(options_.start_clip * static_cast<double>(size_));
    const double threshold = magnitudes[std::min(size_ - 1, index)];
    low = std::max(-threshold, *std::min_element(x.begin(), x.end()));
    scale = (std::min(threshold, *std::max_element(x.begin(), x.end())) - low) / 3.0;
  }
  void start_grid(const std::vector<double>& x, double& scale, double& low) const {
    double mean = 0.0, best = HUGE_VAL;
    for (const double value : x) mean += value / static_cast<double>(size_);
    const double minimum = *std::min_element(x.begin(), x.end());
    const double maximum = *std::max_element(x.begin(), x.end());
    for (const double fraction_low : {.44, .54, .64, .74, .86, 1.0})
      for (const double fraction_high : {.44, .54, .64, .74, .86, 1.0}) {
        ReferenceRow row;
        row.low = mean + fraction_low * (minimum - mean);
        row.scale = (mean + fraction_high * (maximum - mean) - row.low) / 3.0;
        for (size_t d = 0; d < size_; ++d)
          row.codes.push_back(round_code((x[d] - row.low) / row.scale));
        const double now = range_cost(x, values(row));
        if (now < best) {
          best = now;
          scale = row.scale;
          low = row.low;
        }
      }
  }
  ReferenceRow attempt(const std::vector<double>& x, double factor, double scale,
                       double low) const {
    ReferenceRow row;
    row.scale = rounded(factor * scale);
    row.low = rounded(low + 1.5 * scale - 1.5 * row.scale);
    row.codes.assign(size_, 0);
    std::vector<double> error(size_);
    for (size_t i = size_; i-- > 0;) {
      double target = x[i];
      for (size_t j = i + 1; options_.feedback && j < size_; ++j) target += l(j, i) * error[j];
      row.codes[i] = round_code((target - row.low) / row.scale);
      error[i] = x[i] - row.value(i);
    }
    row.cost = cost(x, values(row));
    return row;
  }
  double range_cost(const std::vector<double>& x, const std::vector<double>& values) const {
    if (options_.start == oscar::StartRange::kMetricGrid) return cost(x, values);
    double sum = 0.0;
    for (size_t i = 0; i < size_; ++i) sum += (x[i] - values[i]) * (x[i] - values[i]);
    return sum;
  }
  void descend(const std::vector<double>& x, ReferenceRow& row) const {
    std::vector<double> error(size_);
    for (size_t i = 0; i < size_; ++i) error[i] = x[i] - row.value(i);
    for (size_t i = 0; i < size_; ++i) {
      double gradient = 0.0;
      for (size_t j = 0; j < size_; ++j) gradient += a(i, j) * error[j];
      row.codes[i] = round_code((x[i] - error[i] + gradient / a(i, i) - row.low) / row.scale);
      error[i] = x[i] - row.value(i);
    }
  }
  void refit(const std::vector<double>& x, const ReferenceRow& best, double& scale,
             double& low) const {
    const std::vector<double> codes(best.codes.begin(), best.codes.end());
    const std::vector<double> ones(size_, 1.0);
    const double cc = product(codes, codes), c1 = product(codes, ones), oo = product(ones, ones);
    const double xc = product(x, codes), x1 = product(x, ones);
    const double determinant = cc * oo - c1 * c1;
    scale = (xc * oo - x1 * c1) / determinant;
    low = (x1 * cc - xc * c1) / determinant;
  }
  static double rounded(double value) {
    return static_cast<double>(oscar::round_to_fp16(static_cast<float>(value)));
  }

  const oscar::EncoderMetric& metric_;
  oscar::FeedbackOptions options_;
  size_t size_;
};

}  // namespace oscar_test
