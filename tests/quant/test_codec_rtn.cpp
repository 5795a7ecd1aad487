// Properties of the plain-rounding codec: every code byte, every shape, error bounds, fixpoints,
// degenerate rows, refusals, and equal bits from every version of the inner loops.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/float16.h"
#include "codec_helpers.h"
#include "quant/clip.h"
#include "support/compare.h"

using oscar::ClipRule;
using oscar::CodecSpec;
using oscar::MetaFormat;
using oscar::PackOrder;
using oscar_test::normal_rows;
using oscar_test::round_trip;

namespace {

constexpr MetaFormat kAllMeta[] = {MetaFormat::kScaleZeroFp32,     MetaFormat::kScaleZeroBf16,
                                   MetaFormat::kScaleZeroFp16,     MetaFormat::kScaleMinFp16,
                                   MetaFormat::kScaleMinFp16First, MetaFormat::kLog8,
                                   MetaFormat::kSymmetricFp16};
constexpr int kHeadDims[] = {4, 64, 80, 96, 100, 112, 128, 192, 256};

CodecSpec make_spec(int head_dim, int group, int bits, MetaFormat meta, PackOrder order,
                    double clip = 0.0) {
  CodecSpec spec;
  spec.head_dim = head_dim;
  spec.group = group;
  spec.bits = bits;
  spec.meta = meta;
  spec.order = order;
  spec.clip_ratio = clip;
  spec.log8_scale_max = 4.0F;
  return spec;
}

// Every specification the shapes allow.
template <class Visit>
void for_all_specs(const Visit& visit) {
  for (const int head_dim : kHeadDims)
    for (const int group : {0, 32, 64, 128})
      for (const int bits : {2, 4, 8})
        for (const MetaFormat meta : kAllMeta)
          for (const PackOrder order : {PackOrder::kConsecutive, PackOrder::kQuartered})
            if (group == 0 || (group < head_dim && head_dim % group == 0))
              visit(make_spec(head_dim, group, bits, meta, order));
}

// The same, and each one-group specification with the range grid.
template <class Visit>
void for_all_specs_and_range_grids(const Visit& visit) {
  for_all_specs([&](CodecSpec spec) {
    visit(spec);
    spec.clip_rule = ClipRule::kRangeGrid;
    if (spec.group == 0) visit(spec);
  });
}

std::string describe(const CodecSpec& spec) {
  return oscar::cat("head_dim ", spec.head_dim, " group ", spec.group, " bits ", spec.bits,
                    " meta ", static_cast<int>(spec.meta), " order ", static_cast<int>(spec.order),
                    " clip ", spec.clip_ratio, " rule ", static_cast<int>(spec.clip_rule));
}

}  // namespace

TEST_CASE("codec: every code byte decodes to its own codes, in both orders", "[quant]") {
  for (const oscar::LaneKernels* kernels : oscar_test::all_kernels())
    for (const int bits : {2, 4, 8})
      for (const int head_dim : {16, 64, 80, 96, 100, 128})
        for (const PackOrder order : {PackOrder::kConsecutive, PackOrder::kQuartered}) {
          const CodecSpec spec = make_spec(head_dim, 0, bits, MetaFormat::kScaleMinFp16, order);
          INFO(describe(spec) << " on " << kernels->name);
          const auto codec = oscar::make_codec_with(spec, nullptr, *kernels);
          const auto width = static_cast<size_t>(head_dim);
          const int per_byte = 8 / bits;
          std::vector<uint8_t> row(codec->bytes_per_block());
          std::vector<float> values(width), expected(width);
          for (int byte = 0; byte < 256; ++byte) {
            const size_t code_bytes = width / static_cast<size_t>(per_byte);
            for (size_t j = 0; j < code_bytes; ++j)
              row[j] = static_cast<uint8_t>(byte + static_cast<int>(j) * 37);
            const uint16_t pair[2] = {oscar::float_to_fp16(0.5F), oscar::float_to_fp16(-3.0F)};
            std::memcpy(row.data() + code_bytes, pair, 4);
            for (size_t d = 0; d < width; ++d) {
              const bool consecutive = order == PackOrder::kConsecutive;
              const size_t n = static_cast<size_t>(per_byte);
              const size_t j = consecutive ? d / n : d % code_bytes;
              const size_t place = consecutive ? d % n : d / code_bytes;
              const int code = (row[j] >> (static_cast<size_t>(bits) * place)) & ((1 << bits) - 1);
              expected[d] = 0.5F * static_cast<float>(code) - 3.0F;
            }
            codec->decode(row.data(), 1, values.data(), width);
            REQUIRE(values == expected);
            // Rows that reach both ends of the range come back to the same bytes.
            const auto [low, high] = std::minmax_element(expected.begin(), expected.end());
            if (*low != -3.0F || *high != 0.5F * static_cast<float>((1 << bits) - 1) - 3.0F)
              continue;
            std::vector<uint8_t> again(row.size());
            codec->encode(expected.data(), width, 1, again.data(), nullptr);
            REQUIRE(again == row);
          }
        }
}

