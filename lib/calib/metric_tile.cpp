#include "calib/metric_tile.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "base/float16.h"
#include "base/parallel.h"
#include "model/attention_kernels.h"

namespace oscar {
namespace {

constexpr size_t kLanes = 16;  // partial sums of a dot product, for the compiler's vectors

// a b^T in float32; the sum has an error of about 2^-24 sqrt(dim / 16) of its terms.
float dot(const float* a, const float* b, size_t dim) {
  std::array<float, kLanes> sum{};
  size_t d = 0;
  for (; d + kLanes <= dim; d += kLanes)
    for (size_t i = 0; i < kLanes; ++i) sum[i] += a[d + i] * b[d + i];
  for (; d < dim; ++d) sum[0] += a[d] * b[d];
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) sum[i] += sum[i + half];
  return sum[0];
}

// max(0, a2 - 2 a1 W o^T + a0 o W o^T) = a2 - (2 a1 - a0 o) W o^T, given W o^T.
double output_weight(double a0, const float* a1, double a2, const float* o, const float* w_o,
                     size_t dim) {
  std::array<double, 8> sum{};
  size_t d = 0;
  const auto term = [&](size_t i) {
    return (2.0 * static_cast<double>(a1[i]) - a0 * static_cast<double>(o[i])) *
           static_cast<double>(w_o[i]);
  };
  for (; d + sum.size() <= dim; d += sum.size())
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += term(d + i);
  for (; d < dim; ++d) sum[0] += term(d);
  double total = 0.0;
  for (const double part : sum) total += part;
  return std::max(0.0, a2 - total);
}

// Rows of float32 [64, width] -> pairs of rows in bf16 [32, width].
void pair_rows(const float* rows, size_t width, uint32_t* pairs) {
  for (size_t j = 0; j < kKeyBlock / 2; ++j, rows += 2 * width, pairs += width)
    for (size_t d = 0; d < width; ++d)
      pairs[d] = static_cast<uint32_t>(float_to_bf16(rows[d])) |
                 static_cast<uint32_t>(float_to_bf16(rows[width + d])) << 16;
}

// Keys of one block, a row `stride` floats -> pairs of dimensions [D / 2, 64].
void pair_keys(const float* k, size_t stride, size_t count, size_t dim, uint32_t* panel) {
  for (size_t j = 0; j < count; ++j)
    for (size_t d = 0; d < dim / 2; ++d)
      panel[d * kKeyBlock + j] = static_cast<uint32_t>(float_to_bf16(k[j * stride + 2 * d])) |
                                 static_cast<uint32_t>(float_to_bf16(k[j * stride + 2 * d + 1]))
                                     << 16;
}

// Where the columns of a value row begin.
struct ValueColumns {
  size_t form, remainder, one;
  ValueColumns(size_t dim, size_t group)
      : form(dim), remainder(dim + group), one(dim + 2 * group) {}
};

// One block of value rows; `projected` [64, G * key_width] is scratch.
void value_rows(const MetricHead& head, const HeadGeometry& geometry, const float* v, size_t count,
                float* projected, float* rows) {
  const size_t dim = geometry.head_dim, group = geometry.group_size();
  const size_t stride = geometry.num_kv_heads * dim, energy_width = group * head.key_width;
  const ValueColumns columns(dim, group);
  attention_kernels().gemm(count, energy_width, dim, v, stride, head.energy.data(), energy_width,
                           projected, energy_width, false);
  for (size_t j = 0; j < count; ++j, v += stride, rows += head.value_width) {
    std::copy_n(v, dim, rows);
    for (size_t g = 0; g < group; ++g) {
      const float form = dot(v, projected + j * energy_width + g * head.key_width, dim);
      rows[columns.form + g] = head.pairs ? round_to_bf16(form) : form;
      rows[columns.remainder + g] = form - rows[columns.form + g];
    }
    rows[columns.one] = 1.0F;
  }
}

struct Scratch {
  AlignedVector<float> queries, scores, out, projected;
  AlignedVector<uint32_t> query_pairs, weight_pairs;
  std::vector<float> start, max, sum;
  std::vector<uint32_t> visible;
};

// Squared softmax weights 2^(2 (s - lse) log2 e) of the tile's rows, summed block by block. The
// online softmax does it: with the running maximum preset to 2 lse log2(e) its weights are p^2.
// Row = token * G + head of the group.
class Tile {
 public:
  Tile(const LayerActivations& a, const HeadGeometry& geometry, const MetricOptions& options,
       const MetricHead& head, size_t first_token, size_t num_tokens, Scratch& scratch)
      : head_(head),
        options_(options),
        group_(geometry.group_size()),
        dim_(geometry.head_dim),
        first_token_(first_token),
        rows_(num_tokens * group_),
        factor_(2.0F * std::numbers::log2e_v<float> / std::sqrt(static_cast<float>(dim_))),
        s_(scratch) {
    s_.scores.resize(rows_ * kKeyBlock);
    s_.out.assign(rows_ * head.value_width, 0.0F);
    s_.sum.assign(rows_, 0.0F);
    s_.visible.resize(rows_);
    s_.start.resize(rows_);
    const size_t stride = geometry.num_heads * dim_;
    const float* q = a.q + first_token * stride + head.kv_head * group_ * dim_;
    if (head.pairs) {
      s_.query_pairs.resize(rows_ * dim_ / 2);
      s_.weight_pairs.resize(rows_ * kKeyBlock / 2);
    } else {
      s_.queries.assign(rows_ * head.key_width, 0.0F);
    }
    for (size_t t = 0; t < num_tokens; ++t, q += stride) {
      for (size_t g = 0; g < group_; ++g)
        s_.start[t * group_ + g] =
            2.0F * std::numbers::log2e_v<float> *
            a.lse[(first_token + t) * geometry.num_heads + head.kv_head * group_ + g];
      if (head.pairs) {
        pair_kernels()->round(group_, dim_, q, dim_, s_.query_pairs.data() + t * group_ * dim_ / 2,
                              dim_ / 2);
        continue;
      }
      for (size_t g = 0; g < group_; ++g)
        for (size_t d = 0; d < dim_; ++d)
          s_.queries[(t * group_ + g) * head.key_width + d] = q[g * dim_ + d] * factor_;
    }
    s_.max = s_.start;
  }

