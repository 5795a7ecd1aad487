// Finding non-finite numbers fast.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace oscar {

// Index of the first NaN or infinity, or `count` when all are finite.
inline size_t first_non_finite(const float* values, size_t count) {
  constexpr size_t kBlock = 1024;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t end = begin + kBlock < count ? begin + kBlock : count;
    uint32_t found = 0;  // no branch inside, so that the compiler can vectorise
    for (size_t i = begin; i < end; ++i)
      found |= (std::bit_cast<uint32_t>(values[i]) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
    if (found != 0) {
      for (size_t i = begin; i < end; ++i)
        if ((std::bit_cast<uint32_t>(values[i]) & 0x7f800000U) == 0x7f800000U) return i;
    }
  }
  return count;
}

}  // namespace oscar
