// What the cache writers share: finding a tile's job, loading its rows, ranges, metadata and the
// placing of codes. A tile is one record (16 tokens) of one KV head and side, held by a warp: the
// quad g (lanes 4 g .. 4 g + 3) has the rows g and g + 8, a quarter of each row a lane.
#pragma once

#include "kernels/job_search.cuh"
#include "kernels/ptx.cuh"
#include "kernels/row_select.cuh"
#include "kernels/write_int2.h"

namespace oscar::write_tile {

using namespace row_select;

__device__ __forceinline__ WriteJob load_job(const WriteJob* job) {
  WriteJob result;
  const auto* source = reinterpret_cast<const uint4*>(job);
  uint4 parts[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) parts[i] = __ldg(source + i);
  memcpy(&result, parts, sizeof(result));
  return result;
}
__device__ __forceinline__ int job_end_tile(const WriteJob& job) {
  return job.first_tile + write_tiles(job.first_token, job.num_tokens);
}

// The job with first_tile <= tile, and its index: where it is if all jobs are alike, else searched
// for. All lanes of a warp must call it.
__device__ __forceinline__ int find_job(const WriteParams& p, int tile, WriteJob& job) {
  const float ratio = static_cast<float>(p.num_jobs) / static_cast<float>(p.num_tiles);
  int index = min(static_cast<int>((static_cast<float>(tile) + 0.5F) * ratio), p.num_jobs - 1);
  job = load_job(p.jobs + index);
  if (job.first_tile <= tile && tile < job_end_tile(job)) return index;
  index = find_tile_job(p.jobs, p.num_jobs, tile);
  job = load_job(p.jobs + index);
  return index;
}

// The record of a tile in the pool.
template <int D>
__device__ __forceinline__ uint8_t* record_of(const WriteParams& p, const WriteJob& job, int tile,
                                              int head) {
  const int record = tile - job.first_tile + job.first_token / kRecordTokens;
  const int64_t page = __ldg(job.page_table + record / kPageRecords);
  return static_cast<uint8_t*>(job.pages) + (page * p.num_kv_heads + head) * record_page_bytes(D) +
         record % kPageRecords * record_bytes(D);
}
// Index in the job of the tile's first token (negative when the job begins inside the record).
__device__ __forceinline__ int tile_token(const WriteJob& job, int tile) {
  return ((tile - job.first_tile) * kRecordTokens) - job.first_token % kRecordTokens;
}

// A row of the tile, 0-15: is it the job's? Its index in the job; rows that are not the job's
// repeat one that is.
struct TileRow {
  bool present;
  int index;
};
__device__ __forceinline__ TileRow tile_row(const WriteJob& job, int first_token, int row) {
  const int index = first_token + row;
  return {index >= 0 && index < job.num_tokens, min(max(index, 0), job.num_tokens - 1)};
}

// Eight consecutive elements as floats.
template <ElementType kType>
__device__ __forceinline__ void load_eight(const void* base, int64_t offset, float* x) {
  if constexpr (kType == ElementType::kFp32) {
    const auto* p = reinterpret_cast<const float4*>(static_cast<const float*>(base) + offset);
    const float4 a = __ldg(p), b = __ldg(p + 1);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    const uint4 a = ptx::load_streaming(static_cast<const uint16_t*>(base) + offset);
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == ElementType::kBf16) {
        x[2 * i] = ptx::bf16_low(words[i]);
        x[2 * i + 1] = ptx::bf16_high(words[i]);
      } else {
        const float2 pair = ptx::unpack_fp16(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      }
    }
  }
}

// This lane's part (8 t + 32 block .. + 7) of a row of 16-bit elements.
template <int D>
__device__ __forceinline__ void load_pairs(const uint16_t* row, uint32_t (&pairs)[D / 8]) {
#pragma unroll
  for (int block = 0; block < D / 32; ++block) {
    const uint4 a = ptx::load_read_only(row + 32 * block);
    pairs[4 * block] = a.x, pairs[4 * block + 1] = a.y;
    pairs[4 * block + 2] = a.z, pairs[4 * block + 3] = a.w;
  }
}

// The clipped range of a row; refused: not finite.
struct RowRange {
  float low, high;
  bool refused;
};

