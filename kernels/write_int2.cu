#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/launch_check.cuh"
#include "kernels/write_launch.h"
#include "kernels/write_rotate.cuh"

namespace oscar {
namespace {

using namespace write_tile;

constexpr int kWarps = 4;                   // small thread blocks make room for the next early
constexpr int kHeadsPerBlock = kWarps / 2;  // keys and values of each
constexpr int kRotateWarps = 16;            // they share R in shared memory

// Rows as they are -----------------------------------------------------------------------------

// This lane's part of a row of any type, centred, and the row's range. mean: this lane's part, may
// be null.
template <int D, ElementType kType>
__device__ __forceinline__ RowRange load_row(const void* input, int64_t offset, const float* mean,
                                             int rank, float (&x)[D / 4]) {
#pragma unroll
  for (int block = 0; block < D / 32; ++block)
    load_eight<kType>(input, offset + 32 * block, x + 8 * block);
  if (mean != nullptr) {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) x[i] -= __ldg(mean + 32 * (i / 8) + i % 8);
  }
  float finite = 0.0F;
  RowRange row{x[0], x[0], false};
#pragma unroll
  for (int i = 0; i < D / 4; ++i) {
    row.low = fminf(row.low, x[i]);
    row.high = fmaxf(row.high, x[i]);
    finite = fmaf(x[i], 0.0F, finite);  // NaN as soon as one element is not finite
  }
  row.low = quad_min(row.low);
  row.high = quad_max(row.high);
  row.refused = quad_sum(finite == 0.0F ? 0 : 1) != 0;
  if (row.refused) {
    row.low = row.high = 0.0F;
#pragma unroll
    for (int i = 0; i < D / 4; ++i) x[i] = 0.0F;
  }
  if (rank > 0) {
    const float threshold = kth_largest(x, rank);
    row.low = fmaxf(row.low, -threshold);
    row.high = fminf(row.high, threshold);
  }
  return row;
}

__device__ __forceinline__ int clip_rank(const WriteSide& side, int head_dim) {
  const int index = __ldg(&side.clip_index);
  return index >= 0 ? head_dim - index : 0;
}

// A warp writes one side of a record. Where the job's tokens lie in one half of the record, the
// keys' warp takes both sides instead: rows g are keys, rows g + 8 are values.
template <int D, ElementType kType, bool kCentre>
__global__ void __launch_bounds__(32 * kWarps, D > 128 ? 2 : 5)
    write_rows_kernel(const WriteParams p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y * kHeadsPerBlock + warp / 2, tile = blockIdx.x;
  if (head >= p.num_kv_heads) return;
  WriteJob job;
  find_job(p, tile, job);
  const int first = tile_token(job, tile);
  const bool whole = first >= 0 && first + kRecordTokens <= job.num_tokens;
  const bool upper = first <= -8, both = upper || first + 8 >= job.num_tokens;
  if (both && warp % 2 != 0) return;
  uint8_t* record = record_of<D>(p, job, tile, head);
  bool key[2], present[2];
  int token[2], ranks[2];
  const WriteSide* sides[2];
  int64_t offsets[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    key[r] = both ? r == 0 : warp % 2 == 0;
    token[r] = g + 8 * (both ? (upper ? 1 : 0) : r);
    const TileRow row = tile_row(job, first, token[r]);
    present[r] = row.present;
    sides[r] = p.sides + 2 * job.side_pair + (key[r] ? 0 : 1);
    ranks[r] = clip_rank(*sides[r], D);
    offsets[r] = row.index * p.token_stride + head * p.head_stride + 8 * t;
  }
  uint32_t chunks[2][D / 32];
  uint32_t stored = 0;  // of row t, t = 0 or 1
  if constexpr (kType == ElementType::kBf16 && !kCentre) {
    const uint16_t* rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      rows[r] = static_cast<const uint16_t*>(key[r] ? job.k : job.v) + offsets[r];
    RowRange ranges[2];
    {
      uint32_t pairs[2][D / 8];
#pragma unroll
      for (int r = 0; r < 2; ++r) load_pairs<D>(rows[r], pairs[r]);
      tile_ranges(pairs, ranks, ranges);
    }
    RowGrid grids[2];
    tile_grids(ranges, {present[0] && t == 0, present[1] && t == 1}, p.counters, grids, stored);
    // The search needs the registers: the rows come again, from the L1 cache.
    const auto pack = [&]<bool kKey0, bool kKey1>() {
#pragma unroll
      for (int block = 0; block < D / 32; ++block) {
        uint32_t pairs[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) load_pairs<32>(rows[r] + 32 * block, pairs[r]);
        pack_both<kKey0, kKey1>(pairs[0], pairs[1], grids, chunks[0][block], chunks[1][block]);
      }
    };
    if (both) {
      pack.template operator()<true, false>();
    } else if (key[0]) {
      pack.template operator()<true, true>();
    } else {
      pack.template operator()<false, false>();
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* mean = kCentre ? sides[r]->mean + head * D + 8 * t : nullptr;
      float x[D / 4];
      const RowRange range =
          load_row<D, kType>(key[r] ? job.k : job.v, offsets[r], mean, ranks[r], x);
      const RowGrid grid = row_grid(range, present[r] && t == 0, p.counters);
      if (t == r) stored = grid.stored;
#pragma unroll
      for (int block = 0; block < D / 32; ++block)
        chunks[r][block] =
            key[r] ? pack_eight<true>(x + 8 * block, grid) : pack_eight<false>(x + 8 * block, grid);
    }
  }
  if (whole && key[0]) {
    place_keys<D>(record, lane, chunks);
  } else if (whole) {
    place_values<D>(record + record_code_bytes(D), lane, chunks);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (present[r] && key[r]) place_row<D, true>(record, token[r], t, chunks[r]);
      if (present[r] && !key[r]) place_row<D, false>(record, token[r], t, chunks[r]);
    }
  }
  if (t == 0 && present[0]) place_meta(record, D, key[0], token[0], stored);
  if (t == 1 && present[1]) place_meta(record, D, key[1], token[1], stored);
}