TEST_CASE("codec: error is at most half a step plus what the metadata lose", "[quant]") {
  for_all_specs([](const CodecSpec& spec) {
    INFO(describe(spec));
    const std::vector<float> rows = normal_rows(7, 21, static_cast<size_t>(spec.head_dim), 2.0);
    const auto result = round_trip(spec, rows);
    CHECK(result.stats.rows == 21);
    CHECK(result.stats.scale_saturated == 0);
    const int group = spec.group == 0 ? spec.head_dim : spec.group;
    const double steps = (1 << spec.bits) - 1;
    for (size_t first = 0; first < rows.size(); first += static_cast<size_t>(group)) {
      const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(first);
      const auto [low, high] = std::minmax_element(begin, begin + group);
      double range = static_cast<double>(*high) - static_cast<double>(*low);
      const double largest =
          std::max(std::abs(static_cast<double>(*high)), std::abs(static_cast<double>(*low)));
      if (spec.meta == MetaFormat::kSymmetricFp16) range = 2.0 * largest;
      double relative = 2.0 * 0x1p-22;  // of scale and offset: float arithmetic
      if (oscar::meta_bits(spec.meta) == 16)
        relative = 2.0 * (spec.meta == MetaFormat::kScaleZeroBf16 ? 0x1p-8 : 0x1p-11);
      double bound = 0.5 * range / steps + relative * (largest + range);
      // log8: the scale is off by at most 1.1 %, the zero by L / 192 steps; a grid that has become
      // too short loses the end.
      if (spec.meta == MetaFormat::kLog8) bound = 0.5 * range / steps * 1.011 + 0.017 * range;
      for (size_t i = first; i < first + static_cast<size_t>(group); ++i)
        REQUIRE(std::abs(static_cast<double>(result.values[i]) - static_cast<double>(rows[i])) <=
                bound);
    }
  });
}

TEST_CASE("codec: dequantized rows are a fixpoint", "[quant]") {
  for_all_specs([](const CodecSpec& spec) {
    // The other conventions round the zero: their grid moves by an ulp of the metadata.
    if (spec.meta != MetaFormat::kScaleMinFp16 && spec.meta != MetaFormat::kScaleMinFp16First)
      return;
    INFO(describe(spec));
    const std::vector<float> rows = normal_rows(8, 5, static_cast<size_t>(spec.head_dim));
    const auto once = round_trip(spec, rows);
    const auto twice = round_trip(spec, once.values);
    if (spec.bits <= 4) {
      CHECK(twice.values == once.values);
    } else {  // 255 steps of a rounded scale: the range may round to its neighbour
      CHECK_CLOSE(twice.values.data(), once.values.data(), rows.size(), {.absolute = 0.02});
    }
  });
}

