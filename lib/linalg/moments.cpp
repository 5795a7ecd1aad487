#include "linalg/moments.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/cpu.h"
#include "base/error.h"
#include "linalg/blas.h"
#include "linalg/gram_kernels.h"

namespace oscar {
namespace {

constexpr size_t kBlockRows = 256;  // 256 x 128 doubles = 256 KiB: stays in the second-level cache

// Converts rows [first, first + count) of a block to double, each multiplied by sqrt(weight).
void convert_rows(const RowBlock& block, size_t first, size_t count, size_t dim,
                  const double* weights, double* out) {
  for (size_t i = 0; i < count; ++i) {
    const size_t row = first + i;
    const float* source = block.rows + row / block.rows_per_token * block.token_stride +
                          row % block.rows_per_token * dim;
    double* target = out + i * dim;
    if (weights == nullptr) {
      for (size_t d = 0; d < dim; ++d) target[d] = static_cast<double>(source[d]);
    } else {
      const double factor = std::sqrt(weights[row]);
      for (size_t d = 0; d < dim; ++d) target[d] = static_cast<double>(source[d]) * factor;
    }
  }
}

double* scratch(size_t count) {
  thread_local std::vector<double> buffer;
  if (buffer.size() < count) buffer.resize(count);
  return buffer.data();
}

// Blocks of 32 KiB: each is converted once and read by every tile from the first-level cache.
void add_rows_avx512(const RowBlock& block, const double* weights, size_t dim, double* gram) {
  const size_t num_rows = block.num_tokens * block.rows_per_token;
  const size_t block_rows = std::max<size_t>(8, 4096 / dim);
  double* converted = scratch(block_rows * dim);
  for (size_t first = 0; first < num_rows; first += block_rows) {
    const size_t count = std::min(block_rows, num_rows - first);
    for (size_t i = 0; i < count; ++i) {
      const size_t row = first + i;
      convert_row_avx512(block.rows + row / block.rows_per_token * block.token_stride +
                             row % block.rows_per_token * dim,
                         dim, weights == nullptr ? 1.0 : std::sqrt(weights[row]),
                         converted + i * dim);
    }
    add_gram_avx512(converted, count, dim, gram);
  }
}

}  // namespace

void GramSum::add(const RowBlock& block, const double* weights) {
  const size_t num_rows = block.num_tokens * block.rows_per_token;
  if (cpu_features().avx512 && dim_ % 16 == 0) {
    add_rows_avx512(block, weights, dim_, upper_.data());
    count_ += static_cast<double>(num_rows);
    return;
  }
  double* converted = scratch(kBlockRows * dim_);
  for (size_t first = 0; first < num_rows; first += kBlockRows) {
    const size_t count = std::min(kBlockRows, num_rows - first);
    convert_rows(block, first, count, dim_, weights, converted);
    blas::add_gram_upper(converted, count, dim_, upper_.data());
  }
  count_ += static_cast<double>(num_rows);
}

void GramSum::merge(const GramSum& other) {
  OSCAR_CHECK(dim_ == other.dim_, "cannot merge moments of width ", dim_, " and ", other.dim_);
  for (size_t i = 0; i < upper_.size(); ++i) upper_[i] += other.upper_[i];
  count_ += other.count_;
}

TensorD GramSum::sum() const {
  TensorD full({dim_, dim_});
  for (size_t i = 0; i < dim_; ++i)
    for (size_t j = i; j < dim_; ++j)
      full.values[i * dim_ + j] = full.values[j * dim_ + i] = upper_[i * dim_ + j];
  return full;
}

TensorD GramSum::mean() const {
  OSCAR_CHECK(count_ > 0.0, "no rows behind a second moment");
  TensorD full = sum();
  for (double& value : full.values) value /= count_;
  return full;
}

GramSum GramSum::from(const TensorD& sum, double count) {
  OSCAR_CHECK(sum.shape.size() == 2 && sum.shape[0] == sum.shape[1],
              "a second moment must be square, got ", to_string(sum.shape));
  GramSum gram(sum.shape[0]);
  gram.upper_ = sum.values;
  gram.count_ = count;
  return gram;
}

void RowSum::add(const RowBlock& block) {
  const size_t dim = sum_.size();
  for (size_t token = 0; token < block.num_tokens; ++token) {
    const float* row = block.rows + token * block.token_stride;
    for (size_t r = 0; r < block.rows_per_token; ++r, row += dim)
      for (size_t d = 0; d < dim; ++d) sum_[d] += static_cast<double>(row[d]);
  }
  count_ += static_cast<double>(block.num_tokens * block.rows_per_token);
}

void RowSum::merge(const RowSum& other) {
  OSCAR_CHECK(sum_.size() == other.sum_.size(), "cannot merge sums of width ", sum_.size(), " and ",
              other.sum_.size());
  for (size_t d = 0; d < sum_.size(); ++d) sum_[d] += other.sum_[d];
  count_ += other.count_;
}

RowSum RowSum::from(std::vector<double> sum, double count) {
  RowSum result;
  result.sum_ = std::move(sum);
  result.count_ = count;
  return result;
}

std::vector<double> RowSum::mean() const {
  OSCAR_CHECK(count_ > 0.0, "no rows behind a mean");
  std::vector<double> result = sum_;
  for (double& value : result) value /= count_;
  return result;
}

void quadratic_forms(const RowBlock& block, const TensorD& matrix, double* out) {
  const size_t dim = matrix.extent(0), num_rows = block.num_tokens * block.rows_per_token;
  double* converted = scratch(2 * kBlockRows * dim);
  double* product = converted + kBlockRows * dim;
  for (size_t first = 0; first < num_rows; first += kBlockRows) {
    const size_t count = std::min(kBlockRows, num_rows - first);
    convert_rows(block, first, count, dim, nullptr, converted);
    blas::multiply(converted, matrix.data(), count, dim, dim, product);
    for (size_t i = 0; i < count; ++i) {
      double sum = 0.0;
      for (size_t d = 0; d < dim; ++d) sum += converted[i * dim + d] * product[i * dim + d];
      out[first + i] = sum;
    }
  }
}

}  // namespace oscar