  void run() {
    const size_t most = visible_keys(options_, first_token_ + rows_ / group_ - 1);
    for (size_t b = 0; b * kKeyBlock < most; ++b) {
      for (size_t r = 0; r < rows_; ++r) {
        const size_t keys = visible_keys(options_, first_token_ + r / group_);
        s_.visible[r] = static_cast<uint32_t>(
            keys > b * kKeyBlock ? std::min(kKeyBlock, keys - b * kKeyBlock) : 0);
      }
      score(b);
      attention_kernels().softmax({.num_rows = rows_,
                                   .width = kKeyBlock,
                                   .scores = s_.scores.data(),
                                   .num_visible = s_.visible.data(),
                                   .max_score = s_.max.data(),
                                   .sum = s_.sum.data(),
                                   .out = s_.out.data(),
                                   .out_width = head_.value_width});
      if (head_.value_width > 0) accumulate(b);
    }
  }

  // Undoes what a maximum raised by rounding did to the sums.
  double correction(size_t row) const {
    return std::exp2(static_cast<double>(s_.max[row]) - static_cast<double>(s_.start[row]));
  }
  double sum(size_t row) const { return static_cast<double>(s_.sum[row]) * correction(row); }
  const float* out(size_t row) const { return s_.out.data() + row * head_.value_width; }

 private:
  void score(size_t block) {
    if (head_.pairs) {
      pair_kernels()->gemm(rows_, kKeyBlock, dim_ / 2, s_.query_pairs.data(), dim_ / 2,
                           head_.key_pairs.data() + block * dim_ / 2 * kKeyBlock, kKeyBlock,
                           factor_, s_.scores.data(), kKeyBlock, false);
      return;
    }
    attention_kernels().gemm(rows_, kKeyBlock, head_.key_width, s_.queries.data(), head_.key_width,
                             head_.keys.data() + block * head_.key_width * kKeyBlock, kKeyBlock,
                             s_.scores.data(), kKeyBlock, false);
  }

  void accumulate(size_t block) {
    const size_t width = head_.value_width;
    if (head_.pairs) {
      pair_kernels()->round(rows_, kKeyBlock, s_.scores.data(), kKeyBlock, s_.weight_pairs.data(),
                            kKeyBlock / 2);
      pair_kernels()->gemm(rows_, width, kKeyBlock / 2, s_.weight_pairs.data(), kKeyBlock / 2,
                           head_.value_pairs.data() + block * kKeyBlock / 2 * width, width, 1.0F,
                           s_.out.data(), width, true);
      return;
    }
    attention_kernels().gemm(rows_, width, kKeyBlock, s_.scores.data(), kKeyBlock,
                             head_.values.data() + block * kKeyBlock * width, width, s_.out.data(),
                             width, true);
  }

