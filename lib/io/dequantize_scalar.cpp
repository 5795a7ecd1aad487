// Reference expansion of every weight type, one element after another (formats.md 10.3). The
// order of the float operations is part of the definition: (d * scale) first, then * code, then the
// offset.
#include <bit>
#include <cstring>

#include "base/float16.h"
#include "io/dequantize.h"
#include "io/weight_types.h"

namespace oscar::dequantize {
namespace {

uint16_t load_u16(const uint8_t* source) {
  uint16_t value = 0;
  std::memcpy(&value, source, sizeof value);
  return value;
}
float load_half(const uint8_t* source) { return fp16_to_float(load_u16(source)); }

void f32(const uint8_t* source, size_t count, float* out) {
  std::memcpy(out, source, count * sizeof(float));
}
void f16(const uint8_t* source, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = load_half(source + 2 * i);
}
void bf16(const uint8_t* source, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = bf16_to_float(load_u16(source + 2 * i));
}

// Element `index` of a 32-block of nibbles: bytes 0..15 hold 0..15 low, 16..31 high.
int nibble(const uint8_t* codes, size_t index) {
  return index < 16 ? codes[index] & 15 : codes[index - 16] >> 4;
}

void q4_0(const uint8_t* source, size_t num_blocks, float* out) {
  for (size_t b = 0; b < num_blocks; ++b, source += 18, out += 32) {
    const float d = load_half(source);
    for (size_t i = 0; i < 32; ++i) out[i] = d * static_cast<float>(nibble(source + 2, i) - 8);
  }
}
void q4_1(const uint8_t* source, size_t num_blocks, float* out) {
  for (size_t b = 0; b < num_blocks; ++b, source += 20, out += 32) {
    const float d = load_half(source), m = load_half(source + 2);
    for (size_t i = 0; i < 32; ++i) out[i] = d * static_cast<float>(nibble(source + 4, i)) + m;
  }
}

int fifth_bit(const uint8_t* bits, size_t index) { return (bits[index / 8] >> (index % 8)) & 1; }

void q5_0(const uint8_t* source, size_t num_blocks, float* out) {
  for (size_t b = 0; b < num_blocks; ++b, source += 22, out += 32) {
    const float d = load_half(source);
    for (size_t i = 0; i < 32; ++i) {
      const int code = nibble(source + 6, i) + 16 * fifth_bit(source + 2, i) - 16;
      out[i] = d * static_cast<float>(code);
    }
  }
}
void q5_1(const uint8_t* source, size_t num_blocks, float* out) {
  for (size_t b = 0; b < num_blocks; ++b, source += 24, out += 32) {
    const float d = load_half(source), m = load_half(source + 2);
    for (size_t i = 0; i < 32; ++i) {
      const int code = nibble(source + 8, i) + 16 * fifth_bit(source + 4, i);
      out[i] = d * static_cast<float>(code) + m;
    }
  }
}
void q8_0(const uint8_t* source, size_t num_blocks, float* out) {
  for (size_t b = 0; b < num_blocks; ++b, source += 34, out += 32) {
    const float d = load_half(source);
    for (size_t i = 0; i < 32; ++i) {
      out[i] = d * static_cast<float>(std::bit_cast<int8_t>(source[2 + i]));
    }
  }
}

struct ScaleMin {
  int scale, min;
};
// The 6-bit pair of sub-block j = 0..7 of Q4_K and Q5_K.
ScaleMin scale_min(const uint8_t* s, size_t j) {
  if (j < 4) return {s[j] & 63, s[j + 4] & 63};
  return {(s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4};
}

// Q4_K, and Q5_K when `high` (32 bytes, bit j = fifth bit of sub-block j) is not null.
void k_super_block(const uint8_t* head, const uint8_t* high, const uint8_t* codes, float* out) {
  const float d = load_half(head), d_min = load_half(head + 2);
  for (size_t j = 0; j < 8; ++j) {
    const ScaleMin pair = scale_min(head + 4, j);
    const float scale = d * static_cast<float>(pair.scale);
    const float offset = d_min * static_cast<float>(pair.min);
    const uint8_t* chunk = codes + 32 * (j / 2);
    for (size_t l = 0; l < 32; ++l) {
      int code = j % 2 == 0 ? chunk[l] & 15 : chunk[l] >> 4;
      if (high != nullptr) code += 16 * ((high[l] >> j) & 1);
      out[32 * j + l] = scale * static_cast<float>(code) - offset;
    }
  }
}
void q4_k(const uint8_t* source, size_t num_blocks, float* out) {
  for (size_t b = 0; b < num_blocks; ++b, source += 144, out += 256) {
    k_super_block(source, nullptr, source + 16, out);
  }
}
void q5_k(const uint8_t* source, size_t num_blocks, float* out) {
  for (size_t b = 0; b < num_blocks; ++b, source += 176, out += 256) {
    k_super_block(source, source + 16, source + 48, out);
  }
}
void q6_k(const uint8_t* source, size_t num_blocks, float* out) {
  for (size_t b = 0; b < num_blocks; ++b, source += 210, out += 256) {
    const float d = load_half(source + 208);
    for (size_t n = 0; n < 2; ++n) {
      const uint8_t* low = source + 64 * n;
      const uint8_t* high = source + 128 + 32 * n;
      const uint8_t* scales = source + 192 + 8 * n;
      for (size_t part = 0; part < 4; ++part) {  // 32 elements each
        for (size_t l = 0; l < 32; ++l) {
          const int byte = low[l + 32 * (part % 2)];
          const int code = (part < 2 ? byte & 15 : byte >> 4) | ((high[l] >> (2 * part)) & 3) << 4;
          const int scale = std::bit_cast<int8_t>(scales[l / 16 + 2 * part]);
          out[128 * n + 32 * part + l] =
              d * static_cast<float>(scale) * static_cast<float>(code - 32);
        }
      }
    }
  }
}

}  // namespace

BlockFunction scalar_function(uint32_t type) {
  switch (static_cast<WeightType>(type)) {
    case WeightType::kF32:
      return f32;
    case WeightType::kF16:
      return f16;
    case WeightType::kBF16:
      return bf16;
    case WeightType::kQ4_0:
      return q4_0;
    case WeightType::kQ4_1:
      return q4_1;
    case WeightType::kQ5_0:
      return q5_0;
    case WeightType::kQ5_1:
      return q5_1;
    case WeightType::kQ8_0:
      return q8_0;
    case WeightType::kQ4_K:
      return q4_k;
    case WeightType::kQ5_K:
      return q5_k;
    case WeightType::kQ6_K:
      return q6_k;
  }
  return nullptr;
}

}  // namespace oscar::dequantize
