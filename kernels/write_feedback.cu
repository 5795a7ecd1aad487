#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/launch_check.cuh"
#include "kernels/write_feedback.cuh"
#include "kernels/write_launch.h"

namespace oscar {
namespace {

using namespace write_feedback;

constexpr int kMaxWarps = 8;

template <int D>
__device__ __forceinline__ void rotate_rows(const WriteParams& p, const void* input,
                                            const int64_t (&offsets)[2], const WriteSide& side,
                                            int head, const float* mean,
                                            uint32_t (&pairs)[2][D / 8]) {
  const int t = threadIdx.x % 4;
  const auto* fragments = reinterpret_cast<const uint4*>(
      static_cast<const uint8_t*>(side.rotation) + head * side.rotation_head_bytes);
  const int size = p.input_type == ElementType::kFp32 ? 4 : 2;
  const void* rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    rows[r] = static_cast<const uint8_t*>(input) + (offsets[r] + 8 * t) * size;
  const auto dim = [&](int i) { return 8 * i + 2 * t; };
  switch (p.input_type) {
    case ElementType::kBf16:
      return rotate_tile<D, ElementType::kBf16>(rows, fragments, mean, dim, pairs);
    case ElementType::kFp16:
      return rotate_tile<D, ElementType::kFp16>(rows, fragments, mean, dim, pairs);
    default:
      return rotate_tile<D, ElementType::kFp32>(rows, fragments, mean, dim, pairs);
  }
}

// What an owner keeps of its row.
struct OwnRow {
  uint8_t* record;
  float low, high;
  bool present, refused;
};

// Loads tile m (0, 1) of the warp's unit, leaves its z and tells the owners about their rows.
template <int D>
__device__ __forceinline__ void prepare_tile(const WriteParams& p, const WriteSide& side,
                                             const Metric& metric, int tile, int head, bool key,
                                             int m, bool exists, float* z, OwnRow& own) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  WriteJob job;
  find_job(p, tile, job);
  const int first = tile_token(job, tile);
  int64_t offsets[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    offsets[r] = tile_row(job, first, g + 8 * r).index * p.token_stride + head * p.head_stride;
  const void* input = key ? job.k : job.v;
  const float* mean = p.subtract_mean ? side.mean + head * D : nullptr;
  uint32_t pairs[2][D / 8];
  if (p.rotate) {
    rotate_rows<D>(p, input, offsets, side, head, mean, pairs);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) load_in_order<D>(p, input, offsets[r], mean, t, pairs[r]);
  }
  const int rank = side.clip_index >= 0 ? D - side.clip_index : 0;
  const int ranks[2] = {rank, rank};
  RowRange ranges[2];
  tile_ranges(pairs, ranks, ranges);
  multiply_by_l<D>(pairs, metric, z, m);
  const bool upper = lane % 16 >= 8;
  const int source = 4 * (lane % 8);
  float ends[2][2];
  int refused[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    ends[r][0] = __shfl_sync(~0U, ranges[r].low, source);
    ends[r][1] = __shfl_sync(~0U, ranges[r].high, source);
    refused[r] = __shfl_sync(~0U, ranges[r].refused ? 1 : 0, source);
  }
  uint8_t* record = record_of<D>(p, job, tile, head);
  if (lane / 16 == m) {
    own.record = record;
    own.low = upper ? ends[1][0] : ends[0][0];
    own.high = upper ? ends[1][1] : ends[0][1];
    own.refused = (upper ? refused[1] : refused[0]) != 0;
    own.present = exists && tile_row(job, first, lane % 16).present;
  }
}

// Thread block (x, y): tiles_per_block tiles of one head and side (y = 2 head + side).
template <int D, bool kShared>
__global__ void __launch_bounds__(32 * kMaxWarps, 1)
    write_feedback_kernel(const WriteParams p, int tiles_per_block) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int head = blockIdx.y / 2;
  const bool key = blockIdx.y % 2 == 0;
  constexpr int64_t kMetricBytes = write_metric_bytes(D);
  WarpMemory memory;
  memory.z = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(shared) +
                                      (kShared ? kMetricBytes : 0) + warp * Shape<D>::kWarpBytes);
  memory.words = reinterpret_cast<uint32_t*>(memory.z + Shape<D>::kZFloats);
  int begin = blockIdx.x * tiles_per_block;
  const int limit = min(begin + tiles_per_block, p.num_tiles);
  while (begin < limit) {
    const TileRun run = find_run(p, begin, limit);
    const WriteSide side = p.sides[2 * run.side_pair + (key ? 0 : 1)];
    const void* packed = static_cast<const uint8_t*>(side.metric) + head * kMetricBytes;
    if constexpr (kShared) {
      __syncthreads();
      for (int i = threadIdx.x; i < kMetricBytes / 16; i += blockDim.x)
        ptx::copy_async_16(ptx::shared_address(shared + i), static_cast<const uint4*>(packed) + i);
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
      packed = shared;
    }
    const Metric metric = metric_parts<D>(packed);
    for (int tile = run.begin + kUnitTiles * warp; tile < run.end; tile += kUnitTiles * warps) {
      OwnRow own{};
#pragma unroll 1
      for (int m = 0; m < kUnitTiles; ++m) {
        const bool exists = tile + m < run.end;
        prepare_tile<D>(p, side, metric, exists ? tile + m : tile, head, key, m, exists, memory.z,
                        own);
      }
      __syncwarp();
      Candidates candidates = make_candidates(p, own.low, own.high);
      encode_rows<D>(metric, memory, candidates);
      const Choice choice = choose(candidates, side.gain != 0, own.refused);
      if (own.present) {
        const uint32_t* words = memory.words + (choice.factor * 8 + lane % 8) * 4 + lane / 8;
        place_codes<D>(own.record, key, lane % 16, words, 32 * kFactors, choice.refused);
        place_meta(own.record, D, key, lane % 16, choice.stored);
        if (choice.refused) atomicAdd(&p.counters->refused_rows, 1ULL);
        if (choice.constant) atomicAdd(&p.counters->constant_rows, 1ULL);
        if (choice.clamped) atomicAdd(&p.counters->gain_clamped, 1ULL);
      }
      __syncwarp();
    }
    begin = run.end;
  }
}

