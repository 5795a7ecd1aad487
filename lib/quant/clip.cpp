#include "quant/clip.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace oscar {
namespace {

float bisect(int index, const float* magnitudes, int count) {
  float low = 0.0F;
  float high = *std::max_element(magnitudes, magnitudes + count);
  const int steps = std::bit_width(static_cast<unsigned>(count - 1));  // ceil(log2 count)
  for (int step = 0; step < steps; ++step) {
    const float middle = 0.5F * (low + high);
    const auto above = std::count_if(magnitudes, magnitudes + count,
                                     [middle](float magnitude) { return magnitude > middle; });
    (above > count - index ? low : high) = middle;
  }
  return high;
}

float quantile(double ratio, float* magnitudes, int count) {
  const double position = static_cast<double>(count - 1) * ratio;
  const auto index = static_cast<int>(std::floor(position));
  std::nth_element(magnitudes, magnitudes + index, magnitudes + count);
  const float below = magnitudes[index];
  if (index + 1 >= count) return below;
  const float above = *std::min_element(magnitudes + index + 1, magnitudes + count);
  return below + (above - below) * static_cast<float>(position - index);
}

}  // namespace

int clip_index(double ratio, int count) {
  return std::min(count - 1, static_cast<int>(std::floor(ratio * static_cast<double>(count))));
}

float clip_threshold(ClipRule rule, double ratio, const float* row, int count, float* scratch) {
  std::transform(row, row + count, scratch, [](float value) { return std::abs(value); });
  const int index = clip_index(ratio, count);
  if (rule == ClipRule::kBisect) return bisect(index, scratch, count);
  if (rule == ClipRule::kQuantile) return quantile(ratio, scratch, count);
  std::nth_element(scratch, scratch + index, scratch + count);
  return scratch[index];
}

}  // namespace oscar
