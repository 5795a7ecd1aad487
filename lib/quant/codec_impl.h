// Inside of the codec layer: the working memory of a batch of rows and the encoders behind
// make_codec.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "quant/codec.h"
#include "quant/lane_kernels.h"
#include "quant/metadata.h"

namespace oscar {

inline constexpr int kMaxCandidatesAtOnce = 8;

// make_codec with a chosen version of the inner loops (tests compare them bit by bit).
std::unique_ptr<Codec> make_codec_with(const CodecSpec& spec,
                                       std::shared_ptr<const EncoderMetric> metric,
                                       const LaneKernels& kernels);

// The metric as the kernels read it: 4 neighbouring columns side by side, in the order of use.
struct MetricPanels {
  std::vector<float> l;  // for blocks of 4 columns from the last to the first, for rows j from
                         // D - 1 down to the block's first: L[j][block]
  std::vector<float> a;  // for blocks from the first to the last, for all rows j: A[j][block]
  std::vector<float> a_inverse;  // [D], 1 / A_ii
  std::vector<float> ones_l;     // [D]: column sums of L
  double ones_norm = 0.0;        // 1 A 1^T
};
// with_a: also the panels of A, which only the sweeps read.
MetricPanels make_metric_panels(const EncoderMetric& metric, bool with_a);

inline bool tries_candidates(const CodecSpec& spec) {
  return spec.encoder == Encoder::kFeedback || spec.clip_rule == ClipRule::kRangeGrid;
}

// Everything the encoders of a row codec share; built once.
struct RowEncoder {
  CodecSpec spec;  // group filled in
  RowFormat format;
  MetaRule rule;
  const LaneKernels* kernels;
  std::shared_ptr<const EncoderMetric> metric;  // may be null
  MetricPanels panels;                          // empty without a metric
};

// A batch of up to `lanes` rows under way; arrays are [dim or group][lane].
struct RowBatch {
  const float* rows = nullptr;  // first row of the batch
  size_t row_stride = 0;
  int count = 0;   // rows, 1 .. lanes
  int period = 0;  // lane l works on row l % period: lanes / period replicas of each row, which
                   // share out the candidates of the feedback encoder
  size_t first_row = 0;          // its number in the call, for messages
  EncodeStats* stats = nullptr;  // never null here

  std::vector<float> x;                                // [D][lanes]
  std::vector<float> y;                                // [D][lanes], dequantized
  std::vector<uint8_t> codes;                          // [D][lanes]
  std::vector<StoredPair> pairs;                       // [groups][lanes]
  std::vector<float> threshold;                        // [lanes]
  std::vector<float> minimum, maximum, scale, low;     // [groups][lanes]
  std::vector<float> row_scratch;                      // [2 D]
  std::vector<float> error;                            // [D][lanes * kMaxCandidatesAtOnce]
  std::vector<uint8_t> trial;                          // as error
  std::vector<float> candidate_scale, candidate_low;   // [candidates of a lane][lanes]
  std::vector<StoredPair> candidate_pairs;             // [candidates of a lane][lanes]
  std::vector<float> best_cost, best_scale, best_low;  // [lanes]
  std::vector<int32_t> best_index;  // [lanes], within the round; -1: nothing better than before
  std::vector<float> products[5];   // [lanes]: xx, xy, yy, x1, y1
  std::vector<uint8_t> packed;      // [code bytes][lanes]

  void resize(const RowEncoder& encoder);
};

// Each fills batch.codes and batch.pairs from batch.x. Throw Error with the row's number when the
// metadata type cannot hold the row.
void encode_rtn(const RowEncoder& encoder, RowBatch& batch);
void encode_lloyd(const RowEncoder& encoder, RowBatch& batch);
void encode_feedback(const RowEncoder& encoder, RowBatch& batch);
// Fills batch.scale and batch.low, [lanes], with the cheapest of 6 x 6 ranges around the mean under
// plain rounding (in the metric where `in_metric`), batch.minimum and batch.maximum with the row's.
void start_from_grid(const RowEncoder& encoder, RowBatch& batch, bool in_metric);
// Folds the unbiased gain into the pairs (best_recipe step 6).
void fold_gain(const RowEncoder& encoder, RowBatch& batch);

// (x . x) / (x . y) clamped to [0.8, 1.5]; 1 for a row of zeros. Counts clamped rows.
float unbiased_gain(double xx, double xy, EncodeStats& stats);

[[noreturn]] void fail_metadata_overflow(const RowEncoder& encoder, size_t row, float minimum,
                                         float maximum);

std::unique_ptr<Codec> make_trellis_codec(const CodecSpec& spec,
                                          std::shared_ptr<const EncoderMetric> metric);
std::unique_ptr<Codec> make_token_codec(const CodecSpec& spec, const LaneKernels& kernels);

}  // namespace oscar
