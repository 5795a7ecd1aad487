// The KV codec: configuration of a quantizer and the object that encodes and decodes rows of one
// head. The CPU implementation is the oracle for every kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "quant/int2_format.h"

namespace oscar {

// How the clip threshold of a row follows from the ratio (formats.md 7.1 and 7.2).
enum class ClipRule : uint8_t {
  kOrderStatistic,  // entry min(D - 1, floor(ratio * D)) of |row| sorted ascending
  kBisect,          // upstream's flush kernel: log2 D bisection steps on [0, max |row|]
  kQuantile,        // vLLM: interpolated quantile at position (D - 1) * ratio
  kRangeGrid,       // no threshold: the range is that of StartRange::kGrid; needs one group per row
};
// Reconstruction levels; the Lloyd variants need 2 bits and one group per row.
enum class Levels : uint8_t {
  kUniform,
  kLloydMax,    // Gaussian thresholds, uniform levels of scale 2C/3 * 1.16 * std
  kLloydExact,  // Gaussian thresholds and centroids; the pair stored is (std, mean)
  kTrellis,  // experimental, CPU only: 8 uniform levels reached through an 8-state trellis, still
             // 2 stored bits (trellis_codec.cpp); needs the feedback encoder without sweeps
};
enum class GroupAxis : uint8_t {
  kChannels,  // groups of consecutive dims inside one token's row (everything but KIVI keys)
  kTokens,    // one group = `group` consecutive tokens of one channel (KIVI keys)
};
enum class Encoder : uint8_t { kRtn, kFeedback };

// The range from which the feedback encoder starts.
enum class StartRange : uint8_t {
  kClip,        // of the row clipped at order statistic floor(start_clip * D)
  kGrid,        // the least squared error of 6 x 6 ranges about the mean
  kMetricGrid,  // the least e A e^T of the same ranges: dearer, and no better as a start, because
                // the codes are chosen by error feedback afterwards
};

// Options of the feedback encoder (best_recipe steps 5 and 6).
struct FeedbackOptions {
  StartRange start = StartRange::kClip;
  double start_clip = 0.92;
  std::vector<double> multipliers = {0.85, 1.0, 1.15, 1.35, 1.6};  // of the start range
  int refits = 0;  // least-squares pairs for the best codes so far, each tried with
  std::vector<double> refit_multipliers = {0.95, 1.0, 1.05};
  int sweeps = 0;        // of coordinate descent, over the codes that won
  bool feedback = true;  // false: codes by plain rounding for every multiplier (ablation)
};
// The encoder of recipe `best`: grid start, four multipliers (around the grid's range a narrow set
// suffices), one refit, two sweeps. `light` and `lean` have the defaults above.
FeedbackOptions best_feedback();
// A set of multipliers as arms and options name it, "0.9/1/1.1", factors from 0.1 to 10; nothing
// when the text is no such set.
std::optional<std::vector<double>> parse_multipliers(const std::string& text);
std::string multipliers_text(const std::vector<double>& multipliers);
enum class GainRule : uint8_t {
  kNone,
  kPlain,
  kMetric
};  // unbiased gain: off | plain inner product | in the metric

struct CodecSpec {
  int bits = 2;      // 2, 4 or 8
  int head_dim = 0;  // D, a multiple of 4
  int group = 0;  // elements of a group; 0 = head_dim (kChannels). Must divide head_dim (kChannels)
  GroupAxis axis = GroupAxis::kChannels;
  MetaFormat meta = MetaFormat::kScaleMinFp16;
  PackOrder order = PackOrder::kConsecutive;
  double clip_ratio = 0.0;  // [0, 1]; 0 = off. rtn only: the feedback encoder has start_clip
  ClipRule clip_rule = ClipRule::kOrderStatistic;
  Levels levels = Levels::kUniform;
  Encoder encoder = Encoder::kRtn;
  FeedbackOptions feedback;
  GainRule gain = GainRule::kNone;
  float log8_scale_max = 0.0F;  // kLog8 only: s_max of this head
};

// Throws Error naming the option when the specification is impossible (group does not divide D,
// clip outside [0, 1], ...).
void check(const CodecSpec& spec);

// Bits per element of the stored rows, metadata included, windows not: bits + 2 * meta bits / group
// (log8 and symmetric: + 16 / group).
double nominal_bits(const CodecSpec& spec);

// Attention-weighted metric of one (layer, head, side): A = R^T M R / mean(diag) + damping I and
// its unit lower triangular factor (best_recipe step 4).
struct EncoderMetric {
  int head_dim = 0;
  std::vector<float> a;      // [D, D] row-major, symmetric
  std::vector<float> l;      // [D, D] row-major, unit lower triangular: A = C C^T, L = C diag(C)^-1
  std::vector<float> pivot;  // [D], diag(C)^2: A = L diag(pivot) L^T
};

// Builds the metric from M already expressed in rotated coordinates (R^T M R), in double. Throws
// when it is not finite or not positive semidefinite.
EncoderMetric make_encoder_metric(const double* rotated_m, int head_dim, double damping = 0.01);

// Counts what happened while encoding; sums over calls.
struct EncodeStats {
  size_t rows = 0;
  size_t meta_fallbacks = 0;   // groups stored with scale 1: constant, or the metadata type could
                               // not hold the pair
  size_t gain_clamped = 0;     // rows whose gain hit its clamp [0.8, 1.5]
  size_t scale_saturated = 0;  // log8: rows whose scale is above s_max

  void add(const EncodeStats& other) {
    rows += other.rows;
    meta_fallbacks += other.meta_fallbacks;
    gain_clamped += other.gain_clamped;
    scale_saturated += other.scale_saturated;
  }
};

// "3 of 512 gains at their clamp, 1 scale saturated, ..."; empty when nothing happened.
std::string describe(const EncodeStats& stats);

// Encodes and decodes rows [token, D] (already centered and rotated) of one head. Thread-safe: all
// methods are const.
class Codec {
 public:
  virtual ~Codec() = default;
  virtual const CodecSpec& spec() const = 0;
  // Tokens encoded together: 1, or the group size when the groups run over tokens.
  virtual int token_block() const = 0;
  virtual size_t bytes_per_block() const = 0;
  // rows: [num_blocks * token_block, D], consecutive rows row_stride floats apart; out: num_blocks
  // * bytes_per_block bytes. stats may be null. Throws Error when a row is not finite (row number
  // in the message).
  virtual void encode(const float* rows, size_t row_stride, size_t num_blocks, uint8_t* out,
                      EncodeStats* stats) const = 0;
  // Inverse: writes [num_blocks * token_block, D], rows row_stride floats apart.
  virtual void decode(const uint8_t* encoded, size_t num_blocks, float* rows,
                      size_t row_stride) const = 0;
};

// metric: required by Encoder::kFeedback and GainRule::kMetric, else null; shared, not copied.
// Throws Error when it is missing or does not fit.
std::unique_ptr<Codec> make_codec(const CodecSpec& spec,
                                  std::shared_ptr<const EncoderMetric> metric = nullptr);

}  // namespace oscar
