// INT2 records back to rows, in registers: a token has four values a side, and a byte permute looks
// two of them up at once. Device code.
#pragma once

#include "kernels/mixed_cache.h"
#include "kernels/ptx.cuh"

namespace oscar::unpack {

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// Eight consecutive values of one token.
template <ElementType kType>
struct Run {
  uint4 packed;  // 16-bit types
};
template <>
struct Run<ElementType::kFp32> {
  float4 low, high;
};

// The four values of one (token, side): code * scale + min, rounded once. They are what the CPU's
// record_decode_row gives, signed zeros included.
template <ElementType kType>
struct Levels {
  uint32_t low, high;  // codes 0 and 1, codes 2 and 3
  __device__ __forceinline__ explicit Levels(uint32_t scale_min) {
    const float2 pair = ptx::unpack_fp16(scale_min);
    const float l0 = fmaf(0.0F, pair.x, pair.y), l1 = pair.x + pair.y;
    const float l2 = fmaf(2.0F, pair.x, pair.y), l3 = fmaf(3.0F, pair.x, pair.y);
    if constexpr (kType == ElementType::kBf16) {
      low = ptx::pack_bf16(l0, l1), high = ptx::pack_bf16(l2, l3);
    } else {
      low = ptx::pack_fp16(l0, l1), high = ptx::pack_fp16(l2, l3);
    }
  }
  __device__ __forceinline__ uint32_t pair_of(uint32_t selector) const {
    return byte_permute(low, high, selector);
  }
  // The levels that lane `source` holds.
  __device__ __forceinline__ Levels from_lane(int source) const {
    Levels levels;
    levels.low = __shfl_sync(~0U, low, source);
    levels.high = __shfl_sync(~0U, high, source);
    return levels;
  }

 private:
  Levels() = default;
};
template <>
struct Levels<ElementType::kFp32> {
  float scale, min;
  __device__ __forceinline__ explicit Levels(uint32_t scale_min) {
    const float2 pair = ptx::unpack_fp16(scale_min);
    scale = pair.x, min = pair.y;
  }
  __device__ __forceinline__ float value(uint32_t code) const {
    return fmaf(__uint_as_float(code | 0x4B000000U) - 8388608.0F, scale, min);
  }
  __device__ __forceinline__ Levels from_lane(int source) const {
    Levels levels;
    levels.scale = __shfl_sync(~0U, scale, source);
    levels.min = __shfl_sync(~0U, min, source);
    return levels;
  }

