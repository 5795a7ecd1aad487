// Round-to-nearest encoders (formats.md 7.1 and 7.2) and the gain fold.
#include <cmath>
#include <limits>

#include "base/error.h"
#include "quant/clip.h"
#include "quant/codec_impl.h"

namespace oscar {
namespace {

constexpr float kSmallestRange = 1e-8F;
constexpr double kLloydThreshold = 0.9810652732849121;
constexpr double kLloydCentroid = 1.5095585584640503;
constexpr double kLloydStretch = 1.16;
constexpr double kGainLow = 0.8, kGainHigh = 1.5;

// Range of the grid start in place of the row's own.
void find_range(const RowEncoder& encoder, RowBatch& batch) {
  start_from_grid(encoder, batch, false);
  const auto steps = static_cast<float>(encoder.rule.max_code);
  for (size_t lane = 0; lane < batch.scale.size(); ++lane) {
    batch.minimum[lane] = batch.low[lane];
    batch.maximum[lane] = batch.low[lane] + steps * batch.scale[lane];
  }
}

// Fills batch.threshold; false when the clip is off.
bool find_thresholds(const RowEncoder& encoder, RowBatch& batch) {
  const CodecSpec& spec = encoder.spec;
  if (spec.clip_ratio <= 0.0) return false;
  if (spec.clip_rule == ClipRule::kOrderStatistic) {
    const int k = spec.head_dim - clip_index(spec.clip_ratio, spec.head_dim);
    encoder.kernels->kth_largest(batch.x.data(), spec.head_dim, k, batch.threshold.data());
    return true;
  }
  for (int lane = 0; lane < encoder.kernels->lanes; ++lane) {
    const auto row = static_cast<size_t>(lane < batch.count ? lane : batch.count - 1);
    batch.threshold[static_cast<size_t>(lane)] =
        clip_threshold(spec.clip_rule, spec.clip_ratio, batch.rows + row * batch.row_stride,
                       spec.head_dim, batch.row_scratch.data());
  }
  return true;
}

// Decides the stored pair of one group and, in batch.scale / batch.low at `index`, the pair that
// chooses the codes.
void choose_pair(const RowEncoder& encoder, RowBatch& batch, size_t index, size_t row) {
  const MetaFormat format = encoder.rule.format;
  const float minimum = batch.minimum[index], maximum = batch.maximum[index];
  const float range = maximum - minimum;
  const auto steps = static_cast<float>(encoder.rule.max_code);
  const bool follow_stored = codes_follow_stored(format);
  const float scale = format == MetaFormat::kScaleMinFp16First
                          ? std::fmax(range / steps, kSmallestRange)
                          : std::fmax(range, kSmallestRange) / steps;
  StoredPair pair = round_pair(encoder.rule, scale, minimum, false);
  if (!std::isfinite(pair.scale)) fail_metadata_overflow(encoder, row, minimum, maximum);
  if (!holds_constants(format) && (range == 0.0F || !usable(pair))) {
    pair = constant_pair(encoder.rule, minimum);
    if (!usable(pair)) fail_metadata_overflow(encoder, row, minimum, maximum);
    ++batch.stats->meta_fallbacks;
    batch.scale[index] = std::numeric_limits<float>::infinity();
    batch.low[index] = minimum;
  } else {
    batch.scale[index] = follow_stored ? pair.scale : scale;
    batch.low[index] = follow_stored ? low_of(encoder.rule, pair) : minimum;
    // Symmetric, a row of zeros: any code is right.
    if (pair.scale == 0.0F) batch.scale[index] = std::numeric_limits<float>::infinity();
  }
  batch.pairs[index] = pair;
}

void encode_lloyd_row(const RowEncoder& encoder, RowBatch& batch, int lane, bool clipped) {
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  const auto size = static_cast<size_t>(encoder.spec.head_dim);
  const auto column = static_cast<size_t>(lane);
  float* row = batch.row_scratch.data();
  double sum = 0.0, square_sum = 0.0;
  for (size_t d = 0; d < size; ++d) {
    const float threshold = clipped ? batch.threshold[column] : HUGE_VALF;
    row[d] = std::fmin(std::fmax(batch.x[d * lanes + column], -threshold), threshold);
    sum += static_cast<double>(row[d]);
  }
  const double mean = sum / static_cast<double>(size);
  for (size_t d = 0; d < size; ++d) {
    const double distance = static_cast<double>(row[d]) - mean;
    square_sum += distance * distance;
  }
  const double deviation = std::sqrt(square_sum / static_cast<double>(size) + 1e-8);
  for (size_t d = 0; d < size; ++d) {
    const double z = (static_cast<double>(row[d]) - mean) / deviation;
    batch.codes[d * lanes + column] = static_cast<uint8_t>(
        (z >= -kLloydThreshold ? 1 : 0) + (z >= 0.0 ? 1 : 0) + (z >= kLloydThreshold ? 1 : 0));
  }
  StoredPair pair;
  if (encoder.spec.levels == Levels::kLloydExact) {
    pair = round_values(encoder.rule, static_cast<float>(deviation), static_cast<float>(mean));
  } else {
    const double scale = 2.0 * kLloydCentroid / 3.0 * kLloydStretch * deviation;
    pair = round_values(
        encoder.rule, static_cast<float>(scale),
        static_cast<float>(encoder.rule.has_zero ? 1.5 - mean / scale : mean - 1.5 * scale));
  }
  if (!usable(pair))
    fail_metadata_overflow(encoder, batch.first_row + column, static_cast<float>(mean),
                           static_cast<float>(mean));
  batch.pairs[column] = pair;
}

// Dequantizes the batch into batch.y.
void dequantize(const RowEncoder& encoder, RowBatch& batch) {
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  if (encoder.rule.lloyd_exact) {
    for (size_t i = 0; i < batch.y.size(); ++i)
      batch.y[i] = level(encoder.rule, batch.pairs[i % lanes], batch.codes[i]);
    return;
  }
  for (size_t i = 0; i < batch.pairs.size(); ++i) {
    batch.scale[i] = batch.pairs[i].scale;
    batch.low[i] = low_of(encoder.rule, batch.pairs[i]);
  }
  encoder.kernels->dequantize(batch.codes.data(), batch.scale.data(), batch.low.data(),
                              encoder.spec.head_dim, encoder.spec.group, batch.y.data());
}

}  // namespace

void fail_metadata_overflow(const RowEncoder& encoder, size_t row, float minimum, float maximum) {
  fail("codec: row ", row, " (values ", minimum, " to ", maximum, ") does not fit the ",
       meta_bits(encoder.rule.format), "-bit metadata");
}

float unbiased_gain(double xx, double xy, EncodeStats& stats) {
  double gain = 1.0;
  if (xx > 0.0) gain = xy > 0.0 ? xx / xy : HUGE_VAL;
  if (!(gain >= kGainLow && gain <= kGainHigh)) {
    gain = gain < kGainLow ? kGainLow : kGainHigh;
    ++stats.gain_clamped;
  }
  return static_cast<float>(gain);
}

void encode_rtn(const RowEncoder& encoder, RowBatch& batch) {
  const CodecSpec& spec = encoder.spec;
  const LaneKernels& kernels = *encoder.kernels;
  const float* threshold = nullptr;
  if (spec.clip_rule == ClipRule::kRangeGrid) {
    find_range(encoder, batch);
  } else {
    if (find_thresholds(encoder, batch)) threshold = batch.threshold.data();
    kernels.min_max(batch.x.data(), threshold, spec.head_dim, spec.group, batch.minimum.data(),
                    batch.maximum.data());
  }
  const auto lanes = static_cast<size_t>(kernels.lanes);
  for (size_t index = 0; index < batch.pairs.size(); ++index) {
    const size_t lane = index % lanes;
    if (lane < static_cast<size_t>(batch.count)) {
      choose_pair(encoder, batch, index, batch.first_row + lane);
      if (batch.pairs[index].saturated) ++batch.stats->scale_saturated;
    } else {
      const size_t last = index - lane + static_cast<size_t>(batch.count) - 1;
      batch.pairs[index] = batch.pairs[last];
      batch.scale[index] = batch.scale[last];
      batch.low[index] = batch.low[last];
    }
  }
  kernels.quantize({.x = batch.x.data(),
                    .threshold = threshold,
                    .scale = batch.scale.data(),
                    .offset = batch.low.data(),
                    .head_dim = spec.head_dim,
                    .group = spec.group,
                    .max_code = encoder.rule.max_code,
                    .codes = batch.codes.data()});
}

void encode_lloyd(const RowEncoder& encoder, RowBatch& batch) {
  const bool clipped = find_thresholds(encoder, batch);
  for (int lane = 0; lane < encoder.kernels->lanes; ++lane)
    encode_lloyd_row(encoder, batch, lane, clipped);
}

void fold_gain(const RowEncoder& encoder, RowBatch& batch) {
  const CodecSpec& spec = encoder.spec;
  dequantize(encoder, batch);
  if (spec.gain == GainRule::kPlain) {
    encoder.kernels->plain_products(batch.x.data(), batch.y.data(), spec.head_dim,
                                    batch.products[0].data(), batch.products[1].data());
  } else {
    encoder.kernels->metric_products({.x = batch.x.data(),
                                      .y = batch.y.data(),
                                      .l_panels = encoder.panels.l.data(),
                                      .pivot = encoder.metric->pivot.data(),
                                      .ones_l = encoder.panels.ones_l.data(),
                                      .head_dim = spec.head_dim,
                                      .xx = batch.products[0].data(),
                                      .xy = batch.products[1].data(),
                                      .yy = batch.products[2].data(),
                                      .x1 = batch.products[3].data(),
                                      .y1 = batch.products[4].data()});
  }
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  for (size_t lane = 0; lane < static_cast<size_t>(batch.count); ++lane) {
    const float gain = unbiased_gain(static_cast<double>(batch.products[0][lane]),
                                     static_cast<double>(batch.products[1][lane]), *batch.stats);
    for (size_t index = lane; index < batch.pairs.size(); index += lanes) {
      const bool saturated = batch.pairs[index].saturated;
      batch.pairs[index] = multiply_pair(encoder.rule, batch.pairs[index], gain);
      if (batch.pairs[index].saturated && !saturated) ++batch.stats->scale_saturated;
    }
  }
}

}  // namespace oscar
