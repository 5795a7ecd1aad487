// Internal to the weight readers: block expanders written on 32-byte vectors of codes and one
// primitive per instruction set. Everything has internal linkage, because each including file is
// compiled for another instruction set.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "io/dequantize.h"

namespace oscar::dequantize {
namespace {

float load_half(const uint8_t* source) {
  uint16_t bits = 0;
  std::memcpy(&bits, source, sizeof bits);
  return _cvtsh_ss(bits);
}
__m256i load32(const uint8_t* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}
__m128i load16(const uint8_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

// 16 bytes of nibbles -> 32 codes 0..15: low nibbles first, then high nibbles.
__m256i nibbles(const uint8_t* codes) {
  const __m128i bytes = load16(codes);
  const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
  return _mm256_and_si256(both, _mm256_set1_epi8(15));
}
// 32 bits -> 32 bytes, 16 where the bit is set.
__m256i fifth_bits(const uint8_t* bits) {
  int32_t word = 0;
  std::memcpy(&word, bits, sizeof word);
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(word),
      _mm256_setr_epi64x(0, 0x0101010101010101LL, 0x0202020202020202LL, 0x0303030303030303LL));
  const __m256i select = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ULL));
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, select), select);
  return _mm256_and_si256(set, _mm256_set1_epi8(16));
}

// Set provides, for 32 signed byte codes at a time:
//   scaled(codes, scale, out): out[i] = scale * code[i]
//   added(codes, scale, offset, out): out[i] = scale * code[i] + offset   (two roundings)
//   scaled16(codes, low_scale, high_scale, out): another scale for the upper 16
// and f16(source, count, out), bf16(source, count, out).
template <class Set>
struct Blocks {
  static void f32(const uint8_t* source, size_t count, float* out) {
    std::memcpy(out, source, count * sizeof(float));
  }
  static void q4_0(const uint8_t* source, size_t num_blocks, float* out) {
    for (size_t b = 0; b < num_blocks; ++b, source += 18, out += 32) {
      const __m256i codes = _mm256_sub_epi8(nibbles(source + 2), _mm256_set1_epi8(8));
      Set::scaled(codes, load_half(source), out);
    }
  }
  static void q4_1(const uint8_t* source, size_t num_blocks, float* out) {
    for (size_t b = 0; b < num_blocks; ++b, source += 20, out += 32) {
      Set::added(nibbles(source + 4), load_half(source), load_half(source + 2), out);
    }
  }
  static void q5_0(const uint8_t* source, size_t num_blocks, float* out) {
    for (size_t b = 0; b < num_blocks; ++b, source += 22, out += 32) {
      const __m256i codes = _mm256_or_si256(nibbles(source + 6), fifth_bits(source + 2));
      Set::scaled(_mm256_sub_epi8(codes, _mm256_set1_epi8(16)), load_half(source), out);
    }
  }
  static void q5_1(const uint8_t* source, size_t num_blocks, float* out) {
    for (size_t b = 0; b < num_blocks; ++b, source += 24, out += 32) {
      const __m256i codes = _mm256_or_si256(nibbles(source + 8), fifth_bits(source + 4));
      Set::added(codes, load_half(source), load_half(source + 2), out);
    }
  }
  static void q8_0(const uint8_t* source, size_t num_blocks, float* out) {
    for (size_t b = 0; b < num_blocks; ++b, source += 34, out += 32) {
      Set::scaled(load32(source + 2), load_half(source), out);
    }
  }

  // Q4_K, and Q5_K when `high` is not null.
  static void k_super_block(const uint8_t* head, const uint8_t* high, const uint8_t* codes,
                            float* out) {
    const float d = load_half(head), d_min = load_half(head + 2);
    const uint8_t* s = head + 4;
    const __m256i low_mask = _mm256_set1_epi8(15);
    __m256i fifth = high == nullptr ? _mm256_setzero_si256() : load32(high);
    for (size_t j = 0; j < 8; ++j) {
      const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
      const int min = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
      __m256i bytes = load32(codes + 32 * (j / 2));
      if (j % 2 == 1) bytes = _mm256_srli_epi16(bytes, 4);
      bytes = _mm256_and_si256(bytes, low_mask);
      if (high != nullptr) {
        const __m256i bit = _mm256_and_si256(fifth, _mm256_set1_epi8(1));
        bytes = _mm256_or_si256(bytes, _mm256_slli_epi16(bit, 4));
        fifth = _mm256_srli_epi16(fifth, 1);
      }
      // a - b and a + (-b) are the same float.
      Set::added(bytes, d * static_cast<float>(scale), -(d_min * static_cast<float>(min)),
                 out + 32 * j);
    }
  }
  static void q4_k(const uint8_t* source, size_t num_blocks, float* out) {
    for (size_t b = 0; b < num_blocks; ++b, source += 144, out += 256) {
      k_super_block(source, nullptr, source + 16, out);
    }
  }
  static void q5_k(const uint8_t* source, size_t num_blocks, float* out) {
    for (size_t b = 0; b < num_blocks; ++b, source += 176, out += 256) {
      k_super_block(source, source + 16, source + 48, out);
    }
  }
  static void q6_k(const uint8_t* source, size_t num_blocks, float* out) {
    const __m256i low_mask = _mm256_set1_epi8(15), high_mask = _mm256_set1_epi8(0x30);
    for (size_t b = 0; b < num_blocks; ++b, source += 210, out += 256) {
      const float d = load_half(source + 208);
      for (size_t n = 0; n < 2; ++n) {
        const __m256i first = load32(source + 64 * n), second = load32(source + 64 * n + 32);
        const __m256i high = load32(source + 128 + 32 * n);
        // Bits 2p, 2p+1 of `high` moved to bits 4, 5; bits from the neighbour byte are masked.
        const __m256i codes[4] = {
            _mm256_or_si256(_mm256_and_si256(first, low_mask),
                            _mm256_and_si256(_mm256_slli_epi16(high, 4), high_mask)),
            _mm256_or_si256(_mm256_and_si256(second, low_mask),
                            _mm256_and_si256(_mm256_slli_epi16(high, 2), high_mask)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(first, 4), low_mask),
                            _mm256_and_si256(high, high_mask)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(second, 4), low_mask),
                            _mm256_and_si256(_mm256_srli_epi16(high, 2), high_mask))};
        for (size_t part = 0; part < 4; ++part) {
          const auto* s = reinterpret_cast<const int8_t*>(source + 192 + 8 * n + 2 * part);
          Set::scaled16(_mm256_sub_epi8(codes[part], _mm256_set1_epi8(32)),
                        d * static_cast<float>(s[0]), d * static_cast<float>(s[1]),
                        out + 128 * n + 32 * part);
        }
      }
    }
  }

  static BlockFunction function(uint32_t type) {
    switch (type) {
      case 0:
        return f32;
      case 1:
        return Set::f16;
      case 2:
        return q4_0;
      case 3:
        return q4_1;
      case 6:
        return q5_0;
      case 7:
        return q5_1;
      case 8:
        return q8_0;
      case 12:
        return q4_k;
      case 13:
        return q5_k;
      case 14:
        return q6_k;
      case 30:
        return Set::bf16;
      default:
        return nullptr;
    }
  }
};

}  // namespace
}  // namespace oscar::dequantize
