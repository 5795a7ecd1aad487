// Impossible codec specifications are refused with the option's name; nominal sizes.
#include "base/error.h"
#include "codec_helpers.h"

using oscar::CodecSpec;
using oscar::MetaFormat;

namespace {

CodecSpec valid() {
  CodecSpec spec;
  spec.head_dim = 128;
  return spec;
}

}  // namespace

#define CHECK_REFUSED(change, word)                                    \
  do {                                                                 \
    CodecSpec spec = valid();                                          \
    change;                                                            \
    CHECK_THROWS_WITH(oscar::make_codec(spec), Catch::Contains(word)); \
  } while (false)

TEST_CASE("codec spec: refusals name the option", "[quant]") {
  CHECK_NOTHROW(oscar::make_codec(valid()));
  CHECK_REFUSED(spec.bits = 3, "bits");
  CHECK_REFUSED(spec.head_dim = 0, "head_dim");
  CHECK_REFUSED(spec.head_dim = 66, "head_dim");
  CHECK_REFUSED(spec.head_dim = -4, "head_dim");
  CHECK_REFUSED(spec.group = 48, "group");
  CHECK_REFUSED(spec.group = 256, "group");
  CHECK_REFUSED(spec.group = -1, "group");
  CHECK_REFUSED(spec.clip_ratio = 1.01, "clip_ratio");
  CHECK_REFUSED(spec.clip_ratio = -0.1, "clip_ratio");
  CHECK_REFUSED(spec.clip_ratio = std::nan(""), "clip_ratio");
  CHECK_REFUSED(spec.meta = MetaFormat::kLog8, "log8_scale_max");
  CHECK_REFUSED(spec.encoder = oscar::Encoder::kFeedback, "needs a metric");
  CHECK_REFUSED(spec.gain = oscar::GainRule::kMetric, "needs a metric");
  CHECK_REFUSED((spec.levels = oscar::Levels::kLloydMax, spec.bits = 4), "2 bits");
  CHECK_REFUSED((spec.levels = oscar::Levels::kLloydMax, spec.group = 32), "one group");
  CHECK_REFUSED((spec.encoder = oscar::Encoder::kFeedback, spec.group = 64), "one group");
  CHECK_REFUSED((spec.encoder = oscar::Encoder::kFeedback, spec.clip_ratio = 0.9), "start_clip");
  CHECK_REFUSED((spec.encoder = oscar::Encoder::kFeedback, spec.feedback.multipliers = {}),
                "multipliers");
  CHECK_REFUSED((spec.encoder = oscar::Encoder::kFeedback, spec.feedback.sweeps = -1), "sweeps");
  CHECK_REFUSED((spec.encoder = oscar::Encoder::kFeedback, spec.feedback.refit_multipliers = {0.0}),
                "refit_multipliers");
  CHECK_REFUSED((spec.clip_rule = oscar::ClipRule::kRangeGrid, spec.clip_ratio = 0.9),
                "clip ratio");
  CHECK_REFUSED((spec.clip_rule = oscar::ClipRule::kRangeGrid, spec.group = 64), "one group");
  CHECK_REFUSED(
      (spec.clip_rule = oscar::ClipRule::kRangeGrid, spec.encoder = oscar::Encoder::kFeedback),
      "rtn encoder");
  CHECK_REFUSED((spec.clip_rule = oscar::ClipRule::kRangeGrid,
                 spec.axis = oscar::GroupAxis::kTokens, spec.group = 32),
                "no clip");
  CHECK_REFUSED((spec.axis = oscar::GroupAxis::kTokens, spec.group = 0), "tokens");
  CHECK_REFUSED((spec.axis = oscar::GroupAxis::kTokens, spec.group = 32, spec.clip_ratio = 0.9),
                "no clip");
  CodecSpec spec = valid();
  spec.gain = oscar::GainRule::kMetric;
  CHECK_THROWS_WITH(oscar::make_codec(spec, oscar_test::random_metric(1, 64)),
                    Catch::Contains("64") && Catch::Contains("128"));
  // The plain gain needs no metric.
  spec.gain = oscar::GainRule::kPlain;
  CHECK_NOTHROW(oscar::make_codec(spec));
}