__device__ __forceinline__ __nv_bfloat162 as_bf16(uint32_t pair) {
  return *reinterpret_cast<const __nv_bfloat162*>(&pair);
}
__device__ __forceinline__ uint32_t as_bits(__nv_bfloat162 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Ranges of the tile's rows after the clip to the ranks[r]-th largest magnitude; all ranks 0: no
// clip.
template <int N>
__device__ __forceinline__ void tile_ranges(const uint32_t (&pairs)[2][N], const int (&ranks)[2],
                                            RowRange (&ranges)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    __nv_bfloat162 least = as_bf16(pairs[r][0]), most = least;
#pragma unroll
    for (int i = 1; i < N; ++i) {
      least = __hmin2_nan(least, as_bf16(pairs[r][i]));
      most = __hmax2_nan(most, as_bf16(pairs[r][i]));
    }
    // (max, -min) in one register; a NaN stays one.
    const uint32_t low_halves = __byte_perm(as_bits(most), as_bits(least), 0x5410);
    const uint32_t high_halves = __byte_perm(as_bits(most), as_bits(least), 0x7632);
    __nv_bfloat162 ends =
        __hmax2_nan(as_bf16(low_halves ^ 0x80000000U), as_bf16(high_halves ^ 0x80000000U));
    ends = __hmax2_nan(ends, as_bf16(__shfl_xor_sync(~0U, as_bits(ends), 1)));
    ends = __hmax2_nan(ends, as_bf16(__shfl_xor_sync(~0U, as_bits(ends), 2)));
    ranges[r].high = ptx::bf16_low(as_bits(ends));
    ranges[r].low = -ptx::bf16_high(as_bits(ends));
    ranges[r].refused = !isfinite(ranges[r].high - ranges[r].low) || !isfinite(ranges[r].high);
    if (ranges[r].refused) ranges[r].low = ranges[r].high = 0.0F;
  }
  if (ranks[0] + ranks[1] > 0) {
    uint32_t magnitudes[2][N];
    int top[2];
    float wanted[2], thresholds[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = static_cast<int>(
          __float_as_uint(fmaxf(fabsf(ranges[r].low), fabsf(ranges[r].high))) >> 16);
      wanted[r] = static_cast<float>(ranks[r]);
#pragma unroll
      for (int i = 0; i < N; ++i) magnitudes[r][i] = pairs[r][i] & 0x7fff7fffU;
    }
    kth_largest_tile(magnitudes, top, wanted, thresholds);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (ranks[r] > 0) {
        ranges[r].low = fmaxf(ranges[r].low, -thresholds[r]);
        ranges[r].high = fminf(ranges[r].high, thresholds[r]);
      }
    }
  }
}

// Pair stored for a row and what turns its elements into codes: code = 3 * saturate(x * inverse +
// offset), rounded.
struct RowGrid {
  uint32_t stored;  // fp16 (scale, min)
  float inverse, offset;
};
__device__ __forceinline__ uint32_t pack_halves(__half scale, __half low) {
  const __half2 pair = __halves2half2(scale, low);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
// x / 3, rounded to nearest (x normal): the remainder corrects the product with the rounded
// reciprocal.
__device__ __forceinline__ float third(float x) {
  constexpr float kThird = 1.0F / 3.0F;
  const float quotient = x * kThird;
  return fmaf(fmaf(-3.0F, quotient, x), kThird, quotient);
}
// count: this lane counts what is odd about the row.
__device__ __forceinline__ RowGrid row_grid(const RowRange& row, bool count,
                                            WriteCounters* counters) {
  bool refused = row.refused;
  const float range = row.high - row.low;
  const float scale = third(fminf(fmaxf(range, 1e-8F), 1e38F));
  __half stored_scale = __float2half_rn(scale), stored_min = __float2half_rn(row.low);
  if (__hisinf(stored_scale) != 0 || __hisinf(stored_min) != 0) {
    refused = true;
    stored_scale = __float2half_rn(1.0F);
    stored_min = __float2half_rn(0.0F);
  }
  const bool constant = range == 0.0F || __heq(stored_scale, __float2half_rn(0.0F));
  if (constant) stored_scale = __float2half_rn(1.0F);
  RowGrid grid;
  grid.stored = pack_halves(stored_scale, stored_min);
  // One Newton step: at most a unit in the last place off.
  const float guess = __fdividef(1.0F, range);
  grid.inverse = constant || refused ? 0.0F : fmaf(fmaf(-range, guess, 1.0F), guess, guess);
  grid.offset = -row.low * grid.inverse;
  if (count && (refused || constant))
    atomicAdd(refused ? &counters->refused_rows : &counters->constant_rows, 1ULL);
  return grid;
}

// row_grid of both rows of a quad, one a lane: lanes with even t have row g, odd ones row g + 8.
// count[r]: this lane counts what is odd about row r. stored: of this lane's row.
__device__ __forceinline__ void tile_grids(const RowRange (&ranges)[2], const bool (&count)[2],
                                           WriteCounters* counters, RowGrid (&grids)[2],
                                           uint32_t& stored) {
  const int lane = threadIdx.x % 32;
  const bool second = lane % 2 != 0;
  const RowRange range{second ? ranges[1].low : ranges[0].low,
                       second ? ranges[1].high : ranges[0].high,
                       second ? ranges[1].refused : ranges[0].refused};
  const RowGrid grid = row_grid(range, second ? count[1] : count[0], counters);
  stored = grid.stored;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    grids[r].inverse = __shfl_sync(~0U, grid.inverse, r, 2);
    grids[r].offset = __shfl_sync(~0U, grid.offset, r, 2);
  }
}