// Rows rotated inside ----------------------------------------------------------------------------

// Warps that have registers (255 for large heads and rows of two pieces).
__host__ __device__ constexpr int rotate_warps(int head_dim, ElementType type) {
  return head_dim <= 128 && type != ElementType::kFp32 ? kRotateWarps : kRotateWarps / 2;
}

// Thread block (x, y): tiles_per_block tiles of one head and side (y = 2 head + side).
template <int D, ElementType kType, bool kShared>
__global__ void __launch_bounds__(32 * rotate_warps(D, kType), 1)
    write_rotated_kernel(const WriteParams p, int tiles_per_block) {
  extern __shared__ __align__(1024) uint4 shared_fragments[];
  constexpr int kBlockWarps = rotate_warps(D, kType);
#ifdef OSCAR_HAS_WGMMA
  constexpr bool kWgmma = kShared && D % 64 == 0;
#else
  constexpr bool kWgmma = false;
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y / 2;
  const bool key = blockIdx.y % 2 == 0;
  int begin = blockIdx.x * tiles_per_block;
  const int limit = min(begin + tiles_per_block, p.num_tiles);
  while (begin < limit) {
    const TileRun run = find_run(p, begin, limit);
    const WriteSide side = p.sides[2 * run.side_pair + (key ? 0 : 1)];
    const auto* fragments = reinterpret_cast<const uint4*>(
        static_cast<const uint8_t*>(side.rotation) + head * side.rotation_head_bytes);
    if constexpr (kShared) {
      __syncthreads();
#ifdef OSCAR_HAS_WGMMA
      if constexpr (kWgmma)
        load_swizzled<D>(fragments, reinterpret_cast<uint8_t*>(shared_fragments));
#endif
      if constexpr (!kWgmma) {
        for (int i = threadIdx.x; i < D * D / 4; i += 32 * kBlockWarps)
          ptx::copy_async_16(ptx::shared_address(shared_fragments + i), fragments + i);
        asm volatile("cp.async.wait_all;" ::: "memory");
      }
      __syncthreads();
      fragments = shared_fragments;
    }
    const int rank = side.clip_index >= 0 ? D - side.clip_index : 0;
    // The warps of a warpgroup go together; what is past the end repeats the last tile.
    for (int first_of_four = run.begin + warp / 4 * 4; first_of_four < run.end;
         first_of_four += kBlockWarps) {
      const bool mine = first_of_four + warp % 4 < run.end;
      const int tile = min(first_of_four + warp % 4, run.end - 1);
      WriteJob job;
      find_job(p, tile, job);
      const int first = tile_token(job, tile);
      const bool whole = first >= 0 && first + kRecordTokens <= job.num_tokens;
      uint8_t* record = record_of<D>(p, job, tile, head);
      bool present[2];
      const void* rows[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const TileRow row = tile_row(job, first, g + 8 * r);
        present[r] = mine && row.present;
        const int64_t offset = row.index * p.token_stride + head * p.head_stride + 8 * t;
        rows[r] = static_cast<const uint8_t*>(key ? job.k : job.v) +
                  offset * (kType == ElementType::kFp32 ? 4 : 2);
      }
      uint32_t pairs[2][D / 8];
      const float* mean = p.subtract_mean ? side.mean + head * D : nullptr;
#ifdef OSCAR_HAS_WGMMA
      if constexpr (kWgmma)
        rotate_tile_wgmma<D, kType>(rows, reinterpret_cast<const uint8_t*>(shared_fragments), mean,
                                    pairs);
#endif
      if constexpr (!kWgmma)
        rotate_tile<D, kType>(
            rows, fragments, mean, [&](int i) { return 32 * (i / 4) + 8 * t + 2 * (i % 4); },
            pairs);
      const int ranks[2] = {rank, rank};
      RowRange ranges[2];
      tile_ranges(pairs, ranks, ranges);
      RowGrid grids[2];
      uint32_t chunks[2][D / 32], stored;
      tile_grids(ranges, {present[0] && t == 0, present[1] && t == 1}, p.counters, grids, stored);
#pragma unroll
      for (int block = 0; block < D / 32; ++block) {
        if (key) {
          pack_both<true, true>(pairs[0] + 4 * block, pairs[1] + 4 * block, grids, chunks[0][block],
                                chunks[1][block]);
        } else {
          pack_both<false, false>(pairs[0] + 4 * block, pairs[1] + 4 * block, grids,
                                  chunks[0][block], chunks[1][block]);
        }
      }
      if (whole && key) {
        if (mine) place_keys<D>(record, lane, chunks);
      } else if (whole) {
        if (mine) place_values<D>(record + record_code_bytes(D), lane, chunks);
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (present[r] && key) place_row<D, true>(record, g + 8 * r, t, chunks[r]);
          if (present[r] && !key) place_row<D, false>(record, g + 8 * r, t, chunks[r]);
        }
      }
      if (t < 2 && (t == 0 ? present[0] : present[1]))
        place_meta(record, D, key, g + 8 * t, stored);
    }
    begin = run.end;
  }
}

