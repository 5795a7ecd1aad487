#include "quant/metadata.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "base/float16.h"

namespace oscar {
namespace {

constexpr int kLog8Steps = 32;                // scale bytes in a factor of two
constexpr float kLog8HalfStep = 1.01088929F;  // 2^(1/64)
constexpr int kLog8ZeroBias = 128;

float log8_zero_step(int max_code) { return static_cast<float>(max_code) / 96.0F; }
float log8_zero_center(int max_code) { return 0.5F * static_cast<float>(max_code); }

// Zero of a byte; the same expression in reader and writer.
float log8_zero(int max_code, int byte) {
  return log8_zero_center(max_code) +
         static_cast<float>(byte - kLog8ZeroBias) * log8_zero_step(max_code);
}

int log8_zero_byte(int max_code, float zero) {
  const float steps = (zero - log8_zero_center(max_code)) / log8_zero_step(max_code);
  const float position = steps + 0.5F;
  if (!(position > static_cast<float>(-kLog8ZeroBias))) return 0;
  if (position >= static_cast<float>(255 - kLog8ZeroBias)) return 255;
  const int truncated = static_cast<int>(position);  // floor without its call
  return truncated - (position < static_cast<float>(truncated) ? 1 : 0) + kLog8ZeroBias;
}

// log2 of a positive normal number within 0.01: exponent and a parabola of the mantissa.
float rough_log2(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto exponent = static_cast<float>(static_cast<int>(bits >> 23) - 127);
  const float mantissa = std::bit_cast<float>((bits & 0x7FFFFFU) | 0x3F800000U);
  return exponent + (2.0F - mantissa / 3.0F) * mantissa - 5.0F / 3.0F;
}

// Nearest byte on the logarithmic axis: the table is decreasing, neighbours meet at their geometric
// mean. The borders (compared through squares) decide; the logarithm only says where to look.
int log8_scale_byte(const MetaRule& rule, float scale) {
  const float wanted = -kLog8Steps * rough_log2(scale / rule.log8_scale_max);
  int byte = wanted >= 255.0F ? 255 : wanted >= 0.0F ? static_cast<int>(wanted + 0.5F) : 0;
  const double square = static_cast<double>(scale) * static_cast<double>(scale);
  while (byte > 0 && square >= rule.log8_border[byte - 1]) --byte;
  while (byte < 255 && !(square >= rule.log8_border[byte])) ++byte;
  return byte;
}

// Code that stands for a point: its zero is exact, so a row of zeros is.
int log8_point_code(int max_code) { return max_code % 3 == 0 ? 2 * max_code / 3 : 0; }

// The zero lies within 4/3 L of L/2, so a grid whose middle is further from 0 gets a larger scale
// instead of a wrong middle. A range that ends up below one step is a point (constant rows); its
// code lies off the middle, which shortens the zero's reach.
StoredPair round_log8(const MetaRule& rule, float scale, float minimum) {
  const auto span = static_cast<float>(rule.max_code);
  const auto point_code = static_cast<float>(log8_point_code(rule.max_code));
  const float middle = minimum + 0.5F * span * scale;
  const float reach = 127.0F * log8_zero_step(rule.max_code) - std::abs(point_code - 0.5F * span);
  const float wanted = std::abs(middle) > reach * scale ? std::abs(middle) / reach : scale;
  StoredPair pair;
  pair.saturated = wanted > rule.log8_scale_max * kLog8HalfStep;
  pair.scale = rule.log8_table[log8_scale_byte(rule, wanted)];
  const float zero = span * scale < pair.scale ? point_code - minimum / pair.scale
                                               : 0.5F * span - middle / pair.scale;
  pair.second = log8_zero(rule.max_code, log8_zero_byte(rule.max_code, zero));
  return pair;
}

// One scale for both signs: wide enough for the end that lies further out.
StoredPair round_symmetric(const MetaRule& rule, float scale, float minimum) {
  const auto span = static_cast<float>(rule.max_code);
  const float end = std::fmax(std::abs(minimum), std::abs(minimum + span * scale));
  StoredPair pair;
  pair.scale = round_to_fp16(2.0F * end / span);
  pair.second = 0.5F * span;
  return pair;
}

float round_value(MetaFormat format, float value) {
  switch (format) {
    case MetaFormat::kScaleZeroFp32:
      return value;
    case MetaFormat::kScaleZeroBf16:
      return round_to_bf16(value);
    default:
      return round_to_fp16(value);
  }
}

}  // namespace

MetaRule make_meta_rule(const CodecSpec& spec) {
  MetaRule rule;
  rule.format = spec.meta;
  rule.max_code = spec.levels == Levels::kTrellis ? 7 : (1 << spec.bits) - 1;
  rule.lloyd_exact = spec.levels == Levels::kLloydExact;
  rule.has_zero = stores_zero(spec.meta) && !rule.lloyd_exact;
  rule.log8_scale_max = spec.log8_scale_max;
  if (spec.meta == MetaFormat::kLog8) {
    for (int n = 0; n < 256; ++n)
      rule.log8_table[n] = static_cast<float>(static_cast<double>(spec.log8_scale_max) *
                                              std::exp2(-static_cast<double>(n) / kLog8Steps));
    for (int n = 0; n < 255; ++n)
      rule.log8_border[n] =
          static_cast<double>(rule.log8_table[n]) * static_cast<double>(rule.log8_table[n + 1]);
  }
  return rule;
}

StoredPair round_values(const MetaRule& rule, float scale, float second) {
  StoredPair pair;
  pair.scale = round_value(rule.format, scale);
  pair.second = round_value(rule.format, second);
  return pair;
}

StoredPair round_pair(const MetaRule& rule, float scale, float minimum, bool zero_from_stored) {
  if (rule.format == MetaFormat::kLog8) return round_log8(rule, scale, minimum);
  if (rule.format == MetaFormat::kSymmetricFp16) return round_symmetric(rule, scale, minimum);
  if (!rule.has_zero) return round_values(rule, scale, minimum);
  const float divisor = zero_from_stored ? round_value(rule.format, scale) : scale;
  return round_values(rule, scale, -minimum / divisor);
}

StoredPair centered_pair(const MetaRule& rule, float scale, float middle) {
  const float half = 0.5F * static_cast<float>(rule.max_code);
  if (holds_constants(rule.format)) return round_pair(rule, scale, middle - half * scale, true);
  const float stored = round_value(rule.format, scale);
  StoredPair pair = round_pair(rule, stored, middle - half * stored, true);
  if (!usable(pair) && std::isfinite(stored)) {
    pair = constant_pair(rule, middle);
    pair.scale = 0.0F;
  }
  return pair;
}

bool usable(const StoredPair& pair) {
  return pair.scale > 0.0F && std::isfinite(pair.scale) && std::isfinite(pair.second);
}

StoredPair constant_pair(const MetaRule& rule, float minimum) {
  return round_values(rule, 1.0F, rule.has_zero ? -minimum : minimum);
}

StoredPair multiply_pair(const MetaRule& rule, const StoredPair& pair, float gain) {
  StoredPair result = pair;
  const float scale = gain * pair.scale;
  if (rule.format == MetaFormat::kLog8) {
    result.saturated = pair.saturated || scale > rule.log8_scale_max * kLog8HalfStep;
    result.scale = rule.log8_table[log8_scale_byte(rule, scale)];
    return result;
  }
  result = round_values(rule, scale, rule.has_zero ? pair.second : gain * pair.second);
  if (rule.format == MetaFormat::kSymmetricFp16) result.second = pair.second;
  return usable(result) ? result : pair;
}

void write_pair(const MetaRule& rule, const StoredPair& pair, uint8_t* bytes) {
  const auto put16 = [bytes](size_t index, uint16_t value) {
    std::memcpy(bytes + 2 * index, &value, 2);
  };
  switch (rule.format) {
    case MetaFormat::kScaleZeroFp32:
      std::memcpy(bytes, &pair.scale, 4);
      std::memcpy(bytes + 4, &pair.second, 4);
      return;
    case MetaFormat::kScaleZeroBf16:
      put16(0, float_to_bf16(pair.scale));
      put16(1, float_to_bf16(pair.second));
      return;
    case MetaFormat::kSymmetricFp16:
      put16(0, float_to_fp16(pair.scale));
      return;
    case MetaFormat::kLog8:
      bytes[0] = static_cast<uint8_t>(log8_scale_byte(rule, pair.scale));
      bytes[1] = static_cast<uint8_t>(log8_zero_byte(rule.max_code, pair.second));
      return;
    default:
      put16(0, float_to_fp16(pair.scale));
      put16(1, float_to_fp16(pair.second));
  }
}

StoredPair read_pair(const MetaRule& rule, const uint8_t* bytes) {
  StoredPair pair;
  uint16_t half[2];
  switch (rule.format) {
    case MetaFormat::kScaleZeroFp32:
      std::memcpy(&pair.scale, bytes, 4);
      std::memcpy(&pair.second, bytes + 4, 4);
      return pair;
    case MetaFormat::kScaleZeroBf16:
      std::memcpy(half, bytes, 4);
      pair.scale = bf16_to_float(half[0]);
      pair.second = bf16_to_float(half[1]);
      return pair;
    case MetaFormat::kSymmetricFp16:
      std::memcpy(half, bytes, 2);
      pair.scale = fp16_to_float(half[0]);
      pair.second = 0.5F * static_cast<float>(rule.max_code);
      return pair;
    case MetaFormat::kLog8:
      pair.scale = rule.log8_table[bytes[0]];
      pair.second = log8_zero(rule.max_code, bytes[1]);
      return pair;
    default:
      std::memcpy(half, bytes, 4);
      pair.scale = fp16_to_float(half[0]);
      pair.second = fp16_to_float(half[1]);
      return pair;
  }
}

}  // namespace oscar