TEST_CASE("codec: all versions of the inner loops give the same bytes and values", "[quant]") {
  const auto compare_versions = [](const CodecSpec& spec) {
    INFO(describe(spec));
    const std::vector<float> rows = normal_rows(9, 35, static_cast<size_t>(spec.head_dim), 6.0);
    const auto reference =
        round_trip(*oscar::make_codec_with(spec, nullptr, *oscar::scalar_lane_kernels()), rows);
    for (const oscar::LaneKernels* kernels : oscar_test::all_kernels()) {
      INFO(kernels->name);
      const auto result = round_trip(*oscar::make_codec_with(spec, nullptr, *kernels), rows);
      REQUIRE(result.bytes == reference.bytes);
      REQUIRE(result.values == reference.values);
      REQUIRE(result.stats.meta_fallbacks == reference.stats.meta_fallbacks);
      REQUIRE(result.stats.gain_clamped == reference.stats.gain_clamped);
    }
  };
  for_all_specs([&](CodecSpec spec) {
    compare_versions(spec);
    spec.clip_ratio = 0.92;
    spec.gain = oscar::GainRule::kPlain;
    compare_versions(spec);
    if (spec.group != 0) return;
    spec.clip_ratio = 0.0;
    spec.clip_rule = ClipRule::kRangeGrid;
    compare_versions(spec);
  });
  for (const double clip : {0.1, 0.5, 0.77, 0.85, 0.96, 1.0})
    for (const ClipRule rule :
         {ClipRule::kOrderStatistic, ClipRule::kBisect, ClipRule::kQuantile}) {
      CodecSpec spec =
          make_spec(128, 0, 2, MetaFormat::kScaleMinFp16, PackOrder::kConsecutive, clip);
      spec.clip_rule = rule;
      compare_versions(spec);
      spec.meta = MetaFormat::kScaleZeroFp32;
      spec.levels = oscar::Levels::kLloydMax;
      compare_versions(spec);
      spec.levels = oscar::Levels::kLloydExact;
      spec.gain = oscar::GainRule::kPlain;
      compare_versions(spec);
    }
}

TEST_CASE("codec: any bytes decode, to the same bits in every version", "[quant]") {
  oscar::Random random(16);
  for_all_specs([&](const CodecSpec& spec) {
    INFO(describe(spec));
    const auto width = static_cast<size_t>(spec.head_dim);
    const auto reference = oscar::make_codec_with(spec, nullptr, *oscar::scalar_lane_kernels());
    std::vector<uint8_t> bytes(9 * reference->bytes_per_block());
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.below(256));
    std::vector<float> expected(9 * width), values(9 * width);
    reference->decode(bytes.data(), 9, expected.data(), width);
    for (const oscar::LaneKernels* kernels : oscar_test::all_kernels()) {
      oscar::make_codec_with(spec, nullptr, *kernels)
          ->decode(bytes.data(), 9, values.data(), width);
      REQUIRE(std::memcmp(values.data(), expected.data(), values.size() * sizeof(float)) == 0);
    }
  });
}

TEST_CASE("codec: symmetric metadata, bytes and exact zeros", "[quant]") {
  CodecSpec spec = make_spec(8, 0, 2, MetaFormat::kSymmetricFp16, PackOrder::kConsecutive);
  const auto codec = oscar::make_codec(spec);
  CHECK(codec->bytes_per_block() == 4);
  CHECK(oscar::nominal_bits(spec) == 4.0);
  // scale 2 * 3 / 3 = 2, levels -3 -1 1 3
  const std::vector<float> row = {-3.0F, -1.0F, 1.0F, 3.0F, 0.9F, -0.1F, 2.1F, -2.5F};
  const auto result = round_trip(*codec, row);
  CHECK(oscar_test::hex(result.bytes.data(), 4) == "e4360040");
  CHECK(result.values == std::vector<float>{-3.0F, -1.0F, 1.0F, 3.0F, 1.0F, -1.0F, 3.0F, -3.0F});
  for (const float value : round_trip(*codec, std::vector<float>(8, 0.0F)).values)
    CHECK(value == 0.0F);
}

