// Shared memory of a decode thread block, the ring in it, and the producer warp that fills the
// ring.
#pragma once

#include "kernels/attend_decode_int2.h"
#include "kernels/decode_tile.cuh"

namespace oscar::decode {

constexpr float kLn2 = 0.6931471805599453F;
constexpr int kChunkRows = 16;    // tokens of a BF16 chunk
constexpr int kMergeColumns = 4;  // columns merged over the warps at once

// Shared memory of a thread block, W consumer warps.
template <int D, int NT, int W>
struct Config {
  static constexpr int kWarps = W;
  static constexpr int kConsumers = 32 * W;
  static constexpr int kThreads = kConsumers + 32;  // and the producer warp
  static constexpr int kColumns = 8 * NT;
  // One ring entry: a page of one KV head, or 16 rows of BF16 keys or values.
  static constexpr int kEntryBytes = record_page_bytes(D);
  static_assert(kChunkRows * 2 * D <= kEntryBytes);
  // Records whose scores are held at once: more gives independent mma chains, until registers run
  // out.
  static constexpr int kBatch = D * NT <= 128 ? 4 : (D * NT <= 256 ? 2 : 1);
  static constexpr bool kQInRegisters = D * NT <= 128;

  static constexpr int kQBytes = kColumns * (D + 8) * 4;  // fp32 query, rows padded by 8
  static constexpr int kFragmentBytes = kQInRegisters ? 0 : D / 16 * NT * 32 * 8;
  static constexpr int kMergeBytes = W * kMergeColumns * D * 4;
  static constexpr int kStateBytes = W * kColumns * 2 * 4;
  static constexpr int kBarrierBytes = 1024;  // two barriers an entry, and a flag
  static constexpr int kFixedBytes =
      kQBytes + kFragmentBytes + kMergeBytes + kStateBytes + kBarrierBytes;
};
// Ring entries that fit into the shared memory a thread block may have.
template <int D, int NT, int W>
constexpr int ring_entries(int shared_bytes) {
  const int entries =
      (shared_bytes - Config<D, NT, W>::kFixedBytes) / Config<D, NT, W>::kEntryBytes;
  return entries > 60 ? 60 : entries;
}

// The ring: entry number n (counted over all runs of the thread block) lives in slot n mod
// kEntries.
template <int kEntries>
struct Ring {
  uint8_t* entries;
  uint32_t barriers;  // shared address: full[kEntries], then empty[kEntries], 8 bytes each
  __device__ __forceinline__ uint32_t full(int n) const { return barriers + n % kEntries * 8; }
  __device__ __forceinline__ uint32_t empty(int n) const {
    return barriers + (kEntries + n % kEntries) * 8;
  }
  __device__ __forceinline__ static uint32_t round(int n) { return n / kEntries; }
  // Consumer: entry n has landed. The slot's previous entry must have been consumed first (copies
  // land out of order and another warp may lag): only then does the parity name this round.
  __device__ __forceinline__ void wait(int n) const {
    if (n >= kEntries) mbarrier_wait(empty(n), (round(n) - 1) & 1);
    mbarrier_wait(full(n), round(n) & 1);
  }
};

// Chunk `chunk` of a sequence: 16 rows of a BF16 page, which of them hold tokens, and where.
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

// Fills the ring with everything the runs of this thread block need, in order: a chunk is two
// entries (keys, values), a page one. Every lane copies its own entry, eight side by side, since
// one copy costs hundreds of cycles of latency to issue.
template <int D, class C, int kEntries>
__device__ __forceinline__ void produce(const AttendDecodeParams& p, const Ring<kEntries>& ring,
                                        int lane) {
  constexpr int kAtOnce = kEntries >= 16 ? 8 : kEntries / 2;
  const MixedCacheView& cache = p.cache;
  int n = 0;
  for (int run = blockIdx.x; run >= 0;) {
    const DecodeWork& w = p.work[run];
    run = w.next;
    if (w.num_columns == 0) return;
    const SequenceLengths lengths = w.lengths;
    const int32_t* pages =
        cache.int2_page_table + static_cast<int64_t>(w.seq) * cache.int2_table_stride;
    const int32_t* bf16_pages =
        cache.bf16_page_table + static_cast<int64_t>(w.seq) * cache.bf16_table_stride;
    const int kv_head = w.kv_head, page_begin = w.page_begin, page_end = w.page_end;
    const int chunk_begin = w.chunk_begin;
    const int chunk_entries = 2 * (w.chunk_end - chunk_begin);
    const int entries = chunk_entries + page_end - page_begin;
    // Page ids of 32 entries at a time, a lane each, loaded one batch ahead of their use.
    const auto load_id = [&](int i) {
      if (i >= entries) return 0;
      if (i >= chunk_entries) return pages[page_begin + i - chunk_entries];
      return bf16_pages[locate_chunk(cache, lengths, chunk_begin + i / 2).table_entry];
    };
    int ids = load_id(lane), next_ids = load_id(32 + lane);
    for (int i = 0; i < entries;) {
      const int held = i % 32;
      if (held == 0 && i > 0) {
        ids = next_ids;
        next_ids = load_id(i + 32 + lane);
      }
      const int count = min(kBulkCopies ? min(kAtOnce, 32 - held) : 1, entries - i);
      const int mine = i + (kBulkCopies ? lane : 0), slot = n + mine;
      const int64_t id = __shfl_sync(~0U, ids, (held + (kBulkCopies ? lane : 0)) % 32);
      const uint8_t* source = nullptr;
      int bytes = 0;
      if (mine < chunk_entries) {
        const Chunk chunk = locate_chunk(cache, lengths, chunk_begin + mine / 2);
        source = reinterpret_cast<const uint8_t*>(mine % 2 == 0 ? cache.k_bf16_pages
                                                                : cache.v_bf16_pages) +
                 ((id * cache.num_kv_heads + kv_head) * kBf16PageTokens + chunk.page_row) * (2 * D);
        bytes = kChunkRows * 2 * D;
      } else {
        const int page = page_begin + mine - chunk_entries;
        source = static_cast<const uint8_t*>(cache.int2_pages) +
                 (id * cache.num_kv_heads + kv_head) * record_page_bytes(D);
        bytes = min(kPageRecords, (lengths.history - page * kInt2PageTokens + 15) / 16) *
                record_bytes(D);
      }
      const uint32_t into = shared_address(ring.entries + slot % kEntries * C::kEntryBytes);
      if (!kBulkCopies || lane < count) {
        if (slot >= kEntries) mbarrier_wait(ring.empty(slot), (ring.round(slot) - 1) & 1);
        if constexpr (kBulkCopies) {
          mbarrier_expect(ring.full(slot), bytes);
          bulk_copy(into, source, bytes, ring.full(slot));
        } else {
          for (int k = 16 * lane; k < bytes; k += 512) copy_async_16(into + k, source + k);
          copy_async_arrive(ring.full(slot));
        }
      }
      __syncwarp();
      i += count;
    }
    n += entries;
  }
}

}  // namespace oscar::decode
