// The experimental trellis codec: its levels bit by bit, the optimum on short rows, its gain, and
// degenerate rows.
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/float16.h"
#include "codec_helpers.h"
#include "quant/distortion.h"

using oscar::CodecSpec;
using oscar::Encoder;
using oscar::GainRule;
using oscar::Levels;
using oscar::MetaFormat;
using oscar_test::normal_rows;
using oscar_test::random_metric;
using oscar_test::round_trip;

namespace {

CodecSpec trellis_spec(int head_dim) {
  CodecSpec spec;
  spec.head_dim = head_dim;
  spec.encoder = Encoder::kFeedback;
  spec.levels = Levels::kTrellis;
  spec.log8_scale_max = 2.0F;
  return spec;
}

std::shared_ptr<const oscar::EncoderMetric> identity_metric(int head_dim) {
  const auto size = static_cast<size_t>(head_dim);
  std::vector<double> m(size * size, 0.0);
  for (size_t i = 0; i < size; ++i) m[i * (size + 1)] = 1.0;
  return std::make_shared<oscar::EncoderMetric>(oscar::make_encoder_metric(m.data(), head_dim));
}

// Levels of code bits u, w by the formula, bits past the end 0.
std::vector<int> levels_of(const std::vector<int>& codes) {
  const size_t size = codes.size();
  const auto u = [&](size_t i) { return i < size ? codes[i] & 1 : 0; };
  std::vector<int> levels(size);
  for (size_t i = 0; i < size; ++i)
    levels[i] = 4 * (codes[i] >> 1) + 2 * (u(i) ^ u(i + 1) ^ u(i + 3)) + u(i + 2);
  return levels;
}

}  // namespace

TEST_CASE("trellis: levels are XORs of neighbouring bits", "[quant]") {
  const auto codec = oscar::make_codec(trellis_spec(8), identity_metric(8));
  REQUIRE(codec->bytes_per_block() == 6);
  for (unsigned pattern = 0; pattern < 65536; pattern += 7) {
    uint8_t row[6] = {static_cast<uint8_t>(pattern & 255), static_cast<uint8_t>(pattern >> 8)};
    const uint16_t pair[2] = {oscar::float_to_fp16(0.25F), oscar::float_to_fp16(-1.0F)};
    std::memcpy(row + 2, pair, 4);
    std::vector<int> codes(8);
    for (size_t d = 0; d < 8; ++d) codes[d] = static_cast<int>((pattern >> (2 * d)) & 3U);
    const std::vector<int> levels = levels_of(codes);
    float values[8];
    codec->decode(row, 1, values, 8);
    for (size_t d = 0; d < 8; ++d)
      REQUIRE(values[d] == 0.25F * static_cast<float>(levels[d]) - 1.0F);
  }
}

TEST_CASE("trellis: in the identity metric the path is the optimum", "[quant]") {
  CodecSpec spec = trellis_spec(8);
  spec.feedback.multipliers = {1.0};
  const auto codec = oscar::make_codec(spec, identity_metric(8));
  const std::vector<float> rows = normal_rows(1, 10, 8);
  const auto result = round_trip(*codec, rows);
  for (size_t row = 0; row < 10; ++row) {
    uint16_t half[2];
    std::memcpy(half, result.bytes.data() + row * 6 + 2, 4);
    const double scale = static_cast<double>(oscar::fp16_to_float(half[0]));
    const double low = static_cast<double>(oscar::fp16_to_float(half[1]));
    double least = HUGE_VAL, found = 0.0;
    for (unsigned pattern = 0; pattern < 65536; ++pattern) {
      std::vector<int> codes(8);
      for (size_t d = 0; d < 8; ++d) codes[d] = static_cast<int>((pattern >> (2 * d)) & 3U);
      const std::vector<int> levels = levels_of(codes);
      double cost = 0.0;
      for (size_t d = 0; d < 8; ++d)
        cost += std::pow(static_cast<double>(rows[row * 8 + d]) - scale * levels[d] - low, 2);
      least = std::min(least, cost);
    }
    for (size_t d = 0; d < 8; ++d)
      found += std::pow(
          static_cast<double>(rows[row * 8 + d]) - static_cast<double>(result.values[row * 8 + d]),
          2);
    CHECK(found == Approx(least).epsilon(1e-5));
  }
}

