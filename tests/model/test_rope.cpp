// RoPE frequencies of every scaling against the format's vectors, and the rotation itself.
#include <catch2/catch.hpp>
#include <cmath>

#include "base/error.h"
#include "base/random.h"
#include "model/rope.h"
#include "support/compare.h"

using namespace oscar;

namespace {

// Ratio of the frequencies to the unscaled ones.
std::vector<double> multipliers(const RopeConfig& rope) {
  RopeConfig plain;
  plain.theta = rope.theta;
  plain.rotary_dim = rope.rotary_dim;
  const std::vector<double> base = rope_frequencies(plain);
  std::vector<double> result = rope_frequencies(rope);
  for (size_t i = 0; i < result.size(); ++i) result[i] /= base[i];
  return result;
}

}  // namespace

TEST_CASE("half-split rotation of the format's vector", "[rope]") {
  RopeConfig rope;
  rope.rotary_dim = 4;
  std::vector<float> x = {1, 2, 3, 4};
  const RopeTable table = make_rope_table(rope, 1, 1);
  apply_rope(table, {.rows = x.data(),
                     .num_tokens = 1,
                     .num_heads = 1,
                     .head_dim = 4,
                     .token_stride = 4,
                     .first_position = 1});
  const double expected[] = {-1.984111, 1.959901, 2.462378, 4.019800};
  CHECK_CLOSE(x.data(), expected, 4, {.absolute = 1e-6});  // printed digits
}

TEST_CASE("linear scaling and frequency divisors", "[rope]") {
  RopeConfig rope;
  rope.rotary_dim = 8;
  rope.scaling = "linear";
  rope.factor = 4.0;
  for (const double m : multipliers(rope)) CHECK(m == Approx(0.25));
  rope.scaling = "none";
  rope.factor = 1.0;
  rope.frequency_divisors = {1, 2, 4, 8};
  const double expected[] = {1, 0.5, 0.25, 0.125};
  CHECK_CLOSE(multipliers(rope).data(), expected, 4, {.relative = 1e-15});
  rope.frequency_divisors.pop_back();
  CHECK_THROWS_AS(rope_frequencies(rope), Error);
}

TEST_CASE("llama3 scaling", "[rope]") {
  RopeConfig rope;
  rope.rotary_dim = 8;
  rope.scaling = "llama3";
  rope.factor = 4;
  rope.low_freq_factor = 1;
  rope.high_freq_factor = 4;
  rope.original_context_length = 64;
  const double small[] = {1, 0.254648, 0.25, 0.25};
  CHECK_CLOSE(multipliers(rope).data(), small, 4, {.absolute = 1e-6});

  rope.rotary_dim = 64;
  rope.theta = 5e5;
  rope.factor = 32;
  rope.original_context_length = 8192;
  const std::vector<double> m = multipliers(rope);
  const double blended[] = {0.605573, 0.303743, 0.103448};
  CHECK_CLOSE(m.data() + 15, blended, 3, {.absolute = 1e-6});
  for (size_t i = 0; i < 15; ++i) CHECK(m[i] == 1.0);
  for (size_t i = 18; i < 32; ++i) CHECK(m[i] == Approx(1.0 / 32).epsilon(1e-12));
}

TEST_CASE("yarn scaling", "[rope]") {
  RopeConfig rope;
  rope.rotary_dim = 128;
  rope.theta = 1e6;
  rope.scaling = "yarn";
  rope.factor = 4;
  rope.original_context_length = 32768;
  const std::vector<double> m = multipliers(rope);
  const double expected[] = {1, 0.9558824, 0.6911765, 0.2941176, 0.25};
  const std::vector<double> actual = {m[23], m[24], m[30], m[39], m[40]};
  CHECK_CLOSE(actual.data(), expected, 5, {.absolute = 1e-7});

  // Without truncation the ramp starts at the fractional pair, so pair 23 is already below 1.
  rope.truncate = false;
  CHECK(multipliers(rope)[24] < 1.0);
  CHECK(multipliers(rope)[39] > 0.25);
  // An empty ramp is a step, not a division by zero.
  rope.truncate = true;
  rope.beta_fast = rope.beta_slow = 1e-9;
  for (const double value : multipliers(rope)) CHECK(std::isfinite(value));
}

