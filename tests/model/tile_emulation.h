// A tile unit in plain C++ with the documented semantics of AMX (TDPBF16PS: fused multiply-adds,
// denormal numbers count as zero in inputs and results, rounding to nearest even).
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace oscar_test {

struct EmulatedTiles {
  static void start() {}
  static void stop() {}

  template <int kRegister>
  static void zero() {
    std::memset(registers[kRegister], 0, sizeof registers[kRegister]);
  }
  template <int kRegister, class Word>
  static void load(const Word* words, size_t stride) {
    for (size_t i = 0; i < 16; ++i) std::memcpy(registers[kRegister][i], words + i * stride, 64);
  }
  template <int kRegister>
  static void store(float* words, size_t stride) {
    for (size_t i = 0; i < 16; ++i) std::memcpy(words + i * stride, registers[kRegister][i], 64);
  }
  template <int kC, int kA, int kB>
  static void dot() {
    for (size_t i = 0; i < 16; ++i) {
      for (size_t j = 0; j < 16; ++j) {
        float even = 0.0F, odd = 0.0F;
        for (size_t p = 0; p < 16; ++p) {
          const uint32_t a = registers[kA][i][p], b = registers[kB][p][j];
          even = flushed(std::fma(number(a << 16), number(b << 16), even));
          odd = flushed(std::fma(number(a & 0xffff0000U), number(b & 0xffff0000U), odd));
        }
        uint32_t& c = registers[kC][i][j];
        c = std::bit_cast<uint32_t>(flushed(number(c) + flushed(even + odd)));
      }
    }
  }

 private:
  static float flushed(float value) {
    return std::abs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0F, value) : value;
  }
  static float number(uint32_t bits) { return flushed(std::bit_cast<float>(bits)); }

  static inline thread_local uint32_t registers[8][16][16];
};

}  // namespace oscar_test
