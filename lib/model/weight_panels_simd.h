// Expansion of stored weights and activations to panels for the matrix kernels, and the
// matrix-vector product, written once for every vector width. Included only by
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

// Columns [unit * kColumnUnit, + kColumnUnit) of token t as steps -> target [kStepsPerUnit]; zeros
// for what is missing.
inline void pack_token_unit(const PackTokensArgs& args, size_t t, size_t unit, uint32_t* target) {
  const size_t column = unit * kColumnUnit, left = args.columns - column;
  const float* source = args.x + t * args.x_stride + column;
  alignas(64) float tail[kColumnUnit];
  if (t >= args.tokens || left < kColumnUnit) {
    std::memset(tail, 0, sizeof tail);
    if (t < args.tokens) std::memcpy(tail, source, left * sizeof(float));
    source = tail;
  }
  for (size_t s = 0; s < kStepsPerUnit; s += kLanes)
    Simd::store(reinterpret_cast<float*>(target + s),
                Element::load_steps(source + s * Element::kColumns));
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

}  // namespace
}  // namespace oscar
