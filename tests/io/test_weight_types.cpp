// Expansion of stored weight types: the format's vectors, scalar against SIMD, exhaustive 16-bit
// floats.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/cpu.h"
#include "base/error.h"
#include "base/float16.h"
#include "base/random.h"
#include "io/dequantize.h"
#include "io/weight_types.h"
#include "support/gguf_writer.h"

using namespace oscar;
using oscar_test::Bytes;

namespace {

constexpr WeightType kAllTypes[] = {WeightType::kF32,  WeightType::kF16,  WeightType::kBF16,
                                    WeightType::kQ4_0, WeightType::kQ4_1, WeightType::kQ5_0,
                                    WeightType::kQ5_1, WeightType::kQ8_0, WeightType::kQ4_K,
                                    WeightType::kQ5_K, WeightType::kQ6_K};

void half(Bytes& out, float value) { oscar_test::append_value(out, float_to_fp16(value)); }
// Bytes (a i + c) mod 256, the pattern of the format description.
void pattern(Bytes& out, size_t count, size_t a, size_t c) {
  for (size_t i = 0; i < count; ++i) out.push_back(static_cast<uint8_t>(a * i + c));
}

std::vector<float> expand(WeightType type, const Bytes& block) {
  REQUIRE(block.size() == block_bytes(type));
  std::vector<float> values(block_elements(type));
  dequantize_row(type, block.data(), values.size(), values.data());
  std::vector<float> reference(values.size());
  dequantize::scalar_function(static_cast<uint32_t>(type))(block.data(), 1, reference.data());
  CHECK(values == reference);
  return values;
}
double sum(const std::vector<float>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}
using Vector = std::vector<float>;
Vector pick(const Vector& values, const std::vector<size_t>& indices) {
  Vector picked;
  for (const size_t index : indices) picked.push_back(values[index]);
  return picked;
}

}  // namespace

TEST_CASE("vectors of the 32-element types", "[weight_types]") {
  Bytes q4_0;
  half(q4_0, 0.5F);
  pattern(q4_0, 16, 17, 3);
  const Vector y0 = expand(WeightType::kQ4_0, q4_0);
  CHECK(pick(y0, {0, 1, 2, 3, 16, 31}) == Vector{-2.5F, -2, -1.5F, -1, -4, -4});
  CHECK(sum(y0) == -14.5);

  Bytes q4_1;
  half(q4_1, 0.25F);
  half(q4_1, -1);
  pattern(q4_1, 16, 17, 3);
  const Vector y1 = expand(WeightType::kQ4_1, q4_1);
  CHECK(pick(y1, {0, 1, 2, 3, 31}) == Vector{-0.25F, 0, 0.25F, 0.5F, -1});
  CHECK(sum(y1) == 24.75);

  Bytes q5_0;
  half(q5_0, 0.5F);
  pattern(q5_0, 4, 59, 90);
  pattern(q5_0, 16, 17, 3);
  const Vector y5 = expand(WeightType::kQ5_0, q5_0);
  CHECK(pick(y5, {0, 1, 2, 3, 31}) == Vector{-6.5F, 2, -5.5F, 3, -8});
  CHECK(sum(y5) == -30.5);

  Bytes q5_1;
  half(q5_1, 0.25F);
  half(q5_1, -1);
  pattern(q5_1, 4, 59, 90);
  pattern(q5_1, 16, 17, 3);
  const Vector y51 = expand(WeightType::kQ5_1, q5_1);
  CHECK(pick(y51, {0, 1, 2, 3}) == Vector{-0.25F, 4, 0.25F, 4.5F});
  CHECK(sum(y51) == 80.75);

  Bytes q8_0;
  half(q8_0, 0.125F);
  pattern(q8_0, 32, 41, 7);
  const Vector y8 = expand(WeightType::kQ8_0, q8_0);
  CHECK(pick(y8, {0, 1, 2, 3}) == Vector{0.875F, 6, 11.125F, -15.75F});
  CHECK(sum(y8) == -22);
}

