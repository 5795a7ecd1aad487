// Expansion of 32 stored weights to float32 registers, for every stored type. Included only by
// weight_kernels_<set>.cpp after `Simd` is defined; everything stays in their anonymous namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "io/weight_types.h"
#include "model/weight_kernels.h"

namespace oscar {
namespace {

using Vec = Simd::Vec;
inline constexpr size_t kLanes = Simd::kLanes;
inline constexpr size_t kUnitVecs = kColumnUnit / kLanes;  // registers that hold 32 weights

inline float half_at(const uint8_t* source) {
  uint16_t bits;
  std::memcpy(&bits, source, sizeof bits);
  return _cvtsh_ss(bits);
}
inline __m128i load16(const uint8_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}
inline __m256i load32(const uint8_t* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}
// 16 bytes -> 32 nibbles: the low ones first, then the high ones.
inline __m256i nibbles16(const uint8_t* source) {
  const __m128i packed = load16(source);
  const __m256i both = _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
  return _mm256_and_si256(both, _mm256_set1_epi8(15));
}
// Byte i = 16 when bit i of `bits` is set, else 0.
inline __m256i fifth_bits(uint32_t bits) {
  const __m256i spread =
      _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)),
                          _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                           2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
  const __m256i select = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ULL));
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, select), select);
  return _mm256_and_si256(set, _mm256_set1_epi8(16));
}

// out = q * scale; out = q * scale + offset: separately rounded, as dequantize_row does.
inline void scale_bytes(__m256i q, float scale, Vec* out) {
  Simd::from_i8(q, out);
  const Vec factor = Simd::set1(scale);
  for (size_t i = 0; i < kUnitVecs; ++i) out[i] = Simd::mul(out[i], factor);
}
inline void scale_bytes(__m256i q, float scale, float offset, Vec* out) {
  scale_bytes(q, scale, out);
  const Vec shift = Simd::set1(offset);
  for (size_t i = 0; i < kUnitVecs; ++i) out[i] = Simd::add(out[i], shift);
}

struct DecodeF32 {
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* source = row + unit * kColumnUnit * 4;
    for (size_t i = 0; i < kUnitVecs; ++i)
      out[i] = Simd::load(reinterpret_cast<const float*>(source + i * kLanes * 4));
  }
};
struct DecodeF16 {
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* source = row + unit * kColumnUnit * 2;
    for (size_t i = 0; i < kUnitVecs; ++i) out[i] = Simd::load_fp16(source + i * kLanes * 2);
  }
};
struct DecodeBF16 {
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* source = row + unit * kColumnUnit * 2;
    for (size_t i = 0; i < kUnitVecs; ++i) out[i] = Simd::load_bf16(source + i * kLanes * 2);
  }
};
struct DecodeQ4_0 {
  template <class Set = Simd>
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* block = row + unit * 18;
    if constexpr (Set::kHasLookup) {
      const Vec values = Set::mul(Set::code_values(-8.0F), Set::broadcast_fp16(block));
      return Set::lookup16(block + 2, values, out);
    }
    const __m256i q = _mm256_sub_epi8(nibbles16(block + 2), _mm256_set1_epi8(8));
    scale_bytes(q, half_at(block), out);
  }
};
struct DecodeQ4_1 {
  template <class Set = Simd>
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* block = row + unit * 20;
    if constexpr (Set::kHasLookup) {
      const Vec scaled = Set::mul(Set::code_values(0.0F), Set::broadcast_fp16(block));
      return Set::lookup16(block + 4, Set::add(scaled, Set::broadcast_fp16(block + 2)), out);
    }
    scale_bytes(nibbles16(block + 4), half_at(block), half_at(block + 2), out);
  }
};
struct DecodeQ5_0 {
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* block = row + unit * 22;
    uint32_t bits;
    std::memcpy(&bits, block + 2, sizeof bits);
    const __m256i q = _mm256_or_si256(nibbles16(block + 6), fifth_bits(bits));
    scale_bytes(_mm256_sub_epi8(q, _mm256_set1_epi8(16)), half_at(block), out);
  }
};
struct DecodeQ5_1 {
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* block = row + unit * 24;
    uint32_t bits;
    std::memcpy(&bits, block + 4, sizeof bits);
    const __m256i q = _mm256_or_si256(nibbles16(block + 8), fifth_bits(bits));
    scale_bytes(q, half_at(block), half_at(block + 2), out);
  }
};
struct DecodeQ8_0 {
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* block = row + unit * 34;
    scale_bytes(load32(block + 2), half_at(block), out);
  }
};