 private:
  Levels() = default;
};

// Permute selectors of the codes at positions j and j + 1 of both 16-bit halves of a word: byte 0 =
// (low half, j), 1 = (low, j + 1), 2 = (high, j), 3 = (high, j + 1). A code c selects bytes 2 c and
// 2 c + 1.
template <int j>
__device__ __forceinline__ uint32_t selectors(uint32_t word) {
  const uint32_t first = (word >> (2 * j)) & 0x00030003U;
  const uint32_t second =
      (j < 3 ? word << (6 - 2 * j) : word >> (j < 3 ? 0 : 2 * j - 6)) & 0x03000300U;
  return (first | second) * 0x22U + 0x10101010U;
}

// Keys: positions 4 b .. 4 b + 3 of both halves are eight consecutive dims, even ones in the low
// half.
template <int b, ElementType kType>
__device__ __forceinline__ Run<kType> key_run(uint32_t word, const Levels<kType>& levels) {
  Run<kType> run;
  if constexpr (kType == ElementType::kFp32) {
    const auto at = [&](int dim) {
      return levels.value((word >> (16 * (dim % 2) + 2 * (4 * b + dim / 2))) & 3U);
    };
    run.low = make_float4(at(0), at(1), at(2), at(3));
    run.high = make_float4(at(4), at(5), at(6), at(7));
  } else {
    const uint32_t s0 = byte_permute(selectors<4 * b>(word), 0, 0x3120);
    const uint32_t s1 = byte_permute(selectors<4 * b + 2>(word), 0, 0x3120);
    run.packed = make_uint4(levels.pair_of(s0), levels.pair_of(s0 >> 16), levels.pair_of(s1),
                            levels.pair_of(s1 >> 16));
  }
  return run;
}

// Values: a half is eight consecutive dims of one token.
template <ElementType kType>
__device__ __forceinline__ void value_runs(uint32_t word, const Levels<kType>& even,
                                           const Levels<kType>& odd, Run<kType>& even_run,
                                           Run<kType>& odd_run) {
  if constexpr (kType == ElementType::kFp32) {
    const auto at = [&](const Levels<kType>& levels, int half, int dim) {
      return levels.value((word >> (16 * half + 2 * dim)) & 3U);
    };
    even_run.low = make_float4(at(even, 0, 0), at(even, 0, 1), at(even, 0, 2), at(even, 0, 3));
    even_run.high = make_float4(at(even, 0, 4), at(even, 0, 5), at(even, 0, 6), at(even, 0, 7));
    odd_run.low = make_float4(at(odd, 1, 0), at(odd, 1, 1), at(odd, 1, 2), at(odd, 1, 3));
    odd_run.high = make_float4(at(odd, 1, 4), at(odd, 1, 5), at(odd, 1, 6), at(odd, 1, 7));
  } else {
    const uint32_t s[4] = {selectors<0>(word), selectors<2>(word), selectors<4>(word),
                           selectors<6>(word)};
    even_run.packed =
        make_uint4(even.pair_of(s[0]), even.pair_of(s[1]), even.pair_of(s[2]), even.pair_of(s[3]));
    odd_run.packed = make_uint4(odd.pair_of(s[0] >> 16), odd.pair_of(s[1] >> 16),
                                odd.pair_of(s[2] >> 16), odd.pair_of(s[3] >> 16));
  }
}

// What a lane reads of one side of a record, a chunk of 4, 2 or 1 words at a time.
template <int D>
struct LaneWords {
  static constexpr int kWords = D / 32, kFull = kWords / 4 * 4;
  uint32_t words[kWords];
  __device__ __forceinline__ void load(const uint8_t* codes, int lane) {
#pragma unroll
    for (int w = 0; w < kFull; w += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(codes + at<4>(w, lane));
      words[w] = x.x, words[w + 1] = x.y, words[w + 2] = x.z, words[w + 3] = x.w;
    }
    if constexpr (kWords % 4 >= 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(codes + at<2>(kFull, lane));
      words[kFull] = x.x, words[kFull + 1] = x.y;
    }
    if constexpr (kWords % 2 == 1)
      words[kWords - 1] = *reinterpret_cast<const uint32_t*>(codes + at<1>(kWords - 1, lane));
  }
  __device__ __forceinline__ void store(uint8_t* codes, int lane) const {
#pragma unroll
    for (int w = 0; w < kFull; w += 4) {
      *reinterpret_cast<uint4*>(codes + at<4>(w, lane)) =
          make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
    if constexpr (kWords % 4 >= 2) {
      *reinterpret_cast<uint2*>(codes + at<2>(kFull, lane)) =
          make_uint2(words[kFull], words[kFull + 1]);
    }
    if constexpr (kWords % 2 == 1)
      *reinterpret_cast<uint32_t*>(codes + at<1>(kWords - 1, lane)) = words[kWords - 1];
  }

 private:
  template <int kChunk>
  __device__ __forceinline__ static int at(int first_word, int lane) {
    return 4 * (record_word_index(D, 0, first_word) + kChunk * lane);
  }
};
// The (scale, min) of a lane: of key token `lane` for lanes 0-15, of value token `lane` - 16 above.
__device__ __forceinline__ uint32_t load_meta(const uint8_t* record, int head_dim, int lane) {
  return *reinterpret_cast<const uint32_t*>(
      record + record_meta_offset(head_dim, static_cast<KvSide>(lane / 16), lane % 16));
}

// Calls store(token, dim, Run) for the keys of a record: dims are multiples of 8. kSwap: lanes with
// odd g give the runs of a word in the other order (shared-memory banks). lane_levels: of the
// lane's load_meta.
template <int D, ElementType kType, bool kSwap, class Store>
__device__ __forceinline__ void unpack_keys(const LaneWords<D>& lane_words,
                                            const Levels<kType>& lane_levels, int lane,
                                            const Store& store) {
  const int g = lane / 4, t = lane % 4;
  const Levels<kType> levels[2] = {lane_levels.from_lane(g), lane_levels.from_lane(g + 8)};
  const int first = kSwap ? g & 1 : 0;
  const uint32_t order = first != 0 ? 0x2301U : 0x3210U;
#pragma unroll
  for (int w = 0; w < D / 64 * 2; ++w) {
    uint32_t word = lane_words.words[w];
    if constexpr (kSwap) word = byte_permute(word, 0, order);
    const int token = g + 8 * (w % 2), dim = 64 * (w / 2) + 8 * t;
    store(token, dim + 32 * first, key_run<0>(word, levels[w % 2]));
    store(token, dim + 32 * (1 - first), key_run<1>(word, levels[w % 2]));
  }
  if constexpr (D % 64 != 0) {
    const uint32_t word = lane_words.words[D / 32 - 1];
    store(g, D / 64 * 64 + 8 * t, key_run<0>(word, levels[0]));
    store(g + 8, D / 64 * 64 + 8 * t, key_run<1>(word, levels[1]));
  }
}

// The same for values; the last 32 dims of D = 96 come in runs of 4: store_half(token, dim, run,
// part) with part 0 or 1 = the first or last four values of the run.
template <int D, ElementType kType, class Store, class StoreHalf>
__device__ __forceinline__ void unpack_values(const LaneWords<D>& lane_words,
                                              const Levels<kType>& lane_levels, int lane,
                                              const Store& store, const StoreHalf& store_half) {
  const int a = lane / 4, b = lane % 4;
  const Levels<kType> levels[2][2] = {
      {lane_levels.from_lane(16 + 2 * b), lane_levels.from_lane(17 + 2 * b)},
      {lane_levels.from_lane(24 + 2 * b), lane_levels.from_lane(25 + 2 * b)}};
#pragma unroll
  for (int w = 0; w < D / 64 * 2; ++w) {
    Run<kType> even, odd;
    value_runs(lane_words.words[w], levels[w % 2][0], levels[w % 2][1], even, odd);
    const int token = 2 * b + 8 * (w % 2), dim = 64 * (w / 2) + 8 * a;
    store(token, dim, even);
    store(token + 1, dim, odd);
  }
  if constexpr (D % 64 != 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Run<kType> even, odd;
      value_runs(lane_words.words[D / 32 - 1], levels[half][0], levels[half][1], even, odd);
      const int token = 2 * b + 8 * half, dim = D / 64 * 64 + 4 * a;
      store_half(token, dim, even, half);
      store_half(token + 1, dim, odd, half);
    }
  }
}

}  // namespace oscar::unpack
