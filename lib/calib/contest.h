// Held-out contest: which stored form of keys and values hurts the attention output least, bias
// included, on queries and keys that took no part in the calibration.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/aligned.h"
#include "calib/activation_rows.h"
#include "calib/output_projection.h"
#include "model/attention_kernels.h"
#include "quant/codec.h"

namespace oscar {

struct ContestOptions {
  size_t sink = 64, recent = 256;
  size_t num_queries = 64;     // query tokens, evenly spread
  size_t max_sequence = 4096;  // tokens of the sequence used
};

// One sequence with held-out queries of one layer.
struct ContestData {
  HeadGeometry geometry;
  ContestOptions options;
  size_t num_tokens = 0;             // keys
  std::vector<float> k, v;           // [num_tokens, Hkv, D]
  std::vector<size_t> query_tokens;  // positions, ascending
  std::vector<float> q;              // [num queries, Hq, D]
};

// Picks the longest sequence with queries at or behind `first_query_token` (global) and at least 16
// of them past sink + recent; nullopt-like empty data (num_tokens 0) when there is none.
ContestData contest_data(const ActivationRows& rows, const HeadGeometry& geometry, size_t layer,
                         const std::vector<size_t>& sequence_offsets, size_t first_query_token,
                         const ContestOptions& options);

// How one head's rows are stored. metric: for feedback codecs.
struct StoredForm {
  const float* rotation = nullptr;  // [D, D], null = identity
  const float* mean = nullptr;      // [D], null = not centered
  // [num_tokens, D] subtracted besides (position-aware centering), null = nothing.
  const float* position_rows = nullptr;
  CodecSpec codec = {};
  std::shared_ptr<const EncoderMetric> metric = nullptr;
};

// Error energy of the projected attention output, summed over the heads of the group, per query
// token; and the largest scale stored.
struct ContestError {
  std::vector<double> per_query;
  double largest_scale = 0.0;
  double sum() const;
};

// The attention of one KV head's group over the sequence, exact, to be perturbed. In float32;
// blocks of 64 keys, the errors of stored rows stay in the coordinates of their rotation (queries
// and outputs are turned instead).
class HeadContest {
 public:
  HeadContest(const ContestData& contest, const OutputEnergy& energy, size_t kv_head);
  // Only the values (keys) are replaced by their stored form, in the quantized range of each query.
  ContestError value_error(const StoredForm& form) const;
  ContestError key_error(const StoredForm& form) const;
  // Sum of o W o^T over the sampled queries and heads of the group.
  double output_energy() const { return output_energy_; }

 private:
  struct Attention {
    AlignedVector<float> max, sum;  // [rows], base 2
    AlignedVector<float> out;       // [rows, width]
  };
  Attention attend(const float* key_errors, const float* queries) const;
  void add_key_errors(size_t block, size_t first_row, size_t end_row, const float* panel,
                      const float* queries, float* scores) const;
  AlignedVector<float> stored_error(const AlignedVector<float>& rows, const StoredForm& form,
                                    double* largest_scale) const;
  std::vector<double> energies(const AlignedVector<float>& difference) const;
  size_t token(size_t row) const;
  size_t quantized_end(size_t row) const;  // keys sink <= j < end
  // The first row whose `end` (of the keys it sees, or of those it sees quantized) is past `key`.
  size_t first_row_past(size_t key, bool quantized) const;
  const float* block_scores(size_t block) const {
    return scores_.data() + block * num_rows_ * kKeyBlock;
  }

  const ContestData& contest_;
  const OutputEnergy& energy_;
  size_t kv_head_, dim_, width_, num_rows_, num_blocks_;
  AlignedVector<float> queries_;        // [num_rows, width], times D^-0.5 log2(e)
  AlignedVector<float> keys_, values_;  // [num_blocks * 64, width]
  AlignedVector<float> scores_;         // [num_blocks][num_rows, 64], base 2
  AlignedVector<float> weights_;        // the same: softmax weights of quantized keys, else 0
  AlignedVector<float> outputs_;        // [num_rows, width]
  double output_energy_ = 0.0;
};

}  // namespace oscar
