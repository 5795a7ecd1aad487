// Scalar lane kernels: the reference, and what a CPU without AVX2 runs.
#include <bit>
#include <cmath>

#include "base/float16.h"
#include "quant/lane_kernels.h"

namespace {

struct V {
  static constexpr int kLanes = 1;
  static constexpr int kMaxCandidates = 1;
  using Mask = bool;
  float v;

  static V zero() { return {0.0F}; }
  static V set1(float value) { return {value}; }
  static V bits(uint32_t pattern) { return {std::bit_cast<float>(pattern)}; }
  static V load(const float* from) { return {*from}; }
  static void store(float* to, V a) { *to = a.v; }
  static V add(V a, V b) { return {a.v + b.v}; }
  static V sub(V a, V b) { return {a.v - b.v}; }
  static V mul(V a, V b) { return {a.v * b.v}; }
  static V div(V a, V b) { return {a.v / b.v}; }
  static V fma(V a, V b, V c) { return {std::fma(a.v, b.v, c.v)}; }
  // The second operand when they are equal or unordered, as the vector instructions do.
  static V min(V a, V b) { return {a.v < b.v ? a.v : b.v}; }
  static V max(V a, V b) { return {a.v > b.v ? a.v : b.v}; }
  static V abs(V a) { return {std::fabs(a.v)}; }
  static V fms(V a, V b, V c) { return {std::fma(a.v, b.v, -c.v)}; }
  static V nearest(V a) { return {std::nearbyint(a.v)}; }
  static V floor(V a) { return {std::floor(a.v)}; }
  static Mask less(V a, V b) { return a.v < b.v; }
  static bool any(Mask mask) { return mask; }
  static V select(Mask mask, V yes, V no) { return mask ? yes : no; }
  static V or_bits(V a, V b) {
    return bits(std::bit_cast<uint32_t>(a.v) | std::bit_cast<uint32_t>(b.v));
  }
  static V one_where_bits_ge(V a, V b) {
    return {std::bit_cast<uint32_t>(a.v) >= std::bit_cast<uint32_t>(b.v) ? 1.0F : 0.0F};
  }
  static V round_fp16(V a) { return {oscar::round_to_fp16(a.v)}; }
  // Codes are non-negative: truncation.
  static void store_codes(uint8_t* to, V a) { *to = static_cast<uint8_t>(a.v); }
  static V load_codes(const uint8_t* from) { return {static_cast<float>(*from)}; }
  static void replace_codes(uint8_t* to, Mask mask, const uint8_t* from) {
    if (mask) *to = *from;
  }
  static void replace_index(int32_t* to, Mask mask, int index) {
    if (mask) *to = index;
  }
};

}  // namespace

#include "quant/lane_feedback_impl.h"
#include "quant/lane_rtn_impl.h"

namespace {

int load_rows(const float* rows, size_t, int, int, int head_dim, float* x) {
  for (int d = 0; d < head_dim; ++d) {
    if (!std::isfinite(rows[d])) return 0;
    x[d] = rows[d];
  }
  return -1;
}

}  // namespace

namespace oscar {

const LaneKernels* scalar_lane_kernels() {
  static const LaneKernels kernels{"scalar",       V::kLanes,       load_rows,       kth_largest,
                                   min_max,        mean_of,         quantize,        dequantize,
                                   plain_products, metric_products, try_candidates,  try_ranges,
                                   sweep_codes,    round_fp16,      decode_row_plain};
  return &kernels;
}

}  // namespace oscar
