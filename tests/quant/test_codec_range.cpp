// Ranges of the rtn encoder: clip thresholds, order statistics, the range grid.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/float16.h"
#include "codec_helpers.h"
#include "quant/clip.h"
#include "support/compare.h"

using oscar::ClipRule;
using oscar::CodecSpec;
using oscar::MetaFormat;
using oscar_test::normal_rows;
using oscar_test::round_trip;

namespace {

// Squared error of one row under plain rounding in the range [low, low + 3 scale].
double range_error(const float* row, size_t size, double low, double scale) {
  double sum = 0.0;
  for (size_t d = 0; d < size; ++d) {
    const double position = (static_cast<double>(row[d]) - low) / scale;
    const double error = position - std::clamp(std::nearbyint(position), 0.0, 3.0);
    sum += error * error * scale * scale;
  }
  return sum;
}

}  // namespace

TEST_CASE("codec: clip thresholds", "[quant]") {
  const std::vector<float> row = {4.0F, -1.0F, 3.0F, -2.0F};
  float scratch[4];
  const auto threshold = [&](ClipRule rule, double ratio) {
    return oscar::clip_threshold(rule, ratio, row.data(), 4, scratch);
  };
  CHECK(threshold(ClipRule::kOrderStatistic, 0.0001) == 1.0F);
  CHECK(threshold(ClipRule::kOrderStatistic, 0.25) == 2.0F);
  CHECK(threshold(ClipRule::kOrderStatistic, 0.74) == 3.0F);
  CHECK(threshold(ClipRule::kOrderStatistic, 1.0) == 4.0F);
  CHECK(threshold(ClipRule::kQuantile, 0.5) == 2.5F);
  CHECK(threshold(ClipRule::kQuantile, 1.0) == 4.0F);
  // Two steps on [0, 4] for index 2: 2 values above 2 (not more than 4 - 2): high = 2; then 3 above
  // 1: low = 1.
  CHECK(threshold(ClipRule::kBisect, 0.5) == 2.0F);
  // The product is taken in double: 0.29 * 100 = 28.999999999999996.
  CHECK(oscar::clip_index(0.29, 100) == 28);
  CHECK(oscar::clip_index(0.92, 128) == 117);
  CHECK(oscar::clip_index(0.96, 64) == 61);
  CHECK(oscar::clip_index(1.0, 64) == 63);
}

TEST_CASE("codec: the range grid takes the range of least squared error", "[quant]") {
  const std::vector<float> rows = normal_rows(17, 40, 64, 2.0);
  CodecSpec spec;
  spec.head_dim = 64;
  spec.meta = MetaFormat::kScaleZeroFp32;
  spec.clip_rule = ClipRule::kRangeGrid;
  const auto codec = oscar::make_codec(spec);
  const auto result = round_trip(*codec, rows);
  double clipped_sum = 0.0, grid_sum = 0.0;
  CodecSpec clipped = spec;
  clipped.clip_rule = ClipRule::kOrderStatistic;
  clipped.clip_ratio = 0.92;
  const auto by_clip = round_trip(clipped, rows);
  for (size_t r = 0; r < 40; ++r) {
    const float* row = rows.data() + r * 64;
    const auto [minimum, maximum] = std::minmax_element(row, row + 64);
    double mean = 0.0, least = HUGE_VAL, stored = 0.0;
    for (size_t d = 0; d < 64; ++d) mean += static_cast<double>(row[d]) / 64.0;
    for (const double below : {.44, .54, .64, .74, .86, 1.0})
      for (const double above : {.44, .54, .64, .74, .86, 1.0}) {
        const double low = mean + below * (static_cast<double>(*minimum) - mean);
        const double high = mean + above * (static_cast<double>(*maximum) - mean);
        least = std::min(least, range_error(row, 64, low, (high - low) / 3.0));
      }
    for (size_t d = 0; d < 64; ++d) {
      const double error = static_cast<double>(result.values[r * 64 + d] - row[d]);
      const double clip_error = static_cast<double>(by_clip.values[r * 64 + d] - row[d]);
      stored += error * error;
      clipped_sum += clip_error * clip_error;
    }
    CHECK(stored == Approx(least).epsilon(1e-4));
    grid_sum += stored;
    // One row alone: its replicas share the ranges out.
    std::vector<uint8_t> alone(codec->bytes_per_block());
    codec->encode(row, 64, 1, alone.data(), nullptr);
    CHECK(std::equal(alone.begin(), alone.end(),
                     result.bytes.begin() + static_cast<std::ptrdiff_t>(r * alone.size())));
  }
  CHECK(grid_sum < 0.9 * clipped_sum);
}

TEST_CASE("codec: order statistic of every rank, every version", "[quant]") {
  const std::vector<float> rows = normal_rows(10, 16, 96);
  for (const oscar::LaneKernels* kernels : oscar_test::all_kernels()) {
    const auto lanes = static_cast<size_t>(kernels->lanes);
    std::vector<float> x(96 * lanes), threshold(lanes), scratch(96);
    REQUIRE(kernels->load_rows(rows.data(), 96, kernels->lanes, kernels->lanes, 96, x.data()) ==
            -1);
    for (int k = 1; k <= 96; ++k) {
      kernels->kth_largest(x.data(), 96, k, threshold.data());
      for (size_t lane = 0; lane < lanes; ++lane) {
        const double ratio = (96.0 - k + 0.5) / 96.0;
        REQUIRE(threshold[lane] == oscar::clip_threshold(ClipRule::kOrderStatistic, ratio,
                                                         rows.data() + lane * 96, 96,
                                                         scratch.data()));
      }
    }
  }
}
