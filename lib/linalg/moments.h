// Streaming, mergeable moments in double: sums of x^T x and of x over rows.
//
// Rows arrive as float32 and are converted block by block; every product and sum is double, so
// cutting the rows into other chunks moves a result by about 1e-15 relative. An accumulator is used
// by one thread at a time; parallel work uses one accumulator per (layer, head, kind).
#pragma once

#include <cstddef>
#include <vector>

#include "base/tensor.h"

namespace oscar {

// Rows of width D: `rows_per_token` consecutive rows for each of `num_tokens` tokens, the tokens
// token_stride floats apart. A KV head of k [T, Hkv, D]: {k + h * D, T, Hkv * D, 1}; the query
// group of that head in q [T, Hq, D]: {q + h * G * D, T, Hq * D, G}.
struct RowBlock {
  const float* rows = nullptr;
  size_t num_tokens = 0;
  size_t token_stride = 0;
  size_t rows_per_token = 1;
};

// Sum of w x^T x over rows x [1, D].
class GramSum {
 public:
  GramSum() = default;
  explicit GramSum(size_t dim) : dim_(dim), upper_(dim * dim, 0.0) {}

  // weights: one a row (token-major, num_tokens * rows_per_token), not negative; null = all 1.
  void add(const RowBlock& block, const double* weights = nullptr);
  void merge(const GramSum& other);

  size_t dim() const { return dim_; }
  double count() const { return count_; }  // rows added
  TensorD sum() const;                     // [D, D], symmetric
  TensorD mean() const;                    // sum / count; throws without rows
  // Restores an accumulator from its sum and count.
  static GramSum from(const TensorD& sum, double count);

 private:
  size_t dim_ = 0;
  double count_ = 0.0;
  std::vector<double> upper_;  // [D, D], upper triangle valid
};

// Sum of x over rows x [1, D].
class RowSum {
 public:
  RowSum() = default;
  explicit RowSum(size_t dim) : sum_(dim, 0.0) {}
  void add(const RowBlock& block);
  void merge(const RowSum& other);
  double count() const { return count_; }
  const std::vector<double>& sum() const { return sum_; }
  // Restores an accumulator from its sum and count.
  static RowSum from(std::vector<double> sum, double count);
  std::vector<double> mean() const;  // throws without rows

 private:
  double count_ = 0.0;
  std::vector<double> sum_;
};

// x M x^T of every row, in double; out [num_tokens * rows_per_token]. M [D, D] symmetric.
void quadratic_forms(const RowBlock& block, const TensorD& matrix, double* out);

}  // namespace oscar