template <int D, ElementType kType>
void launch_rotated(const WriteParams& p, cudaStream_t stream) {
  const int bytes = static_cast<int>(write_rotation_bytes(D));
  const int sides = 2 * p.num_kv_heads;
  constexpr int kBlockWarps = rotate_warps(D, kType);
  const WriteGrid grid = choose_write_grid({.num_tiles = p.num_tiles,
                                            .sides = sides,
                                            .num_pairs = p.num_pairs,
                                            .slots = device_multiprocessors(),
                                            .tiles_per_round = kBlockWarps,
                                            .max_rounds = 8,
                                            .load_rounds = 1.0});
  const dim3 blocks(grid.blocks, sides);
  if (bytes <= device_shared_bytes()) {
    const auto kernel = write_rotated_kernel<D, kType, true>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "write_int2_rtn: shared memory");
    kernel<<<blocks, 32 * kBlockWarps, bytes, stream>>>(p, grid.tiles_per_block);
  } else {
    write_rotated_kernel<D, kType, false>
        <<<blocks, 32 * kBlockWarps, 0, stream>>>(p, grid.tiles_per_block);
  }
}

template <int D, ElementType kType>
void launch_type(const WriteParams& p, cudaStream_t stream) {
  if (p.rotate) return launch_rotated<D, kType>(p, stream);
  const dim3 grid(p.num_tiles, (p.num_kv_heads + kHeadsPerBlock - 1) / kHeadsPerBlock);
  if (p.subtract_mean) {
    write_rows_kernel<D, kType, true><<<grid, 32 * kWarps, 0, stream>>>(p);
  } else {
    write_rows_kernel<D, kType, false><<<grid, 32 * kWarps, 0, stream>>>(p);
  }
}

template <int D>
void launch_dim(const WriteParams& p, cudaStream_t stream) {
  switch (p.input_type) {
    case ElementType::kBf16:
      return launch_type<D, ElementType::kBf16>(p, stream);
    case ElementType::kFp16:
      return launch_type<D, ElementType::kFp16>(p, stream);
    case ElementType::kFp32:
      return launch_type<D, ElementType::kFp32>(p, stream);
  }
}

}  // namespace

void check_write(const WriteParams& p, const char* op) {
  OSCAR_CHECK(record_supports(p.head_dim), op, ": head_dim 64, 96, 128, 192 or 256 expected, got ",
              p.head_dim);
  OSCAR_CHECK(p.num_kv_heads > 0 && p.num_kv_heads <= 32767, op,
              ": 1 to 32767 KV heads expected, got ", p.num_kv_heads);
  OSCAR_CHECK(p.num_jobs > 0 && p.num_tiles > 0, op, ": at least one job and tile expected, got ",
              p.num_jobs, " and ", p.num_tiles);
  OSCAR_CHECK(p.token_stride > 0 && p.token_stride % 8 == 0 && p.head_stride >= p.head_dim &&
                  p.head_stride % 8 == 0,
              op, ": positive strides in multiples of 8 elements expected, got ", p.token_stride,
              " and ", p.head_stride);
  OSCAR_CHECK(p.input_type == ElementType::kBf16 || p.input_type == ElementType::kFp16 ||
                  p.input_type == ElementType::kFp32,
              op, ": input must be bf16, fp16 or fp32");
  check_device_pointer(p.jobs, 16, op, "jobs");
  check_device_pointer(p.sides, 8, op, "sides");
  check_device_pointer(p.counters, 8, op, "counters");
}

void write_int2_rtn(const WriteParams& p, void* stream) {
  check_write(p, "write_int2_rtn");
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  for_head_dim(p.head_dim, [&]<int D>() { launch_dim<D>(p, cuda_stream); });
  check_cuda(cudaGetLastError(), "write_int2_rtn: launch");
}

}  // namespace oscar
