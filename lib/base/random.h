// Seeded random numbers: SplitMix64 by index (evaluation protocol) and helpers built on it. Same
// seed, same numbers, on every machine.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

namespace oscar {

// SplitMix64 finalizer.
inline uint64_t mix64(uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9ULL;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// Uniform in [0, 1), number `index` of the stream `seed`: (mix(seed + (index + 1) * golden) >> 11)
// * 2^-53.
inline double uniform_at(uint64_t seed, uint64_t index) {
  return static_cast<double>(mix64(seed + (index + 1) * 0x9E3779B97F4A7C15ULL) >> 11) * 0x1p-53;
}

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  double uniform() { return uniform_at(seed_, index_++); }
  // Uniform integer in [0, n), n > 0.
  uint64_t below(uint64_t n) { return static_cast<uint64_t>(uniform() * static_cast<double>(n)); }
  // Standard normal (Box-Muller, one of the pair).
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  uint64_t seed_;
  uint64_t index_ = 0;
};

}  // namespace oscar