TEST_CASE("codec: rows of zeros and constant rows", "[quant]") {
  for_all_specs_and_range_grids([](const CodecSpec& spec) {
    INFO(describe(spec));
    for (const float constant : {0.0F, 0.7F, -3.3F, 1000.0F, -1e-6F}) {
      const std::vector<float> rows(3 * static_cast<size_t>(spec.head_dim), constant);
      const auto result = round_trip(spec, rows);
      double tolerance = 0.0;  // fp32: exact
      const double size = std::abs(static_cast<double>(constant));
      if (spec.meta == MetaFormat::kScaleZeroBf16) tolerance = size * 0x1p-8;
      if (oscar::meta_bits(spec.meta) == 16) tolerance = std::max(size * 0x1p-8, 0x1p-24);
      // The outermost symmetric level is L/2 scales out, and a scale is off by half a subnormal
      // step.
      if (spec.meta == MetaFormat::kSymmetricFp16)
        tolerance = std::max(size * 0x1p-10, 0.5 * ((1 << spec.bits) - 1) * 0x1p-25);
      // log8 can be off by half a step of the zero at the scale that reaches the value, or at the
      // smallest scale; it cannot pass its largest scale.
      if (spec.meta == MetaFormat::kLog8)
        tolerance = constant == 0.0F ? 0.0
                    : size < 10.0    ? std::max(size, 4.0 * 8.0 / 256.0) / 96.0
                                     : size;
      for (size_t i = 0; i < rows.size(); ++i)
        REQUIRE(std::abs(static_cast<double>(result.values[i]) - static_cast<double>(constant)) <=
                tolerance);
      if (!oscar::holds_constants(spec.meta)) CHECK(result.stats.meta_fallbacks >= 3);
    }
  });
}

TEST_CASE("codec: huge means stay finite and keep their value", "[quant]") {
  for_all_specs_and_range_grids([](const CodecSpec& spec) {
    INFO(describe(spec));
    std::vector<float> rows = normal_rows(11, 4, static_cast<size_t>(spec.head_dim));
    for (float& value : rows) value = 3000.0F + 0.01F * value;
    const auto result = round_trip(spec, rows);
    // The offset is as good as the metadata type; log8 saturates at 4/3 L + L/2 steps of s_max.
    const double tolerance = spec.meta == MetaFormat::kLog8            ? 3000.0
                             : spec.meta == MetaFormat::kScaleZeroFp32 ? 0.1
                             : spec.meta == MetaFormat::kScaleZeroBf16 ? 24.0
                                                                       : 3.0;
    for (size_t i = 0; i < rows.size(); ++i) {
      REQUIRE(std::isfinite(result.values[i]));
      REQUIRE(std::abs(static_cast<double>(result.values[i]) - static_cast<double>(rows[i])) <=
              tolerance);
    }
    if (spec.meta == MetaFormat::kLog8) CHECK(result.stats.scale_saturated > 0);
  });
}

TEST_CASE("codec: a row that the metadata cannot hold is refused by number", "[quant]") {
  for (const MetaFormat meta : {MetaFormat::kScaleMinFp16, MetaFormat::kScaleZeroFp16}) {
    const CodecSpec spec = make_spec(64, 0, 2, meta, PackOrder::kConsecutive);
    std::vector<float> rows = normal_rows(12, 20, 64);
    rows[17 * 64 + 5] = 1e6F;
    CHECK_THROWS_WITH(round_trip(spec, rows),
                      Catch::Contains("row 17") && Catch::Contains("16-bit metadata"));
  }
  std::vector<float> rows(64, 3e38F);
  rows[1] = -3e38F;
  CHECK_THROWS_AS(
      round_trip(make_spec(64, 0, 2, MetaFormat::kScaleZeroFp32, PackOrder::kConsecutive), rows),
      oscar::Error);
}