TEST_CASE("codec spec: nominal bits and bytes", "[quant]") {
  CodecSpec spec = valid();
  CHECK(oscar::nominal_bits(spec) == 2.25);
  CHECK(oscar::make_codec(spec)->bytes_per_block() == 36);
  spec.meta = MetaFormat::kScaleZeroFp32;
  CHECK(oscar::nominal_bits(spec) == 2.5);
  spec.group = 64;
  CHECK(oscar::nominal_bits(spec) == 3.0);
  CHECK(oscar::make_codec(spec)->bytes_per_block() == 48);
  spec = valid();
  spec.meta = MetaFormat::kLog8;
  spec.log8_scale_max = 1.0F;
  CHECK(oscar::nominal_bits(spec) == 2.125);
  CHECK(oscar::make_codec(spec)->bytes_per_block() == 34);
  spec = valid();
  spec.axis = oscar::GroupAxis::kTokens;
  spec.group = 32;
  CHECK(oscar::nominal_bits(spec) == 3.0);
  CHECK(oscar::make_codec(spec)->bytes_per_block() == 32 * 32 + 128 * 4);
  CHECK(oscar::make_codec(spec)->token_block() == 32);
}

TEST_CASE("codec: groups over tokens take the range of each channel", "[quant]") {
  for (const int bits : {2, 4, 8})
    for (const int head_dim : {64, 100}) {
      CodecSpec spec;
      spec.bits = bits;
      spec.head_dim = head_dim;
      spec.axis = oscar::GroupAxis::kTokens;
      spec.group = 32;
      const auto width = static_cast<size_t>(head_dim);
      std::vector<float> rows = oscar_test::normal_rows(3, 64, width);
      for (size_t i = 0; i < rows.size(); ++i) {
        const size_t channel = i % width;
        if (channel == 1) rows[i] = 0.0F;
        if (channel == 2) rows[i] = 0.25F;
        rows[i] =
            rows[i] * static_cast<float>(1 + channel % 7) + 3.0F * static_cast<float>(channel);
      }
      const auto result = oscar_test::round_trip(spec, rows);
      CHECK(result.stats.rows == 64);
      CHECK(result.stats.meta_fallbacks == 4);  // two constant channels in two blocks
      for (size_t block = 0; block < 2; ++block)
        for (size_t channel = 0; channel < width; ++channel) {
          double low = 1e30, high = -1e30;
          for (size_t token = block * 32; token < (block + 1) * 32; ++token) {
            low = std::min(low, static_cast<double>(rows[token * width + channel]));
            high = std::max(high, static_cast<double>(rows[token * width + channel]));
          }
          const double bound = 0.5 * (high - low) / ((1 << bits) - 1) +
                               (std::abs(low) + 2.0 * (high - low)) * 0x1p-11;
          for (size_t token = block * 32; token < (block + 1) * 32; ++token) {
            const size_t i = token * width + channel;
            REQUIRE(std::abs(static_cast<double>(rows[i]) -
                             static_cast<double>(result.values[i])) <= bound);
          }
        }
    }
}

TEST_CASE("codec: groups over tokens, bytes of a small block", "[quant]") {
  CodecSpec spec;
  spec.head_dim = 4;
  spec.axis = oscar::GroupAxis::kTokens;
  spec.group = 4;
  const std::vector<float> rows = {0, 10, -1, 5,  //
                                   1, 16, -2, 5,  //
                                   2, 12, -3, 5,  //
                                   3, 14, -4, 5};
  const auto result = oscar_test::round_trip(spec, rows);
  // codes 0 0 3 0 | 1 3 2 0 | 2 1 1 0 | 3 2 0 0, then (scale, min) of 1 0 | 2 10 | 1 -4 | 1 5
  CHECK(oscar_test::hex(result.bytes.data(), 4) == "302d160b");
  CHECK(oscar_test::hex(result.bytes.data() + 4, 16) ==
        "003c0000004000490"
        "03c00c4003c0045");
  CHECK(result.values == rows);
  std::vector<float> bad = rows;
  bad[9] = HUGE_VALF;
  CHECK_THROWS_WITH(oscar_test::round_trip(spec, bad), Catch::Contains("row 2"));
}

TEST_CASE("sets of multipliers are read and written as arms name them") {
  CHECK(oscar::parse_multipliers("0.9/1/1.1") == std::vector<double>{0.9, 1.0, 1.1});
  CHECK(oscar::parse_multipliers("0.1/10") == std::vector<double>{0.1, 10.0});
  for (const char* text :
       {"", "/", "1/", "/1", "0.9//1", "0.09", "10.1", "nan", "1e", "0.9,1", "-1", " 1"}) {
    INFO(text);
    CHECK_FALSE(oscar::parse_multipliers(text).has_value());
  }
  CHECK(oscar::multipliers_text({0.85, 1.0, 1.15}) == "0.85/1/1.15");
  CHECK(oscar::multipliers_text({}).empty());
}
