// The KV codec: configuration of a quantizer and the object that encodes and decodes rows of one
// head. The CPU implementation is the oracle for every kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace oscar {

enum class PackOrder : uint8_t {
  kConsecutive,
  kQuartered
};  // byte j = dims 4j..4j+3 | dims j, j+D/4, j+D/2, j+3D/4
enum class MetaFormat : uint8_t {
  kScaleZeroFp32,  // upstream: value = (code - zero) * scale, zero = -min / scale, not rounded to
                   // an integer
  kScaleZeroBf16,
  kScaleZeroFp16,
  kScaleMinFp16,  // ours: value = code * scale + min, codes chosen with the unrounded pair (rtn) or
                  // for the stored pair (feedback)
  kScaleMinFp16First,  // vLLM: the pair is rounded to fp16 before the codes are chosen
  kLog8,  // 8-bit logarithmic scale s_max * 2^(-n/32) and 8-bit zero (best_recipe step 8)
};
enum class ClipRule : uint8_t { kOrderStatistic, kBisect, kQuantile };
enum class Levels : uint8_t { kUniform, kLloydMax, kLloydExact };
enum class GroupAxis : uint8_t {
  kChannels,  // groups of consecutive dims inside one token's row (everything but KIVI keys)
  kTokens,    // one group = `group` consecutive tokens of one channel (KIVI keys)
};
enum class Encoder : uint8_t { kRtn, kFeedback };

// Options of the feedback encoder (best_recipe steps 5 and 6).
struct FeedbackOptions {
  bool start_grid = false;  // true: 6 x 6 range grid in the metric; false: start from the row
                            // clipped at order statistic floor(start_clip * D)
  double start_clip = 0.92;
  std::vector<double> multipliers = {0.85, 1.0, 1.15, 1.35, 1.6};
  int sweeps = 0;
  int refits = 0;
  bool feedback = true;  // false: codes by plain rounding for every multiplier (ablation)
};
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
  double clip_ratio = 0.0;  // [0, 1]; 0 = off
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
// (log8: + 16 / group).
double nominal_bits(const CodecSpec& spec);
int meta_bits(MetaFormat meta);  // bits of one of the two stored values: 32, 16 or 8

// Attention-weighted metric of one (layer, head, side): A = R^T M R / mean(diag) + damping I and
// its unit lower triangular factor (best_recipe step 4).
struct EncoderMetric {
  int head_dim = 0;
  std::vector<float> a;  // [D, D] row-major, symmetric
  std::vector<float> l;  // [D, D] row-major, unit lower triangular: A = C C^T, L = C diag(C)^-1
};

// Builds the metric from M already expressed in rotated coordinates (R^T M R), in double. Throws
// when it is not finite or not positive semidefinite.
EncoderMetric make_encoder_metric(const double* rotated_m, int head_dim, double damping = 0.01);

// Counts what happened while encoding; sums over calls.
struct EncodeStats {
  size_t rows = 0;
  size_t meta_fallbacks =
      0;  // rows stored with scale 1 because the metadata type could not hold the pair
  size_t gain_clamped = 0;     // rows whose gain hit its clamp [0.8, 1.5]
  size_t scale_saturated = 0;  // log8: scale above s_max
};

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
