// Products of panels in vector registers, written once for every vector width. Included only by
// weight_kernels_<set>.cpp, which define `Simd` (registers) and `Element` (float32 or bf16 pairs).
#pragma once

#include "model/weight_panels_simd.h"

namespace oscar {
namespace {

void pack_tokens(const PackTokensArgs& args) {
  const size_t units = (args.columns + kColumnUnit - 1) / kColumnUnit;
  constexpr size_t kBlockUnits = kBlockSteps / kStepsPerUnit;
  for (size_t t = 0; t < Simd::kTokenWidth; ++t) {
    for (size_t u = 0; u < units; ++u)
      pack_token_unit(args, t, u,
                      args.panel + (u / kBlockUnits * Simd::kTokenWidth + t) * kBlockSteps +
                          u % kBlockUnits * kStepsPerUnit);
  }
}

template <size_t kTokens>
void multiply_tokens(const MultiplyArgs& args) {
  Vec sums[kTokens][2];
  for (size_t t = 0; t < kTokens; ++t) sums[t][0] = sums[t][1] = Simd::zero();
  // The outputs are written after some thousand cycles: fetched now, they are there then.
  for (size_t t = 0; t < kTokens && t < args.num_tokens; ++t) {
    const float* out = args.out + t * args.out_stride;
    for (size_t r = 0; r < kRowWidth; r += 16) __builtin_prefetch(out + r, 1);
  }
  const float* w = reinterpret_cast<const float*>(args.weights);
  const float* x = reinterpret_cast<const float*>(args.tokens);
  for (size_t step = 0; step < args.steps; ++step) {
    const Vec w0 = Simd::load(w), w1 = Simd::load(w + kLanes);
#pragma GCC unroll 16
    for (size_t t = 0; t < kTokens; ++t) {
      const Vec token = Simd::set1(x[t * kBlockSteps]);
      sums[t][0] = Element::multiply_add(w0, token, sums[t][0]);
      sums[t][1] = Element::multiply_add(w1, token, sums[t][1]);
    }
    w += kRowWidth;
    ++x;
  }
  const auto put = [&](size_t t, float* target) {
    for (size_t i = 0; i < 2; ++i) {
      Vec value = sums[t][i];
      if (args.accumulate) value = Simd::add(value, Simd::load(target + i * kLanes));
      Simd::store(target + i * kLanes, value);
    }
  };
#pragma GCC unroll 16
  for (size_t t = 0; t < kTokens; ++t) {
    if (t >= args.num_tokens) break;
    float* out = args.out + t * args.out_stride;
    if (args.num_rows == kRowWidth) {
      put(t, out);
    } else {
      alignas(64) float row[kRowWidth] = {};
      if (args.accumulate) std::memcpy(row, out, args.num_rows * sizeof(float));
      put(t, row);
      std::memcpy(out, row, args.num_rows * sizeof(float));
    }
    if (args.bias != nullptr)
      for (size_t r = 0; r < args.num_rows; ++r) out[r] += args.bias[r];
  }
}

void multiply(const MultiplyArgs& args) {
  constexpr size_t kThird = Simd::kTokenWidth / 3;
  if (args.num_tokens > 2 * kThird) return multiply_tokens<3 * kThird>(args);
  if (args.num_tokens > kThird) return multiply_tokens<2 * kThird>(args);
  multiply_tokens<kThird>(args);
}

const WeightKernels kKernels = {gemv,
                                {Simd::kTokenWidth, kRowWidth, Element::kColumns, pack_tokens,
                                 pack_weights, multiply, nullptr, nullptr}};

}  // namespace
}  // namespace oscar
