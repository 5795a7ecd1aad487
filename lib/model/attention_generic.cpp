#include <bit>
#include <cmath>

#include "model/attention_kernels.h"
#include "model/attention_simd.h"

namespace oscar {
namespace {

// Four floats at a time in plain C++; the compiler maps it to whatever the baseline offers.
struct Vector {
  static constexpr size_t kWidth = 4;
  static constexpr size_t kWideVectors = 4, kWideRows = 2, kNarrowRows = 2;
  struct Reg {
    float lane[4];
  };
  template <class F>
  static Reg map(F f) {
    return {{f(0), f(1), f(2), f(3)}};
  }
  static Reg load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static void store(float* p, const Reg& x) {
    for (size_t i = 0; i < 4; ++i) p[i] = x.lane[i];
  }
  static Reg set(float x) { return {{x, x, x, x}}; }
  static Reg fma(const Reg& a, const Reg& b, const Reg& c) {
    return map([&](size_t i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static Reg add(const Reg& a, const Reg& b) {
    return map([&](size_t i) { return a.lane[i] + b.lane[i]; });
  }
  static Reg sub(const Reg& a, const Reg& b) {
    return map([&](size_t i) { return a.lane[i] - b.lane[i]; });
  }
  static Reg mul(const Reg& a, const Reg& b) {
    return map([&](size_t i) { return a.lane[i] * b.lane[i]; });
  }
  static Reg max(const Reg& a, const Reg& b) {
    return map([&](size_t i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Reg round(const Reg& a) {
    return map([&](size_t i) { return std::nearbyint(a.lane[i]); });
  }
  static Reg scale_by_power_of_two(const Reg& a, const Reg& n) {
    return map([&](size_t i) { return std::ldexp(a.lane[i], static_cast<int>(n.lane[i])); });
  }
  static Reg keep_first(const Reg& a, size_t count, const Reg& fill) {
    return map([&](size_t i) { return i < count ? a.lane[i] : fill.lane[i]; });
  }
  static void expand_pair(const uint32_t* p, Reg& first, Reg& second) {
    first = map([&](size_t i) { return std::bit_cast<float>(p[i] << 16); });
    second = map([&](size_t i) { return std::bit_cast<float>(p[i] & 0xffff0000U); });
  }
  static float reduce_max(const Reg& a) {
    const Reg b = max(a, {{a.lane[2], a.lane[3], a.lane[0], a.lane[1]}});
    return b.lane[0] > b.lane[1] ? b.lane[0] : b.lane[1];
  }
  static float reduce_add(const Reg& a) {
    return (a.lane[0] + a.lane[2]) + (a.lane[1] + a.lane[3]);
  }
};

void transpose(const float* rows, size_t row_stride, size_t num_rows, size_t width, float* panel) {
  for (size_t d = 0; d < width; ++d) {
    for (size_t j = 0; j < kKeyBlock; ++j) {
      panel[d * kKeyBlock + j] = j < num_rows ? rows[j * row_stride + d] : 0.0F;
    }
  }
}

}  // namespace

const AttentionKernels kAttentionGeneric = {attention_simd::gemm<Vector>,
                                            attention_simd::softmax<Vector>,
                                            attention_simd::gemm_bf16<Vector>,
                                            transpose,
                                            nullptr,
                                            nullptr,
                                            nullptr};

}  // namespace oscar
