// Rounding of log-8 scales against an exhaustive search over the bytes.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "base/random.h"
#include "quant/metadata.h"

using oscar::MetaFormat;

namespace {

// Byte of a scale: the first one whose border with its successor (geometric mean) is not above it.
int searched_byte(const oscar::MetaRule& rule, float scale) {
  const double square = static_cast<double>(scale) * static_cast<double>(scale);
  for (int byte = 0; byte < 255; ++byte)
    if (square >=
        static_cast<double>(rule.log8_table[byte]) * static_cast<double>(rule.log8_table[byte + 1]))
      return byte;
  return 255;
}

int stored_byte(const oscar::MetaRule& rule, float scale) {
  uint8_t bytes[2];
  oscar::write_pair(rule, {scale, 1.5F, false}, bytes);
  return bytes[0];
}

}  // namespace

TEST_CASE("metadata: every log-8 scale goes to the nearest byte", "[quant]") {
  for (const float largest : {1e-30F, 0.013F, 1.0F, 4.0F, 3e30F}) {
    oscar::CodecSpec spec;
    spec.head_dim = 64;
    spec.meta = MetaFormat::kLog8;
    spec.log8_scale_max = largest;
    const oscar::MetaRule rule = oscar::make_meta_rule(spec);
    oscar::Random random(1);
    int seen[256] = {};
    for (int i = 0; i < 20000; ++i) {
      const float scale = largest * static_cast<float>(std::exp2(1.0 - 10.0 * random.uniform()));
      const int byte = stored_byte(rule, scale);
      REQUIRE(byte == searched_byte(rule, scale));
      ++seen[byte];
    }
    for (const int count : seen) CHECK(count > 0);
    for (int byte = 0; byte < 256; ++byte) CHECK(stored_byte(rule, rule.log8_table[byte]) == byte);
    for (int byte = 0; byte < 255; ++byte) {  // on both sides of a border
      const auto border = static_cast<float>(std::sqrt(rule.log8_border[byte]));
      for (const float scale : {std::nextafter(border, 0.0F), border,
                                std::nextafter(border, std::numeric_limits<float>::infinity())})
        REQUIRE(stored_byte(rule, scale) == searched_byte(rule, scale));
    }
    CHECK(stored_byte(rule, 0.0F) == 255);
    CHECK(stored_byte(rule, std::numeric_limits<float>::denorm_min()) == 255);
    CHECK(stored_byte(rule, std::numeric_limits<float>::infinity()) == 0);
    CHECK(stored_byte(rule, std::numeric_limits<float>::quiet_NaN()) == 255);
  }
}