// A code as the low bits of a float 2^23 + code; sums of shifted ones carry a constant that is
// taken off at the end. K packs even and odd dims into the halves of a word, V packs a run into 16
// bits.
constexpr uint32_t kCodeBase = 0x4B000000U;
__host__ __device__ constexpr int pack_shift(bool key, int e) {
  return key ? 16 * (e % 2) + 2 * (e / 2) : 2 * e;
}
__host__ __device__ constexpr uint32_t pack_base(bool key) {
  uint32_t sum = 0;
  for (int e = 0; e < 8; ++e) sum += kCodeBase << pack_shift(key, e);
  return sum;
}
__device__ __forceinline__ uint32_t code_bits(float x, const RowGrid& grid) {
  const float level = __saturatef(fmaf(x, grid.inverse, grid.offset));
  return __float_as_uint(fmaf(level, 3.0F, 8388608.0F));
}
template <bool kKey>
__device__ __forceinline__ uint32_t pack_eight(const float* x, const RowGrid& grid) {
  uint32_t word = 0U - pack_base(kKey);
#pragma unroll
  for (int e = 0; e < 8; ++e) word += code_bits(x[e], grid) * (1U << pack_shift(kKey, e));
  return word;
}
// Four registers of both rows.
template <bool kKey0, bool kKey1>
__device__ __forceinline__ void pack_both(const uint32_t* row0, const uint32_t* row1,
                                          const RowGrid (&grids)[2], uint32_t& chunk0,
                                          uint32_t& chunk1) {
  chunk0 = 0U - pack_base(kKey0), chunk1 = 0U - pack_base(kKey1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x[4] = {ptx::bf16_low(row0[i]), ptx::bf16_high(row0[i]), ptx::bf16_low(row1[i]),
                        ptx::bf16_high(row1[i])};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      chunk0 += code_bits(x[e], grids[0]) * (1U << pack_shift(kKey0, 2 * i + e));
      chunk1 += code_bits(x[2 + e], grids[1]) * (1U << pack_shift(kKey1, 2 * i + e));
    }
  }
}

// --- placing: chunks[r][block] are the codes of dims 32 block + 8 t .. + 7 of row g + 8 r, packed
// by pack_eight ---

// A lane's words of one side, in the record's order.
template <int D>
__device__ __forceinline__ void store_words(uint8_t* area, int lane,
                                            const uint32_t (&words)[D / 32]) {
  constexpr int kWords = D / 32, kFull = kWords / 4 * 4;
#pragma unroll
  for (int chunk = 0; chunk < kFull / 4; ++chunk)
    reinterpret_cast<uint4*>(area)[chunk * 32 + lane] = make_uint4(
        words[4 * chunk], words[4 * chunk + 1], words[4 * chunk + 2], words[4 * chunk + 3]);
  if constexpr (kWords - kFull >= 2)
    *reinterpret_cast<uint2*>(area + 4 * (kFull * 32 + lane * 2)) =
        make_uint2(words[kFull], words[kFull + 1]);
}

// A whole record's keys: the words of lane 4 g + t are this lane's codes.
template <int D>
__device__ __forceinline__ void place_keys(uint8_t* area, int lane,
                                           const uint32_t (&chunks)[2][D / 32]) {
  uint32_t words[D / 32] = {};
#pragma unroll
  for (int word = 0; word < D / 64 * 2; ++word)
    words[word] = chunks[word % 2][word / 2 * 2] | chunks[word % 2][word / 2 * 2 + 1] << 8;
  store_words<D>(area, lane, words);
  if constexpr (D % 64 != 0)
    *reinterpret_cast<uint32_t*>(area + 4 * record_word_index(D, lane, D / 32 - 1)) =
        chunks[0][D / 32 - 1] | chunks[1][D / 32 - 1] << 8;
}