template <int D, bool kShared>
void launch(const WriteParams& p, int warps, cudaStream_t stream) {
  const int sides = 2 * p.num_kv_heads;
  const WriteGrid grid = choose_write_grid({.num_tiles = p.num_tiles,
                                            .sides = sides,
                                            .num_pairs = p.num_pairs,
                                            .slots = device_multiprocessors(),
                                            .tiles_per_round = warps * kUnitTiles,
                                            .max_rounds = 4,
                                            .load_rounds = 0.2});
  const int bytes =
      static_cast<int>(kShared ? write_metric_bytes(D) : 0) + warps * Shape<D>::kWarpBytes;
  const auto kernel = write_feedback_kernel<D, kShared>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "write_int2_feedback: shared memory");
  kernel<<<dim3(grid.blocks, sides), 32 * warps, bytes, stream>>>(p, grid.tiles_per_block);
}

template <int D>
void launch_dim(const WriteParams& p, cudaStream_t stream) {
  const int warp_bytes = Shape<D>::kWarpBytes, memory = device_shared_bytes();
  const int beside =
      (memory - static_cast<int>(write_metric_bytes(D))) / warp_bytes;  // the metric in it
  if constexpr (D <= 192) {
    if (D <= 128 || beside >= 2) return launch<D, true>(p, std::min(kMaxWarps, beside), stream);
  }
  if constexpr (D >= 192) launch<D, false>(p, std::min(kMaxWarps, memory / warp_bytes), stream);
}

}  // namespace

void write_int2_feedback(const WriteParams& p, void* stream) {
  check_write(p, "write_int2_feedback");
  for (const float multiplier : p.multipliers)
    OSCAR_CHECK(multiplier > 0.0F && multiplier < 100.0F,
                "write_int2_feedback: positive multipliers expected, got ", multiplier);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  for_head_dim(p.head_dim, [&]<int D>() { launch_dim<D>(p, cuda_stream); });
  check_cuda(cudaGetLastError(), "write_int2_feedback: launch");
}

}  // namespace oscar
