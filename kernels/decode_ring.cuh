// Shared memory of a decode thread block, the ring in it, and the producer warp that fills the
// ring.
#pragma once

#include "kernels/attend_decode_int2.h"
#include "kernels/decode_chunk.cuh"
#include "kernels/decode_rows.cuh"

namespace oscar::decode {

constexpr float kLn2 = 0.6931471805599453F;
constexpr int kMergeColumns = 2;  // columns merged over the warps at once while the ring is in use

// Shared memory of a thread block, W consumer warps, 4 C columns; C = 1, 2: see decode_tile.cuh, 4:
// see decode_rows.cuh.
template <int D, int C, int W>
struct Config {
  static constexpr int kWarps = W;
  static constexpr int kConsumers = 32 * W;
  static constexpr int kThreads = kConsumers + 32;  // and the producer warp
  static constexpr int kColumns = 4 * C;
  static constexpr bool kRows = C == 4;
  // One ring entry: a page of one KV head, or keys and values of a BF16 chunk.
  static constexpr int kEntryBytes = record_page_bytes(D);
  static_assert(kChunkRows * 4 * D <= kEntryBytes);
  // Records whose scores are held at once: more gives independent mma chains, until registers run
  // out.
  static constexpr int kBatch = D <= 128 ? 4 : 2;
  static constexpr bool kQInRegisters = !kRows && D <= 128;

  static constexpr int kMergeStride = D + 16;  // floats of a column's row of partial sums
  static constexpr int kQBytes = kColumns * (D + 8) * 4;  // fp32 query, rows padded by 8
  static constexpr int kFragmentBytes = kQInRegisters ? 0 : D / 16 * 32 * (kRows ? 16 : 8);
  static constexpr int kMergeBytes = W * kMergeColumns * kMergeStride * 4;
  static constexpr int kStateBytes = W * kColumns * 2 * 4;
  static constexpr int kBarrierBytes = 1024;  // two barriers an entry
  static constexpr int kFixedBytes =
      kQBytes + kFragmentBytes + kMergeBytes + kStateBytes + kBarrierBytes;
};
// Ring entries that fit into the shared memory a thread block may have: a multiple of the consumer
// warps, so that a slot always belongs to the same warp.
template <class Config>
constexpr int ring_entries(int shared_bytes) {
  const int entries = (shared_bytes - Config::kFixedBytes) / Config::kEntryBytes;
  return (entries > 60 ? 60 : entries) / Config::kWarps * Config::kWarps;
}

// The ring: entry number n (counted over all runs of the thread block) lives in slot n mod kEntries
// and is consumed by warp n mod W. kEntries is a multiple of W: the slot's previous entry was the
// same warp's, so that a warp knows by itself which phase of a slot's barrier it waits for.
template <int kEntries>
struct Ring {
  uint8_t* entries;
  uint32_t barriers;  // shared address: full[kEntries], then empty[kEntries], 8 bytes each
  __device__ __forceinline__ uint32_t full(int slot) const { return barriers + slot * 8; }
  __device__ __forceinline__ uint32_t empty(int slot) const {
    return barriers + (kEntries + slot) * 8;
  }
};
// A consumer warp's place in the ring.
template <class C, int kEntries>
struct RingCursor {
  int slot;
  uint32_t phase = 0;
  __device__ __forceinline__ const uint8_t* wait(const Ring<kEntries>& ring) const {
    mbarrier_wait(ring.full(slot), phase);
    return ring.entries + slot * C::kEntryBytes;
  }
  __device__ __forceinline__ void release(const Ring<kEntries>& ring, int lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty(slot));
    slot += C::kWarps;
    if (slot >= kEntries) {
      slot -= kEntries;
      phase ^= 1;
    }
  }
};

// Chunk `chunk` of a sequence: 8 rows of a BF16 page, which of them hold tokens, and where.
struct Chunk {
  int table_entry, page_row;  // first row: entry of the BF16 page table, row in the page
  int row_begin, row_end;     // rows that hold tokens
  int first_position;         // position of row 0 (of a token that need not exist)
};
__device__ __forceinline__ Chunk locate_chunk(const MixedCacheView& cache,
                                              const SequenceLengths& lengths, int chunk) {
  const int sink_chunks = (lengths.sink + kChunkRows - 1) / kChunkRows;
  if (chunk < sink_chunks) {
    const int first = chunk * kChunkRows;
    return {first / kBf16PageTokens, first % kBf16PageTokens, 0,
            min(kChunkRows, lengths.sink - first), first};
  }
  // Ring chunks are aligned in the ring: a chunk's first rows may be older or no tokens.
  const int ring_tokens = (cache.bf16_table_stride - cache.sink_table_pages) * kBf16PageTokens;
  const int skipped = lengths.recent_start % kChunkRows;
  const int first = (chunk - sink_chunks) * kChunkRows - skipped;  // recent token of row 0
  int slot = lengths.recent_start + first;
  if (slot >= ring_tokens) slot -= ring_tokens;
  return {cache.sink_table_pages + slot / kBf16PageTokens, slot % kBf16PageTokens, max(0, -first),
          min(kChunkRows, lengths.recent - first), lengths.sink + lengths.history + first};
}

