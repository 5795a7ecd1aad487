// The stored pair of a group: rounding to the metadata type, the levels it stands for, and its
// bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/codec.h"

namespace oscar {

// What a rounding depends on.
struct MetaRule {
  MetaFormat format = MetaFormat::kScaleMinFp16;
  int max_code = 3;              // L = 2^bits - 1, the last level (7 for the trellis)
  bool has_zero = false;         // the second value is a zero in code units
  bool lloyd_exact = false;      // the pair is (std, mean), value = mean + std * centroid
  float log8_scale_max = 0.0F;   // kLog8
  float log8_table[256] = {};    // kLog8: scale of every byte
  double log8_border[255] = {};  // square at which byte n meets n + 1
};

MetaRule make_meta_rule(const CodecSpec& spec);

// A pair as the decoder sees it. `second` is the zero (code units), the minimum or the mean.
struct StoredPair {
  float scale = 1.0F;
  float second = 0.0F;
  bool saturated = false;  // log8: the wanted scale was above s_max
};

// Gaussian Lloyd-Max centroids of kLloydExact, in standard deviations.
inline constexpr float kLloydCentroids[4] = {-1.5095585584640503F, -0.4527800381183624F,
                                             0.4527800381183624F, 1.5095585584640503F};

// Value of a code. Every decoder computes exactly this, in float, without fusing.
inline float level(const MetaRule& rule, const StoredPair& pair, int code) {
  const float c = rule.lloyd_exact ? kLloydCentroids[code] : static_cast<float>(code);
  return rule.has_zero ? (c - pair.second) * pair.scale : c * pair.scale + pair.second;
}

// Value of code 0 of a uniform grid: value = code * scale + low.
inline float low_of(const MetaRule& rule, const StoredPair& pair) {
  return rule.has_zero ? (0.0F - pair.second) * pair.scale : pair.second;
}

// True when the codes are chosen for the stored pair, not for the exact range.
inline bool codes_follow_stored(MetaFormat format) {
  return format == MetaFormat::kScaleMinFp16First || format == MetaFormat::kLog8 ||
         format == MetaFormat::kSymmetricFp16;
}
// True when the format has a pair for every group, so that no group falls back to constant_pair().
inline bool holds_constants(MetaFormat format) {
  return format == MetaFormat::kLog8 || format == MetaFormat::kSymmetricFp16;
}

// Rounds a (scale, minimum) to the metadata type. For formats with a zero, zero = -minimum / scale
// with the given scale (zero_from_stored false: upstream's rule) or with the rounded one.
// The result may be unusable (scale 0, not finite): see usable().
StoredPair round_pair(const MetaRule& rule, float scale, float minimum, bool zero_from_stored);

// The rounded pair whose scale is nearest to the wanted one and whose grid keeps its middle (the
// value at code L/2). What the type cannot hold becomes scale 0 with the middle at code 0.
StoredPair centered_pair(const MetaRule& rule, float scale, float middle);

// Rounds two values as they are.
StoredPair round_values(const MetaRule& rule, float scale, float second);

// False when the metadata type could not hold the pair.
bool usable(const StoredPair& pair);

// The pair stored for constant groups and for groups whose pair is not usable: scale 1 and the
// minimum (codes 0); not usable when even that overflows.
StoredPair constant_pair(const MetaRule& rule, float minimum);

// The pair with every level multiplied by gain, rounded again.
StoredPair multiply_pair(const MetaRule& rule, const StoredPair& pair, float gain);

// bytes: meta_values * meta_bits / 8 of them.
void write_pair(const MetaRule& rule, const StoredPair& pair, uint8_t* bytes);
StoredPair read_pair(const MetaRule& rule, const uint8_t* bytes);

}  // namespace oscar