TEST_CASE("vectors of the 256-element types", "[weight_types]") {
  const std::vector<size_t> positions = {0, 32, 100, 128, 200, 255};
  Bytes q4_k;
  half(q4_k, 0.5F);
  half(q4_k, 0.25F);
  pattern(q4_k, 12, 37, 11);
  pattern(q4_k, 128, 29, 5);
  const Vector y4 = expand(WeightType::kQ4_K, q4_k);
  CHECK(pick(y4, positions) == Vector{19.75F, -1, 25.5F, -1.25F, 174.75F, 51.5F});
  CHECK(sum(y4) == 20980);

  Bytes q5_k;
  half(q5_k, 0.5F);
  half(q5_k, 0.25F);
  pattern(q5_k, 12, 37, 11);
  pattern(q5_k, 32, 59, 90);
  pattern(q5_k, 128, 29, 5);
  const Vector y5 = expand(WeightType::kQ5_K, q5_k);
  CHECK(pick(y5, positions) == Vector{19.75F, 383, 25.5F, 22.75F, 174.75F, 51.5F});
  CHECK(sum(y5) == 45876);

  Bytes q6_k;
  pattern(q6_k, 128, 29, 5);
  pattern(q6_k, 64, 59, 90);
  pattern(q6_k, 16, 37, 11);
  half(q6_k, 0.125F);
  const Vector y6 = expand(WeightType::kQ6_K, q6_k);
  CHECK(pick(y6, positions) == Vector{6.875F, 53.125F, 43.125F, 31.875F, 99.75F, 148.5F});
  CHECK(sum(y6) == 95.5);
}

TEST_CASE("every instruction set gives the scalar result bit for bit", "[weight_types]") {
  Random random(7);
  for (const WeightType type : kAllTypes) {
    const auto id = static_cast<uint32_t>(type);
    const size_t blocks = block_elements(type) == 1 ? 1003 : 37;
    for (int round = 0; round < 20; ++round) {
      // One byte in front: nothing may assume alignment.
      Bytes source(1 + blocks * block_bytes(type));
      for (uint8_t& byte : source) byte = static_cast<uint8_t>(random.below(256));
      const size_t count = blocks * block_elements(type);
      Vector expected(count);
      dequantize::scalar_function(id)(source.data() + 1, blocks, expected.data());
      const auto check = [&](const char* name, dequantize::BlockFunction function) {
        REQUIRE(function != nullptr);
        Vector actual(count + 1, 12345.0F);
        function(source.data() + 1, blocks, actual.data());
        size_t different = 0;
        for (size_t i = 0; i < count; ++i) {
          const bool both_nan = std::isnan(expected[i]) && std::isnan(actual[i]);
          const bool same =
              std::bit_cast<uint32_t>(expected[i]) == std::bit_cast<uint32_t>(actual[i]);
          different += !both_nan && !same ? 1 : 0;
        }
        INFO(type_name(type) << " " << name);
        CHECK(different == 0);
        CHECK(actual[count] == 12345.0F);
      };
      if (cpu_features().avx512) check("avx512", dequantize::avx512_function(id));
      if (cpu_features().avx2) check("avx2", dequantize::avx2_function(id));
    }
  }
}

TEST_CASE("all 16-bit floats expand exactly", "[weight_types]") {
  std::vector<uint16_t> patterns(65536);
  std::iota(patterns.begin(), patterns.end(), uint16_t{0});
  Vector half_values(patterns.size()), bf16_values(patterns.size());
  const auto* bytes = reinterpret_cast<const uint8_t*>(patterns.data());
  dequantize_row(WeightType::kF16, bytes, patterns.size(), half_values.data());
  dequantize_row(WeightType::kBF16, bytes, patterns.size(), bf16_values.data());
  size_t different = 0;
  for (size_t i = 0; i < patterns.size(); ++i) {
    const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    different += same(half_values[i], fp16_to_float(patterns[i])) ? 0 : 1;
    different += same(bf16_values[i], bf16_to_float(patterns[i])) ? 0 : 1;
  }
  CHECK(different == 0);
}

TEST_CASE("row sizes are checked", "[weight_types]") {
  CHECK(row_bytes(WeightType::kQ4_1, 576) == 18 * 20);
  CHECK(row_bytes(WeightType::kF16, 3) == 6);
  CHECK_THROWS_AS(row_bytes(WeightType::kQ4_K, 576), Error);
  CHECK_THROWS_AS(row_bytes(WeightType::kF32, SIZE_MAX), Error);
  float out[32] = {};
  const uint8_t block[18] = {};
  CHECK_THROWS_AS(dequantize_row(WeightType::kQ4_0, block, 31, out), Error);
  CHECK_THROWS_AS(type_name(static_cast<WeightType>(4)), Error);
}
