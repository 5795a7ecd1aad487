#include "calib/contest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "base/error.h"
#include "linalg/blas.h"
#include "quant/int2_format.h"
#include "quant/metadata.h"

namespace oscar {
namespace {

constexpr size_t kFewestQueries = 16;

// Query rows of one pass: their scores and outputs stay in the second-level cache.
constexpr size_t kTileRows = 48;

// Rows of one head, [num_blocks * 64, width], zeros behind.
AlignedVector<float> head_rows_padded(const std::vector<float>& x, size_t num_tokens, size_t heads,
                                      size_t head, size_t dim) {
  const size_t width = padded_width(dim);
  AlignedVector<float> rows((num_tokens + kKeyBlock - 1) / kKeyBlock * kKeyBlock * width, 0.0F);
  for (size_t t = 0; t < num_tokens; ++t)
    std::copy_n(x.data() + (t * heads + head) * dim, dim, rows.data() + t * width);
  return rows;
}

// [D, D] -> [D, width].
AlignedVector<float> padded(const float* matrix, size_t dim) {
  const size_t width = padded_width(dim);
  AlignedVector<float> rows(dim * width, 0.0F);
  for (size_t i = 0; i < dim; ++i) std::copy_n(matrix + i * dim, dim, rows.data() + i * width);
  return rows;
}

double largest_stored_scale(const CodecSpec& spec, const std::vector<uint8_t>& encoded,
                            size_t num_rows) {
  const int group = spec.group == 0 ? spec.head_dim : spec.group;
  const RowFormat format{spec.head_dim, group, spec.bits, spec.meta, spec.order};
  const MetaRule rule = make_meta_rule(spec);
  double largest = 0.0;
  for (size_t r = 0; r < num_rows; ++r)
    for (int g = 0; g < format.num_groups(); ++g)
      largest = std::max(
          largest, static_cast<double>(read_pair(rule, encoded.data() + r * format.row_bytes() +
                                                           format.pair_offset(g))
                                           .scale));
  return largest;
}

}  // namespace

double ContestError::sum() const {
  return std::accumulate(per_query.begin(), per_query.end(), 0.0);
}

ContestData contest_data(const ActivationRows& rows, const HeadGeometry& geometry, size_t layer,
                         const std::vector<size_t>& sequence_offsets, size_t first_query_token,
                         const ContestOptions& options) {
  ContestData data;
  data.geometry = geometry;
  data.options = options;
  size_t best_begin = 0, best_first = 0, best_length = 0;
  for (size_t s = 0; s + 1 < sequence_offsets.size(); ++s) {
    const size_t begin = sequence_offsets[s];
    const size_t length = std::min(sequence_offsets[s + 1] - begin, options.max_sequence);
    const size_t first = std::max(first_query_token > begin ? first_query_token - begin : 0,
                                  options.sink + options.recent);
    if (first + kFewestQueries > length || length <= best_length) continue;
    best_begin = begin;
    best_first = first;
    best_length = length;
  }
  if (best_length == 0) return data;
  const size_t dim = geometry.head_dim;
  data.num_tokens = best_length;
  data.k.resize(best_length * geometry.num_kv_heads * dim);
  data.v.resize(data.k.size());
  rows.read(layer, CaptureTensor::kK, best_begin, best_begin + best_length, data.k.data());
  rows.read(layer, CaptureTensor::kV, best_begin, best_begin + best_length, data.v.data());
  const size_t available = best_length - best_first;
  const size_t count = std::min(available, options.num_queries);
  data.q.resize(count * geometry.num_heads * dim);
  for (size_t i = 0; i < count; ++i) {
    const size_t token = best_first + (i + 1) * available / count - 1;
    data.query_tokens.push_back(token);
    rows.read(layer, CaptureTensor::kQ, best_begin + token, best_begin + token + 1,
              data.q.data() + i * geometry.num_heads * dim);
  }
  return data;
}

HeadContest::HeadContest(const ContestData& contest, const OutputEnergy& energy, size_t kv_head)
    : contest_(contest),
      energy_(energy),
      kv_head_(kv_head),
      dim_(contest.geometry.head_dim),
      width_(padded_width(dim_)),
      num_rows_(contest.query_tokens.size() * contest.geometry.group_size()),
      num_blocks_((contest.num_tokens + kKeyBlock - 1) / kKeyBlock) {
  const HeadGeometry& geometry = contest.geometry;
  const size_t group = geometry.group_size(), num_tokens = contest.num_tokens;
  keys_ = head_rows_padded(contest.k, num_tokens, geometry.num_kv_heads, kv_head, dim_);
  values_ = head_rows_padded(contest.v, num_tokens, geometry.num_kv_heads, kv_head, dim_);
  const float scale = std::numbers::log2e_v<float> / std::sqrt(static_cast<float>(dim_));
  queries_.resize(num_rows_ * width_, 0.0F);
  for (size_t r = 0; r < num_rows_; ++r)
    for (size_t d = 0; d < dim_; ++d)
      queries_[r * width_ + d] =
          scale *
          contest.q[(r / group * geometry.num_heads + kv_head * group + r % group) * dim_ + d];
  scores_.resize(num_blocks_ * num_rows_ * kKeyBlock);
  AlignedVector<float> panel(width_ * kKeyBlock);
  const AttentionKernels& kernels = attention_kernels();
  for (size_t b = 0; b < num_blocks_; ++b) {
    kernels.transpose(keys_.data() + b * kKeyBlock * width_, width_, kKeyBlock, width_,
                      panel.data());
    kernels.gemm(num_rows_, kKeyBlock, width_, queries_.data(), width_, panel.data(), kKeyBlock,
                 scores_.data() + b * num_rows_ * kKeyBlock, kKeyBlock, false);
  }
  Attention exact = attend(nullptr, nullptr);
  outputs_ = exact.out;
  for (const double value : energies(outputs_)) output_energy_ += value;

  // With the maximum preset to the log-sum-exp the weights of the online softmax are normalised.
  weights_ = scores_;
  AlignedVector<float>& log_sum = exact.max;
  for (size_t r = 0; r < num_rows_; ++r) log_sum[r] += std::log2(exact.sum[r]);
  std::vector<uint32_t> visible(num_rows_);
  for (size_t b = 0; b < num_blocks_; ++b) {
    for (size_t r = 0; r < num_rows_; ++r)
      visible[r] = static_cast<uint32_t>(
          std::clamp(quantized_end(r), b * kKeyBlock, (b + 1) * kKeyBlock) - b * kKeyBlock);
    kernels.softmax({.num_rows = num_rows_,
                     .width = kKeyBlock,
                     .scores = weights_.data() + b * num_rows_ * kKeyBlock,
                     .num_visible = visible.data(),
                     .max_score = log_sum.data(),
                     .sum = exact.sum.data(),
                     .out = nullptr,
                     .out_width = 0});
  }
}

size_t HeadContest::token(size_t row) const {
  return contest_.query_tokens[row / contest_.geometry.group_size()];
}

size_t HeadContest::quantized_end(size_t row) const {
  return token(row) + 1 - contest_.options.recent;
}

size_t HeadContest::first_row_past(size_t key, bool quantized) const {
  size_t row = 0;
  while (row < num_rows_ && (quantized ? quantized_end(row) : token(row) + 1) <= key) ++row;
  return row;
}

// scores [rows first_row .. end_row, 64] += queries * errors, each row up to its quantized end.
void HeadContest::add_key_errors(size_t block, size_t first_row, size_t end_row, const float* panel,
                                 const float* queries, float* scores) const {
  const AttentionKernels& kernels = attention_kernels();
  const size_t begin = block * kKeyBlock;
  const size_t some = std::clamp(first_row_past(begin, true), first_row, end_row);
  const size_t all = std::clamp(first_row_past(begin + kKeyBlock - 1, true), some, end_row);
  float* target = scores + (some - first_row) * kKeyBlock;
  if (some < all) {  // the quantized range of these rows ends within the block
    AlignedVector<float> added((all - some) * kKeyBlock);
    kernels.gemm(all - some, kKeyBlock, width_, queries + some * width_, width_, panel, kKeyBlock,
                 added.data(), kKeyBlock, false);
    for (size_t r = some; r < all; ++r)
      for (size_t j = 0; j < quantized_end(r) - begin; ++j)
        target[(r - some) * kKeyBlock + j] += added[(r - some) * kKeyBlock + j];
  }
  kernels.gemm(end_row - all, kKeyBlock, width_, queries + all * width_, width_, panel, kKeyBlock,
               scores + (all - first_row) * kKeyBlock, kKeyBlock, true);
}

// Attention of all rows, the quantized keys changed by key_errors [num_blocks * 64, width] in the
// coordinates of `queries` (null: not changed).
HeadContest::Attention HeadContest::attend(const float* key_errors, const float* queries) const {
  const AttentionKernels& kernels = attention_kernels();
  Attention state;
  state.max.assign(num_rows_, -std::numeric_limits<float>::infinity());
  state.sum.assign(num_rows_, 0.0F);
  state.out.assign(num_rows_ * width_, 0.0F);
  AlignedVector<float> panel(width_ * kKeyBlock), scores(kTileRows * kKeyBlock);
  std::vector<uint32_t> visible(kTileRows);
  const size_t first_quantized = contest_.options.sink,
               end_quantized = quantized_end(num_rows_ - 1);
  for (size_t b = 0; b < num_blocks_; ++b) {
    const size_t begin = b * kKeyBlock;
    const bool changed =
        key_errors != nullptr && begin < end_quantized && begin + kKeyBlock > first_quantized;
    if (changed)
      kernels.transpose(key_errors + begin * width_, width_, kKeyBlock, width_, panel.data());
    for (size_t first = first_row_past(begin, false); first < num_rows_; first += kTileRows) {
      const size_t count = std::min(kTileRows, num_rows_ - first);
      std::copy_n(block_scores(b) + first * kKeyBlock, count * kKeyBlock, scores.data());
      if (changed) add_key_errors(b, first, first + count, panel.data(), queries, scores.data());
      for (size_t r = 0; r < count; ++r)
        visible[r] = static_cast<uint32_t>(std::min(kKeyBlock, token(first + r) + 1 - begin));
      kernels.softmax({.num_rows = count,
                       .width = kKeyBlock,
                       .scores = scores.data(),
                       .num_visible = visible.data(),
                       .max_score = state.max.data() + first,
                       .sum = state.sum.data() + first,
                       .out = state.out.data() + first * width_,
                       .out_width = width_});
      kernels.gemm(count, width_, kKeyBlock, scores.data(), kKeyBlock,
                   values_.data() + begin * width_, width_, state.out.data() + first * width_,
                   width_, true);
    }
  }
  for (size_t r = 0; r < num_rows_; ++r)
    for (size_t d = 0; d < width_; ++d) state.out[r * width_ + d] /= state.sum[r];
  return state;
}

// e W e^T of every row, summed over the heads of a query token.
std::vector<double> HeadContest::energies(const AlignedVector<float>& difference) const {
  const size_t group = contest_.geometry.group_size(), queries = num_rows_ / group;
  std::vector<double> result(queries, 0.0), forms(queries);
  std::vector<float> rows(queries * dim_);
  for (size_t g = 0; g < group; ++g) {
    for (size_t i = 0; i < queries; ++i)
      std::copy_n(difference.data() + (i * group + g) * width_, dim_, rows.data() + i * dim_);
    quadratic_forms({rows.data(), queries, dim_, 1}, energy_[kv_head_ * group + g], forms.data());
    for (size_t i = 0; i < queries; ++i) result[i] += forms[i];
  }
  return result;
}

// x^ - x of tokens [sink, last quantized) in the coordinates of the rotation, zero elsewhere,
// [num_blocks * 64, width].
AlignedVector<float> HeadContest::stored_error(const AlignedVector<float>& rows,
                                               const StoredForm& form,
                                               double* largest_scale) const {
  const size_t first = contest_.options.sink, count = quantized_end(num_rows_ - 1) - first;
  AlignedVector<float> x(count * dim_), error(rows.size(), 0.0F);
  for (size_t t = 0; t < count; ++t) {
    float* row = x.data() + t * dim_;
    std::copy_n(rows.data() + (first + t) * width_, dim_, row);
    if (form.mean != nullptr)
      for (size_t d = 0; d < dim_; ++d) row[d] -= form.mean[d];
    if (form.position_rows != nullptr)
      for (size_t d = 0; d < dim_; ++d) row[d] -= form.position_rows[(first + t) * dim_ + d];
  }
  float* rotated = error.data() + first * width_;
  if (form.rotation == nullptr) {
    for (size_t t = 0; t < count; ++t) std::copy_n(x.data() + t * dim_, dim_, rotated + t * width_);
  } else {
    attention_kernels().gemm(count, width_, dim_, x.data(), dim_,
                             padded(form.rotation, dim_).data(), width_, rotated, width_, false);
  }
  CodecSpec spec = form.codec;
  spec.head_dim = static_cast<int>(dim_);
  const std::unique_ptr<Codec> codec = make_codec(spec, form.metric);
  std::vector<uint8_t> encoded(count * codec->bytes_per_block());
  codec->encode(rotated, width_, count, encoded.data(), nullptr);
  codec->decode(encoded.data(), count, x.data(), dim_);
  *largest_scale = largest_stored_scale(spec, encoded, count);
  for (size_t t = 0; t < count; ++t)
    for (size_t d = 0; d < dim_; ++d)
      rotated[t * width_ + d] = x[t * dim_ + d] - rotated[t * width_ + d];
  return error;
}

ContestError HeadContest::value_error(const StoredForm& form) const {
  ContestError result;
  const AlignedVector<float> error = stored_error(values_, form, &result.largest_scale);
  AlignedVector<float> difference(num_rows_ * width_, 0.0F);
  for (size_t b = 0; b < num_blocks_; ++b) {
    const size_t first = first_row_past(b * kKeyBlock, true);
    attention_kernels().gemm(num_rows_ - first, width_, kKeyBlock,
                             weights_.data() + (b * num_rows_ + first) * kKeyBlock, kKeyBlock,
                             error.data() + b * kKeyBlock * width_, width_,
                             difference.data() + first * width_, width_, true);
  }
  if (form.rotation != nullptr) {
    const AlignedVector<float> rotated = difference;
    blas::multiply_transposed(rotated.data(), width_, form.rotation, dim_, num_rows_, dim_, dim_,
                              1.0F, difference.data(), width_);
  }
  result.per_query = energies(difference);
  return result;
}

ContestError HeadContest::key_error(const StoredForm& form) const {
  ContestError result;
  const AlignedVector<float> error = stored_error(keys_, form, &result.largest_scale);
  AlignedVector<float> queries = queries_;
  if (form.rotation != nullptr)
    attention_kernels().gemm(num_rows_, width_, dim_, queries_.data(), width_,
                             padded(form.rotation, dim_).data(), width_, queries.data(), width_,
                             false);
  AlignedVector<float> difference = attend(error.data(), queries.data()).out;
  for (size_t i = 0; i < difference.size(); ++i) difference[i] -= outputs_[i];
  result.per_query = energies(difference);
  return result;
}

}  // namespace oscar
