// The three sums over quantized keys behind the attention metrics, a0 = sum p^2, a1 = sum p^2 v and
// a2 = sum p^2 v W v^T (attention_metrics.h), for the queries of one KV head: tile by tile, in
// float32 or with products of bf16 operands.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/aligned.h"
#include "calib/attention_metrics.h"

namespace oscar {

// Query tokens of one work item: scores, weights and sums of a group of 3 stay in the first-level
// cache.
inline constexpr size_t kMetricTileTokens = 16;

// Keys of the quantized range that the query at position t sees.
inline size_t visible_keys(const MetricOptions& options, size_t t) {
  const size_t first = options.sink + options.recent;
  return t >= first ? t - first + 1 : 0;
}

// Keys and values of one KV head in blocks of 64 counted from the sink, and the output energies of
// its query heads. Can be prepared again for another head: stale rows are finite and get the weight
// 0.
struct MetricHead {
  size_t kv_head = 0, num_keys = 0, num_blocks = 0;
  bool pairs = false;  // operands in bf16 (PairKernels)
  size_t key_width = 0, value_width = 0;
  AlignedVector<float> keys;          // [num_blocks][key_width, 64]
  AlignedVector<uint32_t> key_pairs;  // [num_blocks][D / 2, 64]
  // A row holds v, u_g = v W_g v^T of the G query heads rounded as the rows are, what the rounding
  // of u_g left, 1 and zeros: with bf16 operands all three sums then have the same weights, so that
  // nothing is lost where a2 - 2 a1 W o^T + a0 o W o^T cancels.
  AlignedVector<float> values;          // [num_blocks * 64, value_width]
  AlignedVector<uint32_t> value_pairs;  // [num_blocks * 32, value_width], pairs of rows
  AlignedVector<float> energy;          // [D, G * key_width]: the W_g side by side

  void prepare(const LayerActivations& activations, const HeadGeometry& geometry,
               const MetricOptions& options, const OutputEnergy* energies, size_t head, size_t end);
};

// a_t and w_t [num_tokens * G] of query tokens [first_token, first_token + num_tokens), at most
// kMetricTileTokens; output not used unless MetricOptions::output.
void metric_tile(const LayerActivations& activations, const HeadGeometry& geometry,
                 const MetricOptions& options, const MetricHead& head, size_t first_token,
                 size_t num_tokens, double* logit, double* output);

}  // namespace oscar