TEST_CASE("codec: non-finite input is refused by row", "[quant]") {
  const float bad_values[] = {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()};
  for (const oscar::LaneKernels* kernels : oscar_test::all_kernels())
    for (const int head_dim : {64, 100})
      for (const float bad : bad_values)
        for (const size_t row : {size_t{0}, size_t{18}, size_t{19}})
          for (const size_t dim : {size_t{0}, static_cast<size_t>(head_dim) - 1}) {
            const auto codec = oscar::make_codec_with(
                make_spec(head_dim, 0, 2, MetaFormat::kScaleMinFp16, PackOrder::kConsecutive),
                nullptr, *kernels);
            std::vector<float> rows = normal_rows(13, 20, static_cast<size_t>(head_dim));
            rows[row * static_cast<size_t>(head_dim) + dim] = bad;
            CHECK_THROWS_WITH(round_trip(*codec, rows),
                              Catch::Contains(oscar::cat("row ", row, " ")));
          }
}

TEST_CASE("codec: strides, and nothing written beside the rows", "[quant]") {
  const CodecSpec spec =
      make_spec(80, 0, 2, MetaFormat::kScaleMinFp16, PackOrder::kConsecutive, 0.92);
  const auto codec = oscar::make_codec(spec);
  const std::vector<float> rows = normal_rows(14, 19, 80);
  std::vector<float> spread(19 * 93, 1e30F);
  for (size_t row = 0; row < 19; ++row)
    std::copy_n(rows.data() + row * 80, 80, spread.data() + row * 93);
  const auto dense = round_trip(*codec, rows);
  std::vector<uint8_t> bytes(dense.bytes.size() + 8, 0xa5);
  codec->encode(spread.data(), 93, 19, bytes.data(), nullptr);
  CHECK(std::equal(dense.bytes.begin(), dense.bytes.end(), bytes.begin()));
  for (size_t i = dense.bytes.size(); i < bytes.size(); ++i) CHECK(bytes[i] == 0xa5);
  std::vector<float> decoded(19 * 93, 7.0F);
  codec->decode(bytes.data(), 19, decoded.data(), 93);
  for (size_t row = 0; row < 19; ++row) {
    CHECK(std::equal(decoded.data() + row * 93, decoded.data() + row * 93 + 80,
                     dense.values.data() + row * 80));
    for (size_t i = 80; i < 93; ++i) CHECK(decoded[row * 93 + i] == 7.0F);
  }
}

TEST_CASE("codec: the plain gain makes the error orthogonal to the row", "[quant]") {
  CodecSpec spec = make_spec(128, 0, 2, MetaFormat::kScaleZeroFp32, PackOrder::kConsecutive, 0.92);
  const std::vector<float> rows = normal_rows(15, 50, 128);
  const auto projection = [&](const std::vector<float>& values) {
    double worst = 0.0;
    for (size_t row = 0; row < 50; ++row) {
      double xx = 0.0, xy = 0.0;
      for (size_t i = row * 128; i < (row + 1) * 128; ++i) {
        xx += static_cast<double>(rows[i]) * static_cast<double>(rows[i]);
        xy += static_cast<double>(rows[i]) * static_cast<double>(values[i]);
      }
      worst = std::max(worst, std::abs(1.0 - xy / xx));
    }
    return worst;
  };
  const auto without = round_trip(spec, rows);
  spec.gain = oscar::GainRule::kPlain;
  const auto with = round_trip(spec, rows);
  CHECK(projection(without.values) > 0.05);
  CHECK(projection(with.values) < 1e-6);
  CHECK(with.stats.gain_clamped == 0);
  // Only scale changes, the codes and zeros stay.
  for (size_t row = 0; row < 50; ++row) {
    CHECK(std::equal(with.bytes.data() + row * 40, with.bytes.data() + row * 40 + 32,
                     without.bytes.data() + row * 40));
    CHECK(std::equal(with.bytes.data() + row * 40 + 36, with.bytes.data() + row * 40 + 40,
                     without.bytes.data() + row * 40 + 36));
  }
  // A clip that leaves almost nothing would need a gain beyond its clamp.
  spec.clip_ratio = 0.2;
  CHECK(round_trip(spec, rows).stats.gain_clamped == 50);
}
