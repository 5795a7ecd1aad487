// Key and value tiles of prefill attention in shared memory: 64 rows of bf16 from BF16 rows
// (cp.async) or from an INT2 page (dequantized on the way).
//
// Layout of a tile, for ldmatrix and wgmma alike: tiles of 64 elements a row = 128 bytes, the
// 16-byte chunk c of row r at place c ^ (r mod 8); the tile of the next 64 dims follows.
#pragma once

#include "kernels/attend_prefill.h"
#include "kernels/record_unpack.cuh"

namespace oscar::prefill {

constexpr int kKeys = kPrefillBlockKeys;

// Byte offset of the 16-byte chunk `chunk` (8 dims) of a row in a tile of `rows` rows.
template <int kRows>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return chunk / 8 * (kRows * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
}
constexpr int tile_bytes(int head_dim, int rows) { return (head_dim + 63) / 64 * rows * 128; }

__device__ __forceinline__ void copy_16_or_zero(uint32_t destination, const void* source,
                                                bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(present ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// Where the BF16 rows of a block lie: row i at base + i * stride for i < wrap, from there on at
// wrapped + (i - wrap) * stride (the ring's next page).
struct RowSource {
  const uint16_t* base;
  const uint16_t* wrapped;
  int64_t stride;
  int wrap;

  __device__ __forceinline__ const uint16_t* row(int i) const {
    return i < wrap ? base + i * stride : wrapped + (i - wrap) * stride;
  }
};
template <int D>
__device__ __forceinline__ RowSource row_source(const AttendPrefillParams& p, const PrefillWork& w,
                                                const PrefillBlock& block, bool keys) {
  const MixedCacheView& cache = p.cache;
  if (block.source == PrefillSource::kNew) {
    const uint16_t* base = (keys ? p.k : p.v) +
                           (static_cast<int64_t>(w.new_begin) + block.first) * p.kv_token_stride +
                           w.kv_head * p.kv_head_stride;
    return {base, base, p.kv_token_stride, kKeys};
  }
  const int32_t* table =
      cache.bf16_page_table + static_cast<int64_t>(w.seq) * cache.bf16_table_stride;
  int slot = block.first, pages = cache.sink_table_pages;
  if (block.source == PrefillSource::kRecent) {
    table += cache.sink_table_pages;
    pages = cache.bf16_table_stride - cache.sink_table_pages;
    slot += w.lengths.recent_start;
    if (slot >= kBf16PageTokens * pages) slot -= kBf16PageTokens * pages;
  }
  const uint16_t* pool = keys ? cache.k_bf16_pages : cache.v_bf16_pages;
  const auto page_rows = [&](int page) {
    return pool + (static_cast<int64_t>(table[page]) * cache.num_kv_heads + w.kv_head) *
                      (kBf16PageTokens * D);
  };
  const int page = slot / kBf16PageTokens, in_page = slot % kBf16PageTokens;
  const int wrap = kBf16PageTokens - in_page;
  const uint16_t* base = page_rows(page) + in_page * D;
  const bool two_pages = block.count > wrap;
  return {base, two_pages ? page_rows(page + 1 == pages ? 0 : page + 1) : base, D, wrap};
}

// Starts the copies of a block's rows by `kThreads` threads; rows past the block's count become
// zeros.
template <int D, int kThreads>
__device__ __forceinline__ void copy_rows(const RowSource& source, int count, uint32_t tile,
                                          int thread) {
  constexpr int kChunks = D / 8;
  if constexpr (kThreads % kChunks == 0 && kThreads / kChunks % 8 == 0) {
    // A thread keeps its chunk and, because rows advance by a multiple of 8, its place in the row.
    constexpr int kStep = kThreads / kChunks;
    const int first = thread / kChunks, chunk = thread % kChunks;
    const uint32_t target = tile + chunk_offset<kKeys>(first, chunk);
    if (count == kKeys && source.wrap >= kKeys) {
      const uint16_t* at = source.row(first) + 8 * chunk;
      const int64_t step = kStep * source.stride;
#pragma unroll
      for (int i = 0; i < kKeys / kStep; ++i, at += step)
        ptx::copy_async_16(target + i * (kStep * 128), at);
      return;
    }
  }
#pragma unroll 1
  for (int i = thread; i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool present = row < count;
    copy_16_or_zero(tile + chunk_offset<kKeys>(row, chunk),
                    source.row(present ? row : 0) + 8 * chunk, present);
  }
}

// A record of a page, in registers: loads go ahead of their use.
template <int D, bool kKeySide = true, bool kValueSide = true>
struct PageLoads {
  unpack::LaneWords<D> k, v;
  uint32_t meta;
  __device__ __forceinline__ void load(const AttendPrefillParams& p, const PrefillWork& w,
                                       const PrefillBlock& block, int record, int lane) {
    const MixedCacheView& cache = p.cache;
    const int64_t page =
        cache.int2_page_table[static_cast<int64_t>(w.seq) * cache.int2_table_stride +
                              block.first / kInt2PageTokens];
    const uint8_t* at = static_cast<const uint8_t*>(cache.int2_pages) +
                        (page * cache.num_kv_heads + w.kv_head) * record_page_bytes(D) +
                        record * record_bytes(D);
    if constexpr (kKeySide) k.load(at, lane);
    if constexpr (kValueSide) v.load(at + record_code_bytes(D), lane);
    meta = unpack::load_meta(at, D, lane);
  }
};

constexpr ElementType kBf16 = ElementType::kBf16;

// Rows [16 record, 16 record + 16) of both tiles by one warp; kWhole: all 64 tokens are there, else
// rows past the count become zeros.
template <int D, bool kWhole, bool kKeySide, bool kValueSide>
__device__ __forceinline__ void store_record(const PageLoads<D, kKeySide, kValueSide>& loads,
                                             int count, int record, uint32_t k_tile,
                                             uint32_t v_tile, int lane) {
  const unpack::Levels<kBf16> levels(loads.meta);
  const auto present = [&](int row) { return kWhole || row < count; };
  const auto store_to = [&](uint32_t tile) {
    return [=](int token, int dim, const unpack::Run<kBf16>& run) {
      const int row = kRecordTokens * record + token;
      store_shared_16(tile + chunk_offset<kKeys>(row, dim / 8),
                      present(row) ? run.packed : make_uint4(0, 0, 0, 0));
    };
  };
  if constexpr (kKeySide)
    unpack::unpack_keys<D, kBf16, true>(loads.k, levels, lane, store_to(k_tile));
  if constexpr (!kValueSide) return;
  unpack::unpack_values<D, kBf16>(loads.v, levels, lane, store_to(v_tile),
                                  [&](int token, int dim, const unpack::Run<kBf16>& run, int half) {
                                    const int row = kRecordTokens * record + token;
                                    const uint32_t x = half ? run.packed.z : run.packed.x;
                                    const uint32_t y = half ? run.packed.w : run.packed.y;
                                    store_shared_8(
                                        v_tile + chunk_offset<kKeys>(row, dim / 8) + dim % 8 * 2,
                                        present(row) ? x : 0, present(row) ? y : 0);
                                  });
}
template <int D, bool kKeySide, bool kValueSide>
__device__ __forceinline__ void store_page(const PageLoads<D, kKeySide, kValueSide>& loads,
                                           int count, int record, uint32_t k_tile, uint32_t v_tile,
                                           int lane) {
  if (count == kKeys) {
    store_record<D, true>(loads, count, record, k_tile, v_tile, lane);
  } else {
    store_record<D, false>(loads, count, record, k_tile, v_tile, lane);
  }
}

}  // namespace oscar::prefill
