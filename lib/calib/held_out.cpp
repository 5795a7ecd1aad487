#include "calib/held_out.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/error.h"
#include "base/parallel.h"
#include "linalg/blas.h"
#include "linalg/eigen.h"

namespace oscar {
namespace {

// Rows of one head, contiguous, minus a mean (null = none).
std::vector<float> gather_head(const float* x, size_t num_tokens, const HeadGeometry& geometry,
                               size_t head, const float* mean) {
  const size_t dim = geometry.head_dim, stride = geometry.num_kv_heads * dim;
  std::vector<float> rows(num_tokens * dim);
  for (size_t t = 0; t < num_tokens; ++t)
    for (size_t d = 0; d < dim; ++d)
      rows[t * dim + d] = x[t * stride + head * dim + d] - (mean == nullptr ? 0.0F : mean[d]);
  return rows;
}

std::vector<float> rotate(const std::vector<float>& rows, size_t dim, const float* rotation) {
  if (rotation == nullptr) return rows;
  std::vector<float> rotated(rows.size());
  blas::multiply(rows.data(), dim, rotation, dim, rows.size() / dim, dim, dim, 0.0F, rotated.data(),
                 dim);
  return rotated;
}

// Weighted squares of the rows of one head [num_tokens].
std::vector<double> weighted_squares(const std::vector<float>& rows, size_t dim, size_t head,
                                     const float* rotation, const ErrorWeights& weights) {
  const size_t num_tokens = rows.size() / dim;
  std::vector<double> squares(num_tokens);
  const RowBlock block{rows.data(), num_tokens, dim, 1};
  if (weights.matrices != nullptr) {
    const TensorD& matrix = (*weights.matrices)[head];
    quadratic_forms(block, rotation == nullptr ? matrix : congruence(matrix, rotation),
                    squares.data());
    return squares;
  }
  for (size_t t = 0; t < num_tokens; ++t) {
    double sum = 0.0;
    for (size_t d = 0; d < dim; ++d) {
      const double value = static_cast<double>(rows[t * dim + d]);
      sum += value * value;
    }
    squares[t] = sum * (*weights.tokens)[head][t];
  }
  return squares;
}

const float* head_matrix(const TensorF* rotation, size_t head) {
  if (rotation == nullptr || rotation->empty()) return nullptr;
  return rotation->at(rotation->extent(0) == 1 ? 0 : head);
}

}  // namespace

HeldOutSample sample_held_out(const ActivationRows& rows, const HeadGeometry& geometry,
                              size_t layer, size_t begin, size_t end, size_t max_tokens) {
  OSCAR_CHECK(begin < end, "calibration: no held-out tokens to measure on");
  const size_t available = (end - begin) / kErrorBlockTokens;
  const size_t wanted = (max_tokens + kErrorBlockTokens - 1) / kErrorBlockTokens;
  const size_t row = geometry.num_kv_heads * geometry.head_dim;
  HeldOutSample sample;
  const auto read = [&](size_t from, size_t count) {
    sample.k.resize((sample.num_tokens + count) * row);
    sample.v.resize((sample.num_tokens + count) * row);
    rows.read(layer, CaptureTensor::kK, from, from + count,
              sample.k.data() + sample.num_tokens * row);
    rows.read(layer, CaptureTensor::kV, from, from + count,
              sample.v.data() + sample.num_tokens * row);
    sample.num_tokens += count;
  };
  if (available == 0) {
    read(begin, end - begin);
    return sample;
  }
  const size_t count = std::min(available, std::max<size_t>(wanted, 1));
  for (size_t i = 0; i < count; ++i)
    read(begin + i * available / count * kErrorBlockTokens, kErrorBlockTokens);
  return sample;
}

TensorD storage_error(const std::vector<float>& x, size_t num_tokens, const HeadGeometry& geometry,
                      const StorageTrial& trial, const ErrorWeights& weights) {
  const size_t num_heads = geometry.num_kv_heads, dim = geometry.head_dim;
  CodecSpec spec = trial.codec;
  spec.head_dim = static_cast<int>(dim);
  const std::unique_ptr<Codec> codec = make_codec(spec);
  OSCAR_CHECK(codec->token_block() == 1, "calibration: codecs that group tokens are not compared");
  TensorD errors({num_heads, (num_tokens + kErrorBlockTokens - 1) / kErrorBlockTokens});
  parallel_for(num_heads, [&](size_t head) {
    const float* rotation = head_matrix(trial.rotation, head);
    const float* mean =
        trial.mean == nullptr || trial.mean->empty() ? nullptr : trial.mean->at(head);
    std::vector<float> rows =
        rotate(gather_head(x.data(), num_tokens, geometry, head, mean), dim, rotation);
    std::vector<uint8_t> encoded(num_tokens * codec->bytes_per_block());
    std::vector<float> decoded(rows.size());
    codec->encode(rows.data(), dim, num_tokens, encoded.data(), nullptr);
    codec->decode(encoded.data(), num_tokens, decoded.data(), dim);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = decoded[i] - rows[i];
    const std::vector<double> squares = weighted_squares(rows, dim, head, rotation, weights);
    for (size_t t = 0; t < num_tokens; ++t) errors.at(head)[t / kErrorBlockTokens] += squares[t];
  });
  return errors;
}

std::vector<double> row_energy(const std::vector<float>& x, size_t num_tokens,
                               const HeadGeometry& geometry, bool centered,
                               const ErrorWeights& weights) {
  const size_t dim = geometry.head_dim;
  std::vector<double> energy(geometry.num_kv_heads);
  parallel_for(geometry.num_kv_heads, [&](size_t head) {
    std::vector<float> mean(dim, 0.0F);
    if (centered) {
      RowSum sum(dim);
      sum.add(head_rows(geometry, x.data(), head, 0, num_tokens));
      const std::vector<double> exact = sum.mean();
      for (size_t d = 0; d < dim; ++d) mean[d] = static_cast<float>(exact[d]);
    }
    const std::vector<float> rows = gather_head(x.data(), num_tokens, geometry, head, mean.data());
    for (const double square : weighted_squares(rows, dim, head, nullptr, weights))
      energy[head] += square;
  });
  return energy;
}

RelativeError relative_error(const TensorD& errors, const std::vector<double>& energy) {
  const size_t num_heads = errors.extent(0), num_blocks = errors.extent(1);
  RelativeError result;
  for (size_t head = 0; head < num_heads; ++head) {
    double sum = 0.0;
    for (size_t b = 0; b < num_blocks; ++b) sum += errors.at(head)[b];
    result.per_head.push_back(energy[head] > 0.0 ? sum / energy[head] : 0.0);
    result.value += result.per_head.back() / static_cast<double>(num_heads);
  }
  return result;
}

PairedDifference paired_difference(const TensorD& a, const TensorD& b,
                                   const std::vector<double>& energy) {
  const size_t num_heads = a.extent(0), num_blocks = a.extent(1);
  std::vector<double> differences(num_blocks, 0.0);
  for (size_t head = 0; head < num_heads; ++head)
    for (size_t i = 0; i < num_blocks && energy[head] > 0.0; ++i)
      differences[i] +=
          (a.at(head)[i] - b.at(head)[i]) / energy[head] / static_cast<double>(num_heads);
  PairedDifference result;
  double sum_sq = 0.0;
  const auto n = static_cast<double>(num_blocks);
  for (const double difference : differences) {
    result.value += difference;
    sum_sq += difference * difference;
  }
  if (num_blocks > 1)
    result.standard_error =
        std::sqrt(std::max(0.0, sum_sq - result.value * result.value / n) * n / (n - 1.0));
  return result;
}

}  // namespace oscar
