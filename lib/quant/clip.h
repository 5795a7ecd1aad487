// Clip thresholds of one row (formats.md 7.1 and 7.2).
#pragma once

#include "quant/codec.h"

namespace oscar {

// Index of the order statistic: min(count - 1, floor(ratio * count)), the product in double.
int clip_index(double ratio, int count);

// Threshold of one row of `count` finite values; values beyond +-threshold are clamped. ratio in
// (0, 1]; scratch: [count], overwritten.
float clip_threshold(ClipRule rule, double ratio, const float* row, int count, float* scratch);

}  // namespace oscar