// 6-bit scale and minimum of sub-block j of a Q4_K or Q5_K block (formats.md 10.3).
inline void scale_and_min(const uint8_t* s, size_t j, float* scale, float* minimum) {
  const unsigned low = j < 4 ? s[j] & 63U : (s[j + 4] & 15U) | ((s[j - 4] >> 6U) << 4U);
  const unsigned high = j < 4 ? s[j + 4] & 63U : (s[j + 4] >> 4U) | ((s[j] >> 6U) << 4U);
  *scale = static_cast<float>(low);
  *minimum = static_cast<float>(high);
}
// Low (sub even) or high (sub odd) nibbles of the 32 bytes that sub-blocks 2c and 2c + 1 share.
inline __m256i sub_block_nibbles(const uint8_t* qs, size_t sub) {
  const __m256i packed = load32(qs + (sub / 2) * 32);
  return _mm256_and_si256(_mm256_srl_epi16(packed, _mm_cvtsi32_si128(sub % 2 == 0 ? 0 : 4)),
                          _mm256_set1_epi8(15));
}
struct DecodeQ4_K {
  template <class Set = Simd>
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* block = row + unit / 8 * 144;
    const size_t sub = unit % 8;
    float scale, minimum;
    scale_and_min(block + 4, sub, &scale, &minimum);
    scale *= half_at(block);
    minimum *= half_at(block + 2);
    if constexpr (Set::kHasLookup) {
      const Vec scaled = Set::mul(Set::code_values(0.0F), Set::set1(scale));
      const Vec values = Set::add(scaled, Set::set1(-minimum));
      return Set::lookup32(block + 16 + sub / 2 * 32, sub % 2 == 0 ? 0 : 4, values, out);
    }
    scale_bytes(sub_block_nibbles(block + 16, sub), scale, -minimum, out);
  }
};
struct DecodeQ5_K {
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* block = row + unit / 8 * 176;
    const size_t sub = unit % 8;
    float scale, minimum;
    scale_and_min(block + 4, sub, &scale, &minimum);
    const __m256i high = _mm256_and_si256(
        _mm256_srl_epi16(load32(block + 16), _mm_cvtsi32_si128(static_cast<int>(sub))),
        _mm256_set1_epi8(1));
    const __m256i q =
        _mm256_or_si256(sub_block_nibbles(block + 48, sub), _mm256_slli_epi16(high, 4));
    scale_bytes(q, half_at(block) * scale, -(half_at(block + 2) * minimum), out);
  }
};
struct DecodeQ6_K {
  static void unit(const uint8_t* row, size_t unit, Vec* out) {
    const uint8_t* block = row + unit / 8 * 210;
    const size_t half = unit % 8 / 4, quarter = unit % 4;
    const uint8_t* low_bytes = block + half * 64 + (quarter % 2) * 32;
    const __m256i low = _mm256_and_si256(
        _mm256_srl_epi16(load32(low_bytes), _mm_cvtsi32_si128(quarter < 2 ? 0 : 4)),
        _mm256_set1_epi8(15));
    const __m256i high =
        _mm256_and_si256(_mm256_srl_epi16(load32(block + 128 + half * 32),
                                          _mm_cvtsi32_si128(static_cast<int>(2 * quarter))),
                         _mm256_set1_epi8(3));
    const __m256i q =
        _mm256_sub_epi8(_mm256_or_si256(low, _mm256_slli_epi16(high, 4)), _mm256_set1_epi8(32));
    Simd::from_i8(q, out);
    const float d = half_at(block + 208);
    for (size_t i = 0; i < kUnitVecs; ++i) {
      const size_t sixteenth = i * kLanes / 16;  // the scales cover 16 weights each
      const uint8_t scale = block[192 + half * 8 + quarter * 2 + sixteenth];
      out[i] = Simd::mul(out[i], Simd::set1(d * static_cast<float>(static_cast<int8_t>(scale))));
    }
  }
};

// Calls body(decoder) for the stored type; every type of weight_types.h is listed.
template <class Body>
inline void with_decoder(WeightType type, const Body& body) {
  switch (type) {
    case WeightType::kF32:
      return body(DecodeF32{});
    case WeightType::kF16:
      return body(DecodeF16{});
    case WeightType::kBF16:
      return body(DecodeBF16{});
    case WeightType::kQ4_0:
      return body(DecodeQ4_0{});
    case WeightType::kQ4_1:
      return body(DecodeQ4_1{});
    case WeightType::kQ5_0:
      return body(DecodeQ5_0{});
    case WeightType::kQ5_1:
      return body(DecodeQ5_1{});
    case WeightType::kQ8_0:
      return body(DecodeQ8_0{});
    case WeightType::kQ4_K:
      return body(DecodeQ4_K{});
    case WeightType::kQ5_K:
      return body(DecodeQ5_K{});
    case WeightType::kQ6_K:
      return body(DecodeQ6_K{});
  }
}

// A partial unit exists only for the types without blocks.
template <class Decoder>
inline constexpr bool kPartialUnits = false;
template <>
inline constexpr bool kPartialUnits<DecodeF32> = true;
template <>
inline constexpr bool kPartialUnits<DecodeF16> = true;
template <>
inline constexpr bool kPartialUnits<DecodeBF16> = true;

// The last columns are copied into a zeroed unit, which is then decoded like any other.
inline size_t element_bytes(WeightType type) { return type == WeightType::kF32 ? 4 : 2; }
struct TailUnit {
  alignas(64) uint8_t bytes[kColumnUnit * 4] = {};
  TailUnit(const StoredRows& weight, const uint8_t* row) {
    const size_t size = element_bytes(weight.type), first = weight.columns & ~(kColumnUnit - 1);
    std::memcpy(bytes, row + first * size, (weight.columns - first) * size);
  }
};

}  // namespace
}  // namespace oscar
