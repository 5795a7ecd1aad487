// The test vectors of the format specification: bytes, metadata, levels and errors, for every
// version of the inner loops.
#include <algorithm>
#include <cstring>

#include "codec_helpers.h"
#include "support/compare.h"

using oscar::ClipRule;
using oscar::CodecSpec;
using oscar::Levels;
using oscar::MetaFormat;
using oscar::PackOrder;

namespace {

const std::vector<float> kRow = {-1.5F,  0.25F,  2.0F,  -0.5F, 0.75F, 3.0F,   -2.0F, 1.0F,
                                 0.125F, -0.75F, 1.25F, -1.0F, 0.5F,  -0.25F, 1.75F, -1.25F};

struct Expected {
  const char* name;
  int group;
  double clip;
  Levels levels;
  std::string quartered, consecutive;  // code bytes; consecutive may be empty
  std::vector<float> first_pair;       // scale, zero of group 0
  std::vector<double> level_values;    // of the last group, for codes 0 .. 3
  double mse;                          // 0 = not given
};

const std::vector<Expected>& expectations() {
  static const std::vector<Expected> list = {
      {"g16 c0",
       16,
       0.0,
       Levels::kUniform,
       "985da219",
       "648e6526",
       {1.6666666F, 1.2F},
       {-2.0, -0.3333334, 1.3333333, 2.9999998},
       0.23665363},
      {"g16 c1",
       16,
       1.0,
       Levels::kUniform,
       "985da219",
       "648e6526",
       {1.6666666F, 1.2F},
       {-2.0, -0.3333334, 1.3333333, 2.9999998},
       0.23665363},
      {"g16 c0.9",
       16,
       0.9,
       Levels::kUniform,
       "a85ee359",
       "788e6676",
       {1.3333334F, 1.5F},
       {-2.0, -0.6666667, 0.6666667, 2.0},
       0.18283421},
      {"g16 c0.75",
       16,
       0.75,
       Levels::kUniform,
       "a85ef319",
       "788e7636",
       {1.1666666F, 1.5F},
       {-1.75, -0.5833333, 0.5833333, 1.75},
       0.19368489},
      {"g8 c0.75",
       8,
       0.75,
       Levels::kUniform,
       "985ef309",
       "788e3536",
       {1.1666666F, 1.5F},
       {-1.25, -0.25, 0.75, 1.75},
       0.0},
      {"lloyd-max",
       16,
       0.0,
       Levels::kLloydMax,
       "985ee319",
       "",
       {1.5578016F, 1.3645928F},
       {-2.1257648, -0.5679632, 0.9898384, 2.5476401},
       0.25209093},
      {"lloyd-exact",
       16,
       0.0,
       Levels::kLloydExact,
       "985ee319",
       "",
       {1.334429F, 0.2109375F},
       {-1.8034613, -0.3932653, 0.8151403, 2.2253363},
       0.17224871},
  };
  return list;
}

CodecSpec spec_of(const Expected& expected, PackOrder order) {
  CodecSpec spec;
  spec.head_dim = 16;
  spec.group = expected.group;
  spec.meta = MetaFormat::kScaleZeroFp32;
  spec.order = order;
  spec.clip_ratio = expected.clip;
  spec.levels = expected.levels;
  return spec;
}

double mean_square(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    sum += difference * difference;
  }
  return sum / static_cast<double>(a.size());
}

void check_vector(const Expected& expected, const oscar::LaneKernels& kernels) {
  INFO(expected.name << " on " << kernels.name);
  const auto quartered =
      oscar::make_codec_with(spec_of(expected, PackOrder::kQuartered), nullptr, kernels);
  const auto result = oscar_test::round_trip(*quartered, kRow);
  CHECK(oscar_test::hex(result.bytes.data(), 4) == expected.quartered);
  if (!expected.consecutive.empty()) {
    const auto codec =
        oscar::make_codec_with(spec_of(expected, PackOrder::kConsecutive), nullptr, kernels);
    const auto other = oscar_test::round_trip(*codec, kRow);
    CHECK(oscar_test::hex(other.bytes.data(), 4) == expected.consecutive);
    CHECK(other.values == result.values);
  }
  float pair[2];
  std::memcpy(pair, result.bytes.data() + 4, sizeof pair);
  CHECK_CLOSE(pair, expected.first_pair.data(), 2, {.relative = 1e-7});
  // Every value of the last group is one of the levels, and each level occurs.
  std::vector<float> distinct(result.values.end() - expected.group, result.values.end());
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  REQUIRE(distinct.size() == 4);
  CHECK_CLOSE(distinct.data(), expected.level_values.data(), 4, {.absolute = 1.2e-7});
  // The reference sums in float32: a few of its rounding steps.
  if (expected.mse > 0.0)
    CHECK(mean_square(result.values, kRow) == Approx(expected.mse).epsilon(4 * 0x1p-24));
}

}  // namespace

