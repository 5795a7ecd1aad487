// Lane kernels of plain rounding, written once over a vector type V; included by one file per
// instruction set, which defines V in its anonymous namespace first.
#pragma once

#include "quant/lane_kernels.h"

namespace {

inline V clamp_to(V x, V threshold) {
  return V::min(V::max(x, V::sub(V::zero(), threshold)), threshold);
}

// Keeps the K largest magnitudes in registers, sorted descending.
template <int K>
void kth_by_insertion(const float* x, int head_dim, float* threshold) {
  V top[K];
  for (int k = 0; k < K; ++k) top[k] = V::set1(-1.0F);
  for (int d = 0; d < head_dim; ++d) {
    V value = V::abs(V::load(x + d * V::kLanes));
    for (int k = 0; k < K; ++k) {
      const V larger = V::max(top[k], value);
      value = V::min(top[k], value);
      top[k] = larger;
    }
  }
  V::store(threshold, top[K - 1]);
}

// Any k: the value with at least k magnitudes >= it, built bit by bit from the top (magnitudes are
// ordered like their bit patterns).
void kth_by_bits(const float* x, int head_dim, int k, float* threshold) {
  V prefix = V::zero();
  const V wanted = V::set1(static_cast<float>(k));
  for (int bit = 30; bit >= 0; --bit) {
    const V candidate = V::or_bits(prefix, V::bits(1U << bit));
    V count = V::zero();
    for (int d = 0; d < head_dim; ++d)
      count = V::add(count, V::one_where_bits_ge(V::abs(V::load(x + d * V::kLanes)), candidate));
    prefix = V::select(V::less(count, wanted), prefix, candidate);
  }
  V::store(threshold, prefix);
}

void kth_largest(const float* x, int head_dim, int k, float* threshold) {
  switch (k) {
#define OSCAR_KTH(K) \
  case K:            \
    return kth_by_insertion<K>(x, head_dim, threshold)
    OSCAR_KTH(1);
    OSCAR_KTH(2);
    OSCAR_KTH(3);
    OSCAR_KTH(4);
    OSCAR_KTH(5);
    OSCAR_KTH(6);
    OSCAR_KTH(7);
    OSCAR_KTH(8);
    OSCAR_KTH(9);
    OSCAR_KTH(10);
    OSCAR_KTH(11);
    OSCAR_KTH(12);
#undef OSCAR_KTH
    default:
      kth_by_bits(x, head_dim, k, threshold);
  }
}

void min_max(const float* x, const float* threshold, int head_dim, int group, float* minimum,
             float* maximum) {
  for (int first = 0; first < head_dim; first += group) {
    V low = V::load(x + first * V::kLanes), high = low;
    for (int d = first + 1; d < first + group; ++d) {
      const V value = V::load(x + d * V::kLanes);
      low = V::min(low, value);
      high = V::max(high, value);
    }
    if (threshold != nullptr) {
      low = clamp_to(low, V::load(threshold));
      high = clamp_to(high, V::load(threshold));
    }
    V::store(minimum + first / group * V::kLanes, low);
    V::store(maximum + first / group * V::kLanes, high);
  }
}

void mean_of(const float* x, int head_dim, float* mean) {
  V sum = V::zero();
  for (int d = 0; d < head_dim; ++d) sum = V::add(sum, V::load(x + d * V::kLanes));
  V::store(mean, V::div(sum, V::set1(static_cast<float>(head_dim))));
}

template <bool kClip>
void quantize_clipped(const oscar::QuantizeArgs& args) {
  const V top = V::set1(static_cast<float>(args.max_code));
  const V half = V::set1(0.5F);
  const V threshold = kClip ? V::load(args.threshold) : V::zero();
  for (int first = 0; first < args.head_dim; first += args.group) {
    const V scale = V::load(args.scale + first / args.group * V::kLanes);
    const V offset = V::load(args.offset + first / args.group * V::kLanes);
    for (int d = first; d < first + args.group; ++d) {
      V value = V::load(args.x + d * V::kLanes);
      if (kClip) value = clamp_to(value, threshold);
      const V position = V::add(V::div(V::sub(value, offset), scale), half);
      V::store_codes(args.codes + d * V::kLanes, V::min(V::max(position, V::zero()), top));
    }
  }
}

void quantize(const oscar::QuantizeArgs& args) {
  args.threshold == nullptr ? quantize_clipped<false>(args) : quantize_clipped<true>(args);
}

void dequantize(const uint8_t* codes, const float* scale, const float* low, int head_dim, int group,
                float* y) {
  for (int first = 0; first < head_dim; first += group) {
    const V step = V::load(scale + first / group * V::kLanes);
    const V base = V::load(low + first / group * V::kLanes);
    for (int d = first; d < first + group; ++d)
      V::store(y + d * V::kLanes, V::fma(V::load_codes(codes + d * V::kLanes), step, base));
  }
}

void plain_products(const float* x, const float* y, int head_dim, float* xx, float* xy) {
  V sum_xx = V::zero(), sum_xy = V::zero();
  for (int d = 0; d < head_dim; ++d) {
    const V value = V::load(x + d * V::kLanes);
    sum_xx = V::fma(value, value, sum_xx);
    sum_xy = V::fma(value, V::load(y + d * V::kLanes), sum_xy);
  }
  V::store(xx, sum_xx);
  V::store(xy, sum_xy);
}

void round_fp16(float* values, int count) {
  for (int i = 0; i < count; i += V::kLanes)
    V::store(values + i, V::round_fp16(V::load(values + i)));
}

// Reference decode, also for the shapes that the vector decoders leave.
void decode_row_plain(const oscar::DecodeArgs& args) {
  const oscar::RowFormat format{args.head_dim, args.group, args.bits,
                                oscar::MetaFormat::kScaleMinFp16, args.order};
  const unsigned mask = static_cast<unsigned>(format.max_code());
  for (int d = 0; d < args.head_dim; ++d) {
    const unsigned code =
        (static_cast<unsigned>(args.codes[format.code_byte(d)]) >> format.code_shift(d)) & mask;
    args.row[d] = args.levels[(static_cast<unsigned>(d / args.group) << args.bits) + code];
  }
}

}  // namespace