TEST_CASE("trellis: the same bits lose less than four levels", "[quant]") {
  const std::vector<float> rows = normal_rows(2, 100, 64);
  for (const auto& metric : {identity_metric(64), random_metric(3, 64, 0.3)}) {
    const auto error_of = [&](const CodecSpec& spec) {
      const auto result = round_trip(*oscar::make_codec(spec, metric), rows);
      return oscar::measure_distortion(rows.data(), result.values.data(), 100, 64, 64, 64,
                                       metric.get())
          .metric_error();
    };
    CodecSpec four = trellis_spec(64);
    four.levels = Levels::kUniform;
    const double uniform = error_of(four);
    const double trellis = error_of(trellis_spec(64));
    CHECK(trellis < 0.85 * uniform);
    CodecSpec refitted = trellis_spec(64);
    refitted.feedback.refits = 1;
    CHECK(error_of(refitted) < trellis);
    CHECK(oscar::make_codec(four, metric)->bytes_per_block() ==
          oscar::make_codec(refitted, metric)->bytes_per_block());
  }
}

TEST_CASE("trellis: gain, metadata formats, degenerate rows", "[quant]") {
  const auto metric = random_metric(4, 64, 1.0);
  for (const MetaFormat meta :
       {MetaFormat::kScaleMinFp16, MetaFormat::kScaleZeroFp32, MetaFormat::kScaleZeroBf16,
        MetaFormat::kLog8, MetaFormat::kSymmetricFp16}) {
    CodecSpec spec = trellis_spec(64);
    spec.meta = meta;
    spec.gain = GainRule::kMetric;
    spec.feedback.refits = 1;
    const auto codec = oscar::make_codec(spec, metric);
    const std::vector<float> rows = normal_rows(5, 30, 64);
    const auto result = round_trip(*codec, rows);
    CHECK(result.stats.rows == 30);
    CHECK(result.stats.scale_saturated == 0);
    const auto distortion =
        oscar::measure_distortion(rows.data(), result.values.data(), 30, 64, 64, 64, metric.get());
    CHECK(distortion.relative_metric_error() < 0.12);
    // The first dims start from state 0 and do not reach the outermost symmetric levels.
    if (meta == MetaFormat::kSymmetricFp16) continue;
    for (const float constant : {0.0F, 0.7F, -3.3F}) {
      const std::vector<float> flat(64 * 2, constant);
      const auto decoded = round_trip(*codec, flat);
      for (const float value : decoded.values)
        REQUIRE(std::abs(static_cast<double>(value - constant)) <=
                std::abs(static_cast<double>(constant)) *
                    (meta == MetaFormat::kLog8 ? 0.03 : 0x1p-7));
    }
  }
  std::vector<float> bad = normal_rows(6, 3, 64);
  bad[2 * 64 + 9] = std::nanf("");
  CHECK_THROWS_WITH(round_trip(*oscar::make_codec(trellis_spec(64), metric), bad),
                    Catch::Contains("row 2"));
  for (size_t d = 0; d < 64; ++d) bad[2 * 64 + d] = 1e6F * static_cast<float>(1 + d % 3);
  CHECK_THROWS_WITH(round_trip(*oscar::make_codec(trellis_spec(64), metric), bad),
                    Catch::Contains("does not fit"));
}

TEST_CASE("trellis: what it cannot do is refused", "[quant]") {
  const auto metric = identity_metric(64);
  CodecSpec spec = trellis_spec(64);
  spec.feedback.sweeps = 1;
  CHECK_THROWS_WITH(oscar::make_codec(spec, metric), Catch::Contains("sweeps"));
  spec = trellis_spec(64);
  spec.bits = 4;
  CHECK_THROWS_WITH(oscar::make_codec(spec, metric), Catch::Contains("2 bits"));
  spec = trellis_spec(64);
  spec.encoder = Encoder::kRtn;
  CHECK_THROWS_WITH(oscar::make_codec(spec, metric), Catch::Contains("feedback encoder"));
  CHECK_THROWS_WITH(oscar::make_codec(trellis_spec(64)), Catch::Contains("needs a metric"));
}