// All of a run's description at once, so that its loads overlap.
__device__ __forceinline__ DecodeWork load_work(const DecodeWork* work, int run) {
  static_assert(sizeof(DecodeWork) % 16 == 0);
  constexpr int kParts = sizeof(DecodeWork) / 16;
  const int4* source = reinterpret_cast<const int4*>(work + run);
  int4 parts[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = source[i];
  DecodeWork result;
  memcpy(&result, parts, sizeof(result));
  return result;
}

// The copies of a warp's lane into its slot, all of them signalled on one barrier.
struct SlotCopy {
  const uint8_t *first, *second;  // second: may be null
  int first_bytes, second_bytes;
  __device__ __forceinline__ void start(uint32_t into, uint32_t barrier, int lane) const {
    if constexpr (kBulkCopies) {
      mbarrier_expect(barrier, first_bytes + second_bytes);
      bulk_copy(into, first, first_bytes, barrier);
      if (second_bytes > 0) bulk_copy(into + first_bytes, second, second_bytes, barrier);
    } else {
      for (int k = 16 * lane; k < first_bytes; k += 512) copy_async_16(into + k, first + k);
      for (int k = 16 * lane; k < second_bytes; k += 512)
        copy_async_16(into + first_bytes + k, second + k);
      copy_async_arrive(barrier);
    }
  }
};

// Fills the ring with everything the runs of this thread block need, in order: first a run's
// chunks, then its pages. Every lane copies its own entry, several side by side, since one copy
// costs hundreds of cycles of latency to issue; a deep ring of small entries takes more at once.
template <int D, class C, int kEntries>
__device__ __forceinline__ void produce(const AttendDecodeParams& p, const Ring<kEntries>& ring,
                                        int lane) {
  constexpr int kAtOnce = !kBulkCopies ? 1 : kEntries >= 48 ? 16 : kEntries >= 16 ? 8 : 2;
  const MixedCacheView& cache = p.cache;
  const int mine = kBulkCopies ? lane : 0;
  const bool copies = !kBulkCopies || lane < kAtOnce;
  int run_slot = 0, run_phase = 1;  // of the run's first entry; the phase its slot waits for
  bool filled = false;              // the ring has been filled once
  for (int run = blockIdx.x; run >= 0;) {
    const DecodeWork w = load_work(p.work, run);
    run = w.next;
    if (w.num_columns == 0) return;
    const int32_t* pages = cache.int2_page_table +
                           static_cast<int64_t>(w.seq) * cache.int2_table_stride + w.page_begin;
    const int32_t* bf16_pages =
        cache.bf16_page_table + static_cast<int64_t>(w.seq) * cache.bf16_table_stride;
    const int chunks = w.chunk_end - w.chunk_begin;
    const int entries = chunks + w.page_end - w.page_begin;
    const int last_page_bytes =
        min(kPageRecords,
            (w.lengths.history - (w.page_end - 1) * kInt2PageTokens + kRecordTokens - 1) /
                kRecordTokens) *
        record_bytes(D);
    const uint8_t* head_pages =
        static_cast<const uint8_t*>(cache.int2_pages) + w.kv_head * record_page_bytes(D);
    const int64_t page_stride = int64_t{cache.num_kv_heads} * record_page_bytes(D);
    // Page ids of 32 entries at a time, a lane each, loaded one batch ahead of their use.
    const auto load_id = [&](int i) {
      if (i >= entries) return 0;
      if (i >= chunks) return pages[i - chunks];
      return bf16_pages[locate_chunk(cache, w.lengths, w.chunk_begin + i).table_entry];
    };
    int ids = load_id(lane), next_ids = load_id(32 + lane);
    if (run >= 0) prefetch_l2(p.work + run);
    int slot = run_slot + mine, phase = run_phase;
    bool reused = filled;
    if (slot >= kEntries) slot -= kEntries, phase ^= 1, reused = true;
    for (int first = 0; first < entries; first += 32) {
      for (int held = 0; held < 32 && first + held < entries; held += kAtOnce) {
        const int i = first + held + mine;
        const int64_t id = __shfl_sync(~0U, ids, held + mine);
        if (copies && i < entries) {
          SlotCopy copy{};
          if (i >= chunks) {
            copy.first = head_pages + id * page_stride;
            copy.first_bytes = i + 1 < entries ? record_page_bytes(D) : last_page_bytes;
          } else {
            const Chunk chunk = locate_chunk(cache, w.lengths, w.chunk_begin + i);
            const int64_t offset =
                ((id * cache.num_kv_heads + w.kv_head) * kBf16PageTokens + chunk.page_row) * D;
            constexpr int bytes = kChunkRows * 2 * D;
            copy = {reinterpret_cast<const uint8_t*>(cache.k_bf16_pages + offset),
                    reinterpret_cast<const uint8_t*>(cache.v_bf16_pages + offset), bytes, bytes};
          }
          if (reused) mbarrier_wait(ring.empty(slot), phase);
          copy.start(shared_address(ring.entries + slot * C::kEntryBytes), ring.full(slot), lane);
        }
        __syncwarp();
        slot += kAtOnce;
        if (slot >= kEntries) slot -= kEntries, phase ^= 1, reused = true;
      }
      ids = next_ids;
      next_ids = load_id(first + 64 + lane);
    }
    run_slot += entries;
    filled = filled || run_slot >= kEntries;
    run_phase ^= run_slot / kEntries & 1;
    run_slot %= kEntries;
  }
}

}  // namespace oscar::decode
