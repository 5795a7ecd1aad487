// Attention-weighted metrics of the keys (best_recipe.md, definition 2): M_A and M_O per KV head,
// streamed over sequences.
//
//   M_A = sum a_t q_t^T q_t,  a_t = sum_j p_tj^2
//   M_O = sum w_t q_t^T q_t,  w_t = max(0, a2 - 2 a1 W o_t^T + a0 o_t W o_t^T)
//         a0 = sum_j p^2, a1 = sum_j p^2 v_j, a2 = sum_j p^2 v_j W v_j^T
// over the query heads of the group and tokens t; j only over keys the deployment quantizes, sink
// <= j <= t - recent. W = W_O,q^T W_O,q of the query head.
//
// The weights a_t and w_t are computed in float32 (relative error about 1e-6 for a, 1e-5 for w, see
// the tests) or, for comparisons, in double; the sums are double.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "calib/output_projection.h"
#include "calib/statistics.h"
#include "linalg/moments.h"

namespace oscar {

struct MetricOptions {
  size_t sink = 64, recent = 256;
  bool logit = true;    // M_A
  bool output = false;  // M_O; needs LayerActivations::o and the output energies
  // Scores and sums over keys as products of bf16 operands, where the processor has them: the
  // precision of a forward pass in bf16.
  bool bf16_products = false;
  bool in_double = false;
};

// a_t and w_t of the query rows of one KV head's group [num_tokens * G], tokens [begin, end).
struct MetricWeights {
  std::vector<double> logit, output;  // output empty unless asked for
};

class LayerMetrics {
 public:
  LayerMetrics() = default;
  // energy: of every query head; may be null without MetricOptions::output.
  LayerMetrics(const HeadGeometry& geometry, const MetricOptions& options,
               std::shared_ptr<const OutputEnergy> energy);

  // Queries [begin, end) of the tokens given, keys from the first one on; the sequence must start
  // at position 0 and lse must be given (in_double: it is recomputed).
  void add(const LayerActivations& activations, size_t begin, size_t end);
  void merge(const LayerMetrics& other);

  // Query rows with at least one quantized key; 0 means that every sequence was too short.
  double rows() const { return rows_; }
  // Means over query rows [D, D] of one KV head. Throws Error when no row counted.
  TensorD logit_metric(size_t kv_head) const;
  TensorD output_metric(size_t kv_head) const;

  // The sums [num_kv_heads] to store and to restore; empty = that metric was not asked for. The
  // rows of both must be the same.
  const std::vector<GramSum>& logit_sums() const { return logit_; }
  const std::vector<GramSum>& output_sums() const { return output_; }
  static LayerMetrics from(const HeadGeometry& geometry, const MetricOptions& options,
                           std::vector<GramSum> logit, std::vector<GramSum> output);
  // Goes on adding to stored sums of the same kinds.
  void restore(const LayerMetrics& stored);

 private:
  HeadGeometry geometry_;
  MetricOptions options_;
  std::shared_ptr<const OutputEnergy> energy_;
  std::vector<GramSum> logit_, output_;  // [num_kv_heads]
  double rows_ = 0.0;
};

// The weights alone (for tests): query tokens [begin, end) of one KV head.
MetricWeights metric_weights(const LayerActivations& activations, const HeadGeometry& geometry,
                             const MetricOptions& options, const OutputEnergy* energy,
                             size_t kv_head, size_t begin, size_t end);

}  // namespace oscar
