// Matrix kernels over stored weights, written once for every vector width. Included only by
// weight_kernels_<set>.cpp, which define `Simd` (registers) and `Element` (float32 or bf16 pairs).
#pragma once

#include "model/weight_decoders_simd.h"

namespace oscar {
namespace {

// ---- few tokens: straight from the stored blocks

template <class Decoder, size_t kTokens>
void gemv_tokens(const GemvArgs& args, size_t token_begin) {
  const StoredRows& weight = args.weight;
  const size_t units = weight.columns / kColumnUnit, tail = weight.columns % kColumnUnit;
  const float* x = args.x + token_begin * weight.columns;
  alignas(64) float x_tail[kTokens][kColumnUnit] = {};
  if (tail > 0) {
    for (size_t t = 0; t < kTokens; ++t)
      std::memcpy(x_tail[t], x + t * weight.columns + units * kColumnUnit, tail * sizeof(float));
  }
  for (size_t r = args.row_begin; r < args.row_end; ++r) {
    const uint8_t* row = weight.bytes + r * weight.row_bytes;
    Vec sums[kTokens][2];
    for (size_t t = 0; t < kTokens; ++t) sums[t][0] = sums[t][1] = Simd::zero();
    Vec w[kUnitVecs];
    for (size_t unit = 0; unit < units; ++unit) {
      Decoder::unit(row, unit, w);
      for (size_t t = 0; t < kTokens; ++t) {
        const float* x_unit = x + t * weight.columns + unit * kColumnUnit;
        for (size_t i = 0; i < kUnitVecs; ++i)
          sums[t][i % 2] = Simd::fma(w[i], Simd::load(x_unit + i * kLanes), sums[t][i % 2]);
      }
    }
    if constexpr (kPartialUnits<Decoder>) {
      if (tail > 0) {
        const TailUnit last(weight, row);
        Decoder::unit(last.bytes, 0, w);
        for (size_t t = 0; t < kTokens; ++t)
          for (size_t i = 0; i < kUnitVecs; ++i)
            sums[t][i % 2] = Simd::fma(w[i], Simd::load(x_tail[t] + i * kLanes), sums[t][i % 2]);
      }
    }
    const float bias = args.bias == nullptr ? 0.0F : args.bias[r];
    for (size_t t = 0; t < kTokens; ++t) {
      float& out = args.out[(token_begin + t) * args.out_stride + r];
      const float value = Simd::sum(Simd::add(sums[t][0], sums[t][1])) + bias;
      out = args.accumulate ? out + value : value;
    }
  }
}

void gemv(const GemvArgs& args) {
  with_decoder(args.weight.type, [&](auto decoder) {
    using Decoder = decltype(decoder);
    size_t t = 0;
    for (; t + 4 <= args.tokens; t += 4) gemv_tokens<Decoder, 4>(args, t);
    if (args.tokens - t >= 2) {
      gemv_tokens<Decoder, 2>(args, t);
      t += 2;
    }
    if (args.tokens - t == 1) gemv_tokens<Decoder, 1>(args, t);
  });
}

// ---- many tokens: panels

inline constexpr size_t kStepsPerUnit = kColumnUnit / Element::kColumns;

// rows: kLanes rows of 32 floats, row_stride apart, -> kStepsPerUnit steps of kLanes lanes, written
// panel_stride elements apart.
inline void pack_unit(const float* rows, size_t row_stride, uint32_t* panel, size_t panel_stride) {
  for (size_t s = 0; s < kStepsPerUnit; s += kLanes) {
    Vec block[kLanes];
    for (size_t r = 0; r < kLanes; ++r)
      block[r] = Element::load_steps(rows + r * row_stride + s * Element::kColumns);
    Simd::transpose(block);
    for (size_t i = 0; i < kLanes; ++i)
      Simd::store(reinterpret_cast<float*>(panel + (s + i) * panel_stride), block[i]);
  }
}

void pack_tokens(const PackTokensArgs& args) {
  const size_t units = (args.columns + kColumnUnit - 1) / kColumnUnit;
  constexpr size_t kBlockUnits = kBlockSteps / kStepsPerUnit;
  for (size_t t = 0; t < Simd::kTokenWidth; ++t) {
    for (size_t u = 0; u < units; ++u) {
      const size_t column = u * kColumnUnit, left = args.columns - column;
      const float* source = args.x + t * args.x_stride + column;
      alignas(64) float tail[kColumnUnit];
      if (t >= args.tokens || left < kColumnUnit) {
        std::memset(tail, 0, sizeof tail);
        if (t < args.tokens) std::memcpy(tail, source, left * sizeof(float));
        source = tail;
      }
      uint32_t* target = args.panel + (u / kBlockUnits * Simd::kTokenWidth + t) * kBlockSteps +
                         u % kBlockUnits * kStepsPerUnit;
      for (size_t s = 0; s < kStepsPerUnit; s += kLanes)
        Simd::store(reinterpret_cast<float*>(target + s),
                    Element::load_steps(source + s * Element::kColumns));
    }
  }
}

inline constexpr size_t kRowWidth = 2 * kLanes;

template <class Decoder>
void expand_unit(const StoredRows& weight, size_t row_index, size_t unit, float* out) {
  const uint8_t* row = weight.bytes + row_index * weight.row_bytes;
  Vec w[kUnitVecs];
  if (unit < weight.columns / kColumnUnit) {
    Decoder::unit(row, unit, w);
  } else if constexpr (kPartialUnits<Decoder>) {
    const TailUnit last(weight, row);
    Decoder::unit(last.bytes, 0, w);
  } else {
    return;  // whole blocks have whole units
  }
  for (size_t i = 0; i < kUnitVecs; ++i) Simd::store(out + i * kLanes, w[i]);
}

template <class Decoder>
void pack_weight_rows(const PackWeightsArgs& args) {
  for (size_t group = 0; group < 2; ++group) {
    alignas(64) float rows[kLanes][kColumnUnit] = {};
    const size_t begin = args.row_begin + group * kLanes;
    for (size_t u = 0; u < args.unit_count; ++u) {
      for (size_t r = 0; r < kLanes && begin + r < args.row_end; ++r)
        expand_unit<Decoder>(args.weight, begin + r, args.unit_begin + u, rows[r]);
      pack_unit(rows[0], kColumnUnit, args.panel + u * kStepsPerUnit * kRowWidth + group * kLanes,
                kRowWidth);
    }
  }
}

void pack_weights(const PackWeightsArgs& args) {
  with_decoder(args.weight.type, [&](auto decoder) { pack_weight_rows<decltype(decoder)>(args); });
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

const WeightKernels kKernels = {
    gemv, {Simd::kTokenWidth, kRowWidth, Element::kColumns, pack_tokens, pack_weights, multiply}};

}  // namespace
}  // namespace oscar
