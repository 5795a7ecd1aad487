// Conversions between float32 and the 16-bit types, against exact arithmetic and over all bit
// patterns.
#include <catch2/catch.hpp>
#include <limits>

#include "base/float16.h"

using namespace oscar;

TEST_CASE("every fp16 pattern survives the round trip", "[float16]") {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = fp16_to_float(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(fp16_to_float(float_to_fp16(value))));
    } else if (float_to_fp16(value) != half) {
      FAIL("pattern " << bits << " came back as " << float_to_fp16(value));
    }
  }
}

TEST_CASE("fp16 rounding is to nearest, ties to even, at every midpoint", "[float16]") {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = fp16_to_float(static_cast<uint16_t>(bits));
    const float high = fp16_to_float(static_cast<uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;
    const auto even = static_cast<uint16_t>(bits + (bits & 1U));
    if (float_to_fp16(middle) != even) FAIL("midpoint above pattern " << bits);
    if (float_to_fp16(std::nextafter(middle, 0.0F)) != bits) FAIL("below midpoint of " << bits);
    if (float_to_fp16(std::nextafter(middle, high)) != bits + 1) FAIL("above midpoint of " << bits);
  }
  CHECK(float_to_fp16(65519.996F) == 0x7bff);
  CHECK(float_to_fp16(65520.0F) == 0x7c00);
  CHECK(float_to_fp16(-1e30F) == 0xfc00);
  CHECK(float_to_fp16(0x1p-25F) == 0);
  CHECK(float_to_fp16(-0.0F) == 0x8000);
}

TEST_CASE("bf16 rounding", "[float16]") {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = bf16_to_float(static_cast<uint16_t>(bits));
    if (!std::isnan(value) && float_to_bf16(value) != bits) FAIL("pattern " << bits);
  }
  CHECK(round_to_bf16(1.0F + 0x1p-8F) == 1.0F);
  CHECK(round_to_bf16(1.0F + 3 * 0x1p-8F) == 1.0F + 4 * 0x1p-8F);
  CHECK(std::isinf(round_to_bf16(std::numeric_limits<float>::max())));
  CHECK(std::isnan(round_to_bf16(std::numeric_limits<float>::quiet_NaN())));
  CHECK(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7f800001U)))));
}
