// The processor's tile unit (AMX) as tile_products.h uses it. Included only by *_amx.cpp.
//
// Written as assembly with memory clobbers: GCC 12's intrinsics do not tell the compiler that a
// tile load reads memory, which lets it drop the stores before.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {
namespace {

struct AmxTiles {
  // Every register: 16 rows of 64 bytes. Tile registers belong to a thread.
  static void start() {
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static_assert(sizeof(Configuration) == 64);
    const Configuration configuration;
    asm volatile("ldtilecfg %0" ::"m"(configuration));
  }
  static void stop() { asm volatile("tilerelease"); }

  template <int kRegister>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"n"(kRegister));
  }
  template <int kRegister, class Word>
  static void load(const Word* words, size_t stride) {
    static_assert(sizeof(Word) == 4);
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(words), "r"(stride * sizeof(Word)),
                 "n"(kRegister)
                 : "memory");
  }
  template <int kRegister>
  static void store(float* words, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(words), "r"(stride * sizeof(float)),
                 "n"(kRegister)
                 : "memory");
  }
  template <int kC, int kA, int kB>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kC), "n"(kA), "n"(kB));
  }
};

}  // namespace
}  // namespace oscar