// A whole record's values: two tokens share a word, so neighbouring quads exchange halves; even
// quads write the words of even blocks of dims, odd quads the odd ones.
template <int D>
__device__ __forceinline__ void place_values(uint8_t* area, int lane,
                                             const uint32_t (&chunks)[2][D / 32]) {
  const int g = lane / 4, t = lane % 4;
  const bool odd = g % 2 != 0;
  // own: this lane's half words of the block it writes, (tokens 0-7, tokens 8-15).
  const auto exchange = [&](uint32_t even_block, uint32_t odd_block, uint32_t& first,
                            uint32_t& second) {
    const uint32_t own = odd ? odd_block : even_block;
    const uint32_t other = __shfl_xor_sync(~0U, odd ? even_block : odd_block, 4);
    const uint32_t low = odd ? other : own, high = odd ? own : other;
    first = __byte_perm(low, high, 0x5410);
    second = __byte_perm(low, high, 0x7632);
  };
  uint32_t words[D / 32] = {};
#pragma unroll
  for (int q = 0; q < D / 64; ++q)
    exchange(chunks[0][2 * q] | chunks[1][2 * q] << 16,
             chunks[0][2 * q + 1] | chunks[1][2 * q + 1] << 16, words[2 * q], words[2 * q + 1]);
  store_words<D>(area, 4 * (4 * (g % 2) + t) + g / 2, words);
  if constexpr (D % 64 != 0) {  // runs of four dims: a byte of tokens 0-7, a byte of tokens 8-15
    const uint32_t both = chunks[0][D / 32 - 1] | chunks[1][D / 32 - 1] << 16;
    uint32_t word, unused;
    exchange(__byte_perm(both, 0, 0x4420), __byte_perm(both, 0, 0x4431), word, unused);
    *reinterpret_cast<uint32_t*>(
        area + 4 * record_word_index(D, 4 * (2 * t + g % 2) + g / 2, D / 32 - 1)) = word;
  }
}

// One row of a record (token 0-15 of it); other tokens keep their bits.
template <int D, bool kKey>
__device__ __forceinline__ void place_row(uint8_t* record, int token, int t,
                                          const uint32_t (&chunks)[D / 32]) {
  constexpr int kFull = D / 64 * 2;  // blocks in full word pairs
  const int half = token / 8;
  uint8_t* area = record + (kKey ? 0 : record_code_bytes(D));
#pragma unroll
  for (int block = 0; block < D / 32; ++block) {
    const int word = block / 2 * 2 + half;
    if constexpr (kKey) {
      const int lane = 4 * (token % 8) + t;
      if (block >= kFull) {
        uint8_t* at = area + 4 * record_word_index(D, lane, D / 32 - 1) + half;
        at[0] = static_cast<uint8_t>(chunks[block]);
        at[2] = static_cast<uint8_t>(chunks[block] >> 16);
      } else if (block % 2 == 1) {
        *reinterpret_cast<uint32_t*>(area + 4 * record_word_index(D, lane, word)) =
            chunks[block - 1] | chunks[block] << 8;
      }
    } else if (block >= kFull) {
      for (int part = 0; part < 2; ++part) {
        const int lane = 4 * (2 * t + part) + token % 8 / 2;
        area[4 * record_word_index(D, lane, D / 32 - 1) + 2 * (token % 2) + half] =
            static_cast<uint8_t>(chunks[block] >> (8 * part));
      }
    } else {
      const int lane = 4 * (block % 2 * 4 + t) + token % 8 / 2;
      *reinterpret_cast<uint16_t*>(area + 4 * record_word_index(D, lane, word) + 2 * (token % 2)) =
          static_cast<uint16_t>(chunks[block]);
    }
  }
}

__device__ __forceinline__ void place_meta(uint8_t* record, int head_dim, bool key, int token,
                                           uint32_t stored) {
  *reinterpret_cast<uint32_t*>(
      record + record_meta_offset(head_dim, key ? KvSide::kKey : KvSide::kValue, token)) = stored;
}

}  // namespace oscar::write_tile
