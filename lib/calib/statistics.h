// What one decoder layer's activations leave behind for calibration: second moments of queries,
// keys, values and attention outputs per KV head, and means of keys and values. Streamed,
// mergeable, double.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "linalg/moments.h"
#include "model/rope.h"
#include "model/transformer.h"

namespace oscar {

struct HeadGeometry {
  size_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  size_t group_size() const { return num_heads / num_kv_heads; }
};

struct StatisticsOptions {
  bool outputs = true;  // O^T O, the exact C_S; needs LayerActivations::o
  // First position that enters the means: the sink tokens before it stay in high precision.
  size_t mean_from_position = 64;
  // Of all positions; null = unknown RoPE, no mean of the keys before it.
  std::shared_ptr<const RopeTable> rope = nullptr;
};

// Moments of one KV head; `queries` and `outputs` take the rows of every query head of its group.
struct HeadStatistics {
  GramSum queries, keys, values, outputs;
  RowSum key_mean, value_mean;  // positions >= mean_from_position only
  RowSum key_position_mean;     // the same of keys turned back by their position; needs the RoPE
};

class LayerStatistics {
 public:
  LayerStatistics() = default;
  LayerStatistics(const HeadGeometry& geometry, const StatisticsOptions& options);

  // Adds tokens [begin, end) of the new tokens of `activations`; heads run in parallel.
  void add(const LayerActivations& activations, size_t begin, size_t end);
  void merge(const LayerStatistics& other);

  const HeadGeometry& geometry() const { return geometry_; }
  bool has_position_means() const { return options_.rope != nullptr; }
  std::shared_ptr<const RopeTable> shared_rope() const { return options_.rope; }
  const RopeTable* rope() const { return options_.rope.get(); }
  // The sum behind mean_rope(), to store and to restore.
  const RowSum& rope_rows() const { return rope_rows_; }
  void restore_rope_rows(const RowSum& rows) { rope_rows_ = rows; }
  // Mean of the RoPE table's rows over the positions behind the means: cosines, then sines
  // [rotary_dim].
  std::vector<double> mean_rope() const { return rope_rows_.mean(); }
  // cos^2 + sin^2 of the table: the square of the attention factor.
  double rope_energy() const;
  const HeadStatistics& head(size_t kv_head) const { return heads_[kv_head]; }
  HeadStatistics& head(size_t kv_head) { return heads_[kv_head]; }  // to restore stored sums
  double tokens() const;                                            // behind the second moments

  // Mean over KV heads of one kind of second moment [D, D] (every head has seen the same tokens).
  TensorD mean_over_heads(GramSum HeadStatistics::*kind) const;

 private:
  void add_rope_rows(size_t first_position, size_t begin, size_t end);
  void add_position_mean(const LayerActivations& activations, size_t kv_head, size_t begin,
                         size_t end);

  HeadGeometry geometry_;
  StatisticsOptions options_;
  std::vector<HeadStatistics> heads_;  // [num_kv_heads]
  RowSum rope_rows_;
};

// The rows of one KV head: of its query group in q or o [T, Hq, D], of the head itself in k or v
// [T, Hkv, D]; tokens [begin, end).
RowBlock group_rows(const HeadGeometry& geometry, const float* q, size_t kv_head, size_t begin,
                    size_t end);
RowBlock head_rows(const HeadGeometry& geometry, const float* k, size_t kv_head, size_t begin,
                   size_t end);

}  // namespace oscar
