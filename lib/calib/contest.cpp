#include "calib/contest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "linalg/blas.h"
#include "quant/int2_format.h"
#include "quant/metadata.h"

namespace oscar {
namespace {

constexpr size_t kFewestQueries = 16;

std::vector<float> head_matrix(const std::vector<float>& x, size_t num_tokens, size_t heads,
                               size_t head, size_t dim) {
  std::vector<float> rows(num_tokens * dim);
  for (size_t t = 0; t < num_tokens; ++t)
    std::copy_n(x.data() + (t * heads + head) * dim, dim, rows.data() + t * dim);
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

// softmax of scores[0, visible) into weights, zeros behind.
void softmax_row(const float* scores, size_t visible, size_t num_tokens, float* weights) {
  const float largest = *std::max_element(scores, scores + visible);
  double total = 0.0;
  for (size_t j = 0; j < visible; ++j) {
    weights[j] = std::exp(scores[j] - largest);
    total += static_cast<double>(weights[j]);
  }
  const auto factor = static_cast<float>(1.0 / total);
  for (size_t j = 0; j < visible; ++j) weights[j] *= factor;
  std::fill(weights + visible, weights + num_tokens, 0.0F);
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
    : contest_(contest), energy_(energy), kv_head_(kv_head) {
  const HeadGeometry& geometry = contest.geometry;
  const size_t dim = geometry.head_dim, group = geometry.group_size();
  const size_t num_tokens = contest.num_tokens;
  num_rows_ = contest.query_tokens.size() * group;
  keys_ = head_matrix(contest.k, num_tokens, geometry.num_kv_heads, kv_head, dim);
  values_ = head_matrix(contest.v, num_tokens, geometry.num_kv_heads, kv_head, dim);
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  queries_.resize(num_rows_ * dim);
  for (size_t r = 0; r < num_rows_; ++r)
    for (size_t d = 0; d < dim; ++d)
      queries_[r * dim + d] =
          scale *
          contest.q[(r / group * geometry.num_heads + kv_head * group + r % group) * dim + d];
  scores_.resize(num_rows_ * num_tokens);
  weights_.resize(scores_.size());
  blas::multiply_transposed(queries_.data(), dim, keys_.data(), dim, num_rows_, num_tokens, dim,
                            1.0F, scores_.data(), num_tokens);
  for (size_t r = 0; r < num_rows_; ++r)
    softmax_row(scores_.data() + r * num_tokens, contest.query_tokens[r / group] + 1, num_tokens,
                weights_.data() + r * num_tokens);
  outputs_.resize(num_rows_ * dim);
  blas::multiply(weights_.data(), num_tokens, values_.data(), dim, num_rows_, dim, num_tokens, 0.0F,
                 outputs_.data(), dim);
  for (const double value : energies(outputs_)) output_energy_ += value;
}

size_t HeadContest::quantized_end(size_t row) const {
  const size_t token = contest_.query_tokens[row / contest_.geometry.group_size()];
  return token + 1 - contest_.options.recent;
}

// e W e^T of every row, summed over the heads of a query token.
std::vector<double> HeadContest::energies(const std::vector<float>& difference) const {
  const size_t dim = contest_.geometry.head_dim, group = contest_.geometry.group_size();
  std::vector<double> result(num_rows_ / group, 0.0), forms(num_rows_ / group);
  for (size_t g = 0; g < group; ++g) {
    quadratic_forms({difference.data() + g * dim, num_rows_ / group, group * dim, 1},
                    energy_[kv_head_ * group + g], forms.data());
    for (size_t i = 0; i < result.size(); ++i) result[i] += forms[i];
  }
  return result;
}

// x^ - x of tokens [sink, last quantized) in the model's coordinates, [num_tokens, D], zero
// elsewhere.
std::vector<float> HeadContest::stored_error(const std::vector<float>& rows, const StoredForm& form,
                                             double* largest_scale) const {
  const size_t dim = contest_.geometry.head_dim, first = contest_.options.sink;
  const size_t count = quantized_end(num_rows_ - 1) - first;
  std::vector<float> x(rows.begin() + static_cast<std::ptrdiff_t>(first * dim),
                       rows.begin() + static_cast<std::ptrdiff_t>((first + count) * dim));
  for (size_t i = 0; i < x.size() && form.mean != nullptr; ++i) x[i] -= form.mean[i % dim];
  for (size_t i = 0; i < x.size() && form.position_rows != nullptr; ++i)
    x[i] -= form.position_rows[first * dim + i];
  std::vector<float> rotated = x;
  if (form.rotation != nullptr)
    blas::multiply(x.data(), dim, form.rotation, dim, count, dim, dim, 0.0F, rotated.data(), dim);
  CodecSpec spec = form.codec;
  spec.head_dim = static_cast<int>(dim);
  const std::unique_ptr<Codec> codec = make_codec(spec, form.metric);
  std::vector<uint8_t> encoded(count * codec->bytes_per_block());
  codec->encode(rotated.data(), dim, count, encoded.data(), nullptr);
  codec->decode(encoded.data(), count, x.data(), dim);
  *largest_scale = largest_stored_scale(spec, encoded, count);
  for (size_t i = 0; i < x.size(); ++i) rotated[i] = x[i] - rotated[i];
  std::vector<float> error(contest_.num_tokens * dim, 0.0F);
  float* target = error.data() + first * dim;
  if (form.rotation == nullptr)
    std::copy(rotated.begin(), rotated.end(), target);
  else
    blas::multiply_transposed(rotated.data(), dim, form.rotation, dim, count, dim, dim, 1.0F,
                              target, dim);
  return error;
}

ContestError HeadContest::value_error(const StoredForm& form) const {
  const size_t dim = contest_.geometry.head_dim, num_tokens = contest_.num_tokens;
  ContestError result;
  const std::vector<float> error = stored_error(values_, form, &result.largest_scale);
  std::vector<float> weights = weights_;
  for (size_t r = 0; r < num_rows_; ++r)
    std::fill(weights.data() + r * num_tokens + quantized_end(r),
              weights.data() + (r + 1) * num_tokens, 0.0F);
  std::vector<float> difference(num_rows_ * dim);
  blas::multiply(weights.data(), num_tokens, error.data(), dim, num_rows_, dim, num_tokens, 0.0F,
                 difference.data(), dim);
  result.per_query = energies(difference);
  return result;
}

ContestError HeadContest::key_error(const StoredForm& form) const {
  const size_t dim = contest_.geometry.head_dim, num_tokens = contest_.num_tokens;
  const size_t group = contest_.geometry.group_size();
  ContestError result;
  const std::vector<float> error = stored_error(keys_, form, &result.largest_scale);
  std::vector<float> scores(scores_.size());
  blas::multiply_transposed(queries_.data(), dim, error.data(), dim, num_rows_, num_tokens, dim,
                            1.0F, scores.data(), num_tokens);
  for (size_t r = 0; r < num_rows_; ++r) {
    float* row = scores.data() + r * num_tokens;
    const size_t end = quantized_end(r);
    for (size_t j = 0; j < num_tokens; ++j)
      row[j] = scores_[r * num_tokens + j] + (j < end ? row[j] : 0.0F);
    softmax_row(row, contest_.query_tokens[r / group] + 1, num_tokens, row);
  }
  std::vector<float> difference(num_rows_ * dim);
  blas::multiply(scores.data(), num_tokens, values_.data(), dim, num_rows_, dim, num_tokens, 0.0F,
                 difference.data(), dim);
  for (size_t i = 0; i < difference.size(); ++i) difference[i] -= outputs_[i];
  result.per_query = energies(difference);
  return result;
}

}  // namespace oscar