  const MetricHead& head_;
  const MetricOptions& options_;
  size_t group_, dim_, first_token_, rows_;
  float factor_;
  Scratch& s_;
};

}  // namespace

void MetricHead::prepare(const LayerActivations& a, const HeadGeometry& geometry,
                         const MetricOptions& options, const OutputEnergy* energies, size_t which,
                         size_t end) {
  const size_t dim = geometry.head_dim, group = geometry.group_size();
  const size_t stride = geometry.num_kv_heads * dim;
  kv_head = which;
  num_keys = end - options.recent - options.sink;
  num_blocks = (num_keys + kKeyBlock - 1) / kKeyBlock;
  key_width = padded_width(dim);
  pairs = options.bf16_products && pair_kernels() != nullptr && key_width == dim;
  if (pairs)
    key_pairs.resize(num_blocks * dim / 2 * kKeyBlock);
  else
    keys.resize(num_blocks * key_width * kKeyBlock);
  value_width = options.output ? padded_width(dim + 2 * group + 1) : 0;
  if (options.output) {
    energy.assign(dim * group * key_width, 0.0F);
    for (size_t g = 0; g < group; ++g)
      for (size_t i = 0; i < dim; ++i)
        for (size_t d = 0; d < dim; ++d)
          energy[(i * group + g) * key_width + d] =
              static_cast<float>((*energies)[kv_head * group + g].values[i * dim + d]);
    if (pairs)
      value_pairs.resize(num_blocks * kKeyBlock / 2 * value_width);
    else
      values.resize(num_blocks * kKeyBlock * value_width);
  }
  const float* k = a.k + options.sink * stride + kv_head * dim;
  const float* v = a.v + options.sink * stride + kv_head * dim;
  parallel_for(num_blocks, [&](size_t b) {
    const size_t first = b * kKeyBlock, count = std::min(kKeyBlock, num_keys - first);
    if (pairs)
      pair_keys(k + first * stride, stride, count, dim, key_pairs.data() + first * dim / 2);
    else
      attention_kernels().transpose(k + first * stride, stride, count, dim,
                                    keys.data() + first * key_width);
    if (value_width == 0) return;
    thread_local AlignedVector<float> projected, rows;
    projected.resize(kKeyBlock * group * key_width);
    if (!pairs) {
      value_rows(*this, geometry, v + first * stride, count, projected.data(),
                 values.data() + first * value_width);
      return;
    }
    rows.assign(kKeyBlock * value_width, 0.0F);
    value_rows(*this, geometry, v + first * stride, count, projected.data(), rows.data());
    pair_rows(rows.data(), value_width, value_pairs.data() + first / 2 * value_width);
  });
}

void metric_tile(const LayerActivations& a, const HeadGeometry& geometry,
                 const MetricOptions& options, const MetricHead& head, size_t first_token,
                 size_t num_tokens, double* logit, double* output) {
  const size_t dim = geometry.head_dim, group = geometry.group_size();
  thread_local Scratch scratch;
  Tile tile(a, geometry, options, head, first_token, num_tokens, scratch);
  tile.run();
  for (size_t r = 0; r < num_tokens * group; ++r) logit[r] = tile.sum(r);
  if (!options.output) return;
  const ValueColumns columns(dim, group);
  const size_t energy_width = group * head.key_width;
  scratch.projected.resize(num_tokens * head.key_width);
  for (size_t g = 0; g < group; ++g) {
    const size_t stride = geometry.num_heads * dim;
    const float* o = a.o + first_token * stride + (head.kv_head * group + g) * dim;
    attention_kernels().gemm(num_tokens, head.key_width, dim, o, stride,
                             head.energy.data() + g * head.key_width, energy_width,
                             scratch.projected.data(), head.key_width, false);
    for (size_t i = 0; i < num_tokens; ++i) {
      const size_t r = i * group + g;
      const float* sums = tile.out(r);
      const double a2 = static_cast<double>(sums[columns.form + g]) +
                        static_cast<double>(sums[columns.remainder + g]);
      output[r] = tile.correction(r) *
                  output_weight(static_cast<double>(sums[columns.one]), sums, a2, o + i * stride,
                                scratch.projected.data() + i * head.key_width, dim);
    }
  }
}

}  // namespace oscar