TEST_CASE("codec: reference vectors with fp32 scale and zero", "[quant]") {
  for (const oscar::LaneKernels* kernels : oscar_test::all_kernels())
    for (const Expected& expected : expectations()) check_vector(expected, *kernels);
}

TEST_CASE("codec: first scale has the exact bits of the reference", "[quant]") {
  const auto result =
      oscar_test::round_trip(spec_of(expectations()[0], PackOrder::kQuartered), kRow);
  CHECK(oscar_test::hex(result.bytes.data() + 4, 4) == "5555d53f");  // 3fd55555
}

TEST_CASE("codec: metadata rounding of the reference vector", "[quant]") {
  struct Case {
    MetaFormat meta;
    double scale, zero;
    std::vector<double> levels;
  };
  const std::vector<Case> cases = {{MetaFormat::kScaleZeroFp16,
                                    1.6669922,
                                    1.2001953,
                                    {-2.0007162, -0.3337240, 1.3332682, 3.0002604}},
                                   {MetaFormat::kScaleZeroBf16,
                                    1.6640625,
                                    1.203125,
                                    {-2.0020752, -0.3380127, 1.3260498, 2.9901123}}};
  for (const Case& expected : cases) {
    CodecSpec spec = spec_of(expectations()[0], PackOrder::kConsecutive);
    spec.meta = expected.meta;
    const auto result = oscar_test::round_trip(spec, kRow);
    CHECK(oscar_test::hex(result.bytes.data(), 4) == "648e6526");
    std::vector<float> distinct = result.values;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    REQUIRE(distinct.size() == 4);
    CHECK_CLOSE(distinct.data(), expected.levels.data(), 4, {.absolute = 1.2e-7});
    const oscar::MetaRule rule = oscar::make_meta_rule(spec);
    const oscar::StoredPair pair = oscar::read_pair(rule, result.bytes.data() + 4);
    CHECK(static_cast<double>(pair.scale) == Approx(expected.scale).epsilon(1e-7));
    CHECK(static_cast<double>(pair.second) == Approx(expected.zero).epsilon(1e-7));
  }
}

TEST_CASE("codec: vLLM rounds the pair first and clips at an interpolated quantile", "[quant]") {
  CodecSpec spec;
  spec.head_dim = 16;
  spec.meta = MetaFormat::kScaleMinFp16First;
  spec.clip_rule = ClipRule::kQuantile;
  for (const oscar::LaneKernels* kernels : oscar_test::all_kernels()) {
    spec.clip_ratio = 0.0;
    const auto plain =
        oscar_test::round_trip(*oscar::make_codec_with(spec, nullptr, *kernels), kRow);
    CHECK(oscar_test::hex(plain.bytes.data(), 8) == "648e6525ab3e00c0");
    std::vector<float> distinct = plain.values;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    const std::vector<double> levels = {-2.0, -0.3330078, 1.3339844, 3.0009766};
    REQUIRE(distinct.size() == 4);
    CHECK_CLOSE(distinct.data(), levels.data(), 4, {.absolute = 1.2e-7});
    spec.clip_ratio = 0.75;
    const auto clipped =
        oscar_test::round_trip(*oscar::make_codec_with(spec, nullptr, *kernels), kRow);
    CHECK(oscar_test::hex(clipped.bytes.data(), 8) == "788e76362b3c40be");
  }
}

TEST_CASE("codec: short check of the pack orders", "[quant]") {
  const std::vector<float> row = {0.0F, 1.0F, 2.0F, 3.0F, 0.0F, 1.0F, 2.0F, 3.0F};
  CodecSpec spec;
  spec.head_dim = 8;
  const auto consecutive = oscar_test::round_trip(spec, row);
  CHECK(oscar_test::hex(consecutive.bytes.data(), 2) == "e4e4");
  CHECK(consecutive.values == row);
  spec.order = PackOrder::kQuartered;
  const auto quartered = oscar_test::round_trip(spec, row);
  CHECK(oscar_test::hex(quartered.bytes.data(), 2) == "88dd");
  CHECK(quartered.values == row);
}

TEST_CASE("codec: our pair is fp16 scale and minimum, codes from the unrounded pair", "[quant]") {
  CodecSpec spec;
  spec.head_dim = 16;
  const auto result = oscar_test::round_trip(spec, kRow);
  CHECK(oscar_test::hex(result.bytes.data(), 8) == "648e6526ab3e00c0");
  CHECK(result.values[12] == 1.33398438F);  // code 2 where rounding first gives 1
}