TEST_CASE("rotation keeps norms, passes other dims, follows the position", "[rope]") {
  RopeConfig rope;
  rope.rotary_dim = 8;
  constexpr size_t kTokens = 5, kHeads = 3, kHeadDim = 12, kStride = 40;
  Random random(3);
  std::vector<float> before(kTokens * kStride);
  for (float& value : before) value = static_cast<float>(random.normal());
  std::vector<float> after = before;
  const RopeTable table = make_rope_table(rope, 90, 20);
  apply_rope(table, {.rows = after.data(),
                     .num_tokens = kTokens,
                     .num_heads = kHeads,
                     .head_dim = kHeadDim,
                     .token_stride = kStride,
                     .first_position = 100});
  for (size_t t = 0; t < kTokens; ++t) {
    const float* old_row = before.data() + t * kStride;
    const float* new_row = after.data() + t * kStride;
    for (size_t c = kHeads * kHeadDim; c < kStride; ++c) CHECK(old_row[c] == new_row[c]);
    for (size_t h = 0; h < kHeads; ++h) {
      const float* x = old_row + h * kHeadDim;
      const float* y = new_row + h * kHeadDim;
      for (size_t d = 8; d < kHeadDim; ++d) CHECK(x[d] == y[d]);
      for (size_t i = 0; i < 4; ++i) {
        const double angle =
            static_cast<double>(100 + t) * std::pow(1e4, -static_cast<double>(i) / 4);
        const double a = static_cast<double>(x[i]), b = static_cast<double>(x[i + 4]);
        // 4 roundings to float of values below 8
        const double tolerance = 8 * 4 * 0x1p-24;
        CHECK(static_cast<double>(y[i]) ==
              Approx(a * std::cos(angle) - b * std::sin(angle)).epsilon(0).margin(tolerance));
        CHECK(static_cast<double>(y[i + 4]) ==
              Approx(b * std::cos(angle) + a * std::sin(angle)).epsilon(0).margin(tolerance));
      }
    }
  }
}

TEST_CASE("the attention factor scales cos and sin", "[rope]") {
  RopeConfig rope;
  rope.rotary_dim = 4;
  rope.attention_factor = 1.5;
  const RopeTable table = make_rope_table(rope, 0, 1);
  CHECK(table.cos == std::vector<float>{1.5F, 1.5F});
  CHECK(table.sin == std::vector<float>{0, 0});
}

TEST_CASE("positions outside the table and bad widths are refused", "[rope]") {
  RopeConfig rope;
  rope.rotary_dim = 4;
  const RopeTable table = make_rope_table(rope, 2, 3);
  std::vector<float> x(8);
  RopeRows rows{.rows = x.data(),
                .num_tokens = 2,
                .num_heads = 1,
                .head_dim = 4,
                .token_stride = 4,
                .first_position = 4};
  CHECK_THROWS_AS(apply_rope(table, rows), Error);
  rows.first_position = 1;
  CHECK_THROWS_AS(apply_rope(table, rows), Error);
  rows.first_position = 2;
  rows.head_dim = 2;
  CHECK_THROWS_AS(apply_rope(table, rows), Error);
  rope.rotary_dim = 5;
  CHECK_THROWS_AS(rope_frequencies(rope), Error);
  rope.rotary_dim = 4;
  rope.scaling = "dynamic";
  CHECK_THROWS_AS(rope_frequencies(rope), Error);
}

TEST_CASE("undoing RoPE returns the rows, whatever the variant", "[rope]") {
  RopeConfig yarn{.rotary_dim = 32, .scaling = "yarn", .factor = 4.0};
  yarn.original_context_length = 512;
  yarn.attention_factor = 1.2;
  for (const RopeConfig& rope : {RopeConfig{.rotary_dim = 64}, yarn}) {
    const RopeTable table = make_rope_table(rope, 0, 9000);
    std::vector<float> rows(2 * 3 * 64);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 37) - 18.0F;
    const std::vector<float> before = rows;
    const RopeRows view{.rows = rows.data(),
                        .num_tokens = 2,
                        .num_heads = 3,
                        .head_dim = 64,
                        .token_stride = 3 * 64,
                        .first_position = 8990};
    apply_rope(table, view);
    CHECK(rows != before);
    undo_rope(table, view);
    // Two roundings of numbers up to 18.
    CHECK_CLOSE(rows.data(), before.data(), rows.size(), oscar_test::Tolerance{.absolute = 1e-5});
  }
}

TEST_CASE("RoPE constants survive their text, damaged texts are refused", "[rope]") {
  RopeConfig rope{.theta = 5e5, .rotary_dim = 8, .scaling = "llama3", .factor = 32.0};
  rope.original_context_length = 8192;
  rope.attention_factor = 1.0 / 3;
  rope.frequency_divisors = {1.0F, 1.5F, 0.3F, 32.0F};
  const RopeConfig back = rope_from_json(rope_to_json(rope), "file");
  CHECK(rope_frequencies(back) == rope_frequencies(rope));
  CHECK(back.attention_factor == rope.attention_factor);
  CHECK(rope_from_json("", "file").rotary_dim == 0);
  CHECK(rope_to_json(RopeConfig{}).empty());
  const auto refuse = [](const std::string& text, const std::string& expected) {
    CHECK_THROWS_WITH(rope_from_json(text, "c.h5"), Catch::Contains(expected));
  };
  refuse("{", "c.h5");
  refuse("{}", "theta");
  refuse(R"({"theta": 1e4, "rotary_dim": -2, "scaling": "none"})", "rotary width -2");
  refuse(R"({"theta": 1e4, "rotary_dim": 3, "scaling": "none"})", "even number");
  refuse(R"({"theta": 1e4, "rotary_dim": 4, "scaling": "ntk"})", "unknown RoPE scaling ntk");
  refuse(R"({"theta": 1e4, "rotary_dim": 4, "scaling": "none", "frequency_divisors": [1]})",
         "expected 2 numbers");
}
