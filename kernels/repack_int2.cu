#include <cuda_runtime.h>

#include "kernels/job_search.cuh"
#include "kernels/launch_check.cuh"
#include "kernels/record_unpack.cuh"
#include "kernels/repack_int2.h"
#include "kernels/table_check.cuh"

namespace oscar {
namespace {

constexpr int kWarps = 8;

// Where the rows of one side lie: byte strides between (slot, head) pairs, head fastest.
struct SideRows {
  uint8_t* codes;
  uint8_t* pairs;
  int code_stride, pair_stride;
};
struct KernelArgs {
  RepackParams p;
  SideRows sides[2];
};

// --- bits. A run of consecutive dims is two bits a dim, first dim lowest; records hold the even
// ------ dims of a key run in one byte and the odd ones in another.
__device__ __forceinline__ uint32_t interleave_key_run(uint32_t even_odd) {  // bytes 0 and 2
  uint32_t x = (even_odd | (even_odd << 4)) & 0x0F0F0F0FU;
  x = (x | (x << 2)) & 0x33333333U;
  return (x | (x >> 14)) & 0xFFFFU;
}
__device__ __forceinline__ uint32_t split_key_run(uint32_t run) {
  uint32_t x = (run & 0x3333U) | ((run << 14) & 0x33330000U);
  x = (x | (x >> 2)) & 0x0F0F0F0FU;
  return (x | (x >> 4)) & 0x00FF00FFU;
}
// Four codes of a byte to the low bits of four bytes, and back.
__device__ __forceinline__ uint32_t spread_codes(uint32_t byte) {
  const uint32_t pairs = (byte * 0x1001U) & 0x000F000FU;
  return (pairs * 0x41U) & 0x03030303U;
}
__device__ __forceinline__ uint32_t gather_codes(uint32_t bytes) {
  return (bytes * 0x01041040U) >> 24;
}

// --- metadata
__device__ __forceinline__ bool usable(float scale, float second) {
  return scale > 0.0F && isfinite(scale) && isfinite(second);
}
// A record's pair to the engine's bytes; false: it does not fit.
__device__ __forceinline__ bool write_engine_pair(MetaFormat meta, uint32_t scale_min,
                                                  uint8_t* out) {
  const float2 pair = ptx::unpack_fp16(scale_min);
  if (meta == MetaFormat::kScaleMinFp16First) {
    const bool fits = usable(pair.x, pair.y);
    *reinterpret_cast<uint32_t*>(out) = fits ? scale_min : 0x00003C00U;
    return fits;
  }
  const float zero = __fdiv_rn(-pair.y, pair.x);
  if (meta == MetaFormat::kScaleZeroFp32) {
    const bool fits = usable(pair.x, zero);
    *reinterpret_cast<float2*>(out) = fits ? make_float2(pair.x, zero) : make_float2(1.0F, 0.0F);
    return fits;
  }
  const bool bf16 = meta == MetaFormat::kScaleZeroBf16;
  const uint32_t packed = bf16 ? ptx::pack_bf16(pair.x, zero) : ptx::pack_fp16(pair.x, zero);
  const float2 stored =
      bf16 ? make_float2(ptx::bf16_low(packed), ptx::bf16_high(packed)) : ptx::unpack_fp16(packed);
  const bool fits = usable(stored.x, stored.y);
  *reinterpret_cast<uint32_t*>(out) = fits ? packed : (bf16 ? 0x00003F80U : 0x00003C00U);
  return fits;
}
// The engine's bytes to a record's pair.
__device__ __forceinline__ bool read_engine_pair(MetaFormat meta, const uint8_t* in,
                                                 uint32_t& scale_min) {
  if (meta == MetaFormat::kScaleMinFp16First) {
    scale_min = *reinterpret_cast<const uint32_t*>(in);
  } else {
    float2 pair;
    if (meta == MetaFormat::kScaleZeroFp32) {
      pair = *reinterpret_cast<const float2*>(in);
    } else {
      const uint32_t packed = *reinterpret_cast<const uint32_t*>(in);
      pair = meta == MetaFormat::kScaleZeroBf16
                 ? make_float2(ptx::bf16_low(packed), ptx::bf16_high(packed))
                 : ptx::unpack_fp16(packed);
    }
    scale_min = ptx::pack_fp16(pair.x, __fmul_rn(0.0F - pair.y, pair.x));
  }
  const float2 stored = ptx::unpack_fp16(scale_min);
  if (usable(stored.x, stored.y)) return true;
  scale_min = 0x00003C00U;  // scale 1, minimum 0
  return false;
}

// A warp = one record: through rows of consecutive dims in shared memory.
template <int D>
using RowTile = uint8_t[2][kRecordTokens][D / 4];

template <int D>
__device__ __forceinline__ void record_to_tile(const uint8_t* record, int lane, RowTile<D>& tile) {
  unpack::LaneWords<D> k, v;
  k.load(record, lane);
  v.load(record + record_code_bytes(D), lane);
  const int g = lane / 4, t = lane % 4;
  const auto put = [&](int side, int token, int dim, uint32_t run) {
    *reinterpret_cast<uint16_t*>(&tile[side][token][dim / 4]) = static_cast<uint16_t>(run);
  };
#pragma unroll
  for (int w = 0; w < D / 64 * 2; ++w) {
    const int token = 8 * (w % 2), dim = 64 * (w / 2);
    put(0, token + g, dim + 8 * t, interleave_key_run(k.words[w] & 0x00FF00FFU));
    put(0, token + g, dim + 32 + 8 * t, interleave_key_run((k.words[w] >> 8) & 0x00FF00FFU));
    put(1, token + 2 * t, dim + 8 * g, v.words[w] & 0xFFFFU);
    put(1, token + 2 * t + 1, dim + 8 * g, v.words[w] >> 16);
  }
  if constexpr (D % 64 != 0) {
    constexpr int dim = D / 64 * 64;
    const uint32_t k_word = k.words[D / 32 - 1], v_word = v.words[D / 32 - 1];
    put(0, g, dim + 8 * t, interleave_key_run(k_word & 0x00FF00FFU));
    put(0, g + 8, dim + 8 * t, interleave_key_run((k_word >> 8) & 0x00FF00FFU));
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // byte i: tokens 2 t, 2 t + 8, 2 t + 1, 2 t + 9
      tile[1][2 * t + i / 2 + 8 * (i % 2)][dim / 4 + g] = static_cast<uint8_t>(v_word >> (8 * i));
    }
  }
}

// keep: bit (16 side + token) set = that row of the record keeps its bits; zero: its codes become
// 0.
template <int D>
__device__ __forceinline__ void tile_to_record(const RowTile<D>& tile, int lane, uint8_t* record,
                                               uint32_t keep, uint32_t zero) {
  unpack::LaneWords<D> k, v;
  if (keep != 0) {
    k.load(record, lane);
    v.load(record + record_code_bytes(D), lane);
  }
  const int g = lane / 4, t = lane % 4;
  const auto run = [&](int side, int token, int dim) -> uint32_t {
    if (zero >> (16 * side + token) & 1U) return 0;
    return *reinterpret_cast<const uint16_t*>(&tile[side][token][dim / 4]);
  };
  const auto kept = [&](int side, int token, uint32_t mask) -> uint32_t {
    return keep >> (16 * side + token) & 1U ? mask : 0U;
  };
  const auto merge = [](uint32_t& word, uint32_t value, uint32_t mask) {
    word = mask == 0 ? value : (word & mask) | (value & ~mask);
  };
#pragma unroll
  for (int w = 0; w < D / 64 * 2; ++w) {
    const int token = 8 * (w % 2), dim = 64 * (w / 2);
    merge(k.words[w],
          split_key_run(run(0, token + g, dim + 8 * t)) |
              split_key_run(run(0, token + g, dim + 32 + 8 * t)) << 8,
          kept(0, token + g, ~0U));
    merge(v.words[w],
          run(1, token + 2 * t, dim + 8 * g) | run(1, token + 2 * t + 1, dim + 8 * g) << 16,
          kept(1, token + 2 * t, 0xFFFFU) | kept(1, token + 2 * t + 1, 0xFFFF0000U));
  }
  if constexpr (D % 64 != 0) {
    constexpr int dim = D / 64 * 64;
    merge(k.words[D / 32 - 1],
          split_key_run(run(0, g, dim + 8 * t)) | split_key_run(run(0, g + 8, dim + 8 * t)) << 8,
          kept(0, g, 0x00FF00FFU) | kept(0, g + 8, 0xFF00FF00U));
    uint32_t value = 0, mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * t + i / 2 + 8 * (i % 2);
      if ((zero >> (16 + token) & 1U) == 0)
        value |= static_cast<uint32_t>(tile[1][token][dim / 4 + g]) << (8 * i);
      mask |= kept(1, token, 0xFFU << (8 * i));
    }
    merge(v.words[D / 32 - 1], value, mask);
  }
  k.store(record, lane);
  v.store(record + record_code_bytes(D), lane);
}

template <int D>
__global__ void __launch_bounds__(32 * kWarps) repack_kernel(const KernelArgs args) {
  __shared__ __align__(16) RowTile<D> tiles[kWarps];
  const RepackParams& p = args.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (item >= static_cast<int64_t>(p.num_tiles) * p.num_kv_heads) return;
  const int head = static_cast<int>(item % p.num_kv_heads);
  const int job_tile = static_cast<int>(item / p.num_kv_heads);
  const RepackJob job = p.jobs[find_tile_job(p.jobs, p.num_jobs, job_tile)];
  const int tile_index = job_tile - job.first_tile + job.first_token / kRecordTokens;
  const int64_t page = job.page_table[tile_index / kPageRecords];
  uint8_t* record = static_cast<uint8_t*>(p.pages) +
                    (page * p.num_kv_heads + head) * record_page_bytes(D) +
                    tile_index % kPageRecords * record_bytes(D);
  RowTile<D>& tile = tiles[warp];

  // Lane = (side, token) for slots and pairs; lanes 0-15 and 16-31 hold the same slots.
  const int side = lane / 16, token = lane % 16;
  const int row = tile_index * kRecordTokens - job.first_token + token;
  const bool present = row >= 0 && row < job.num_tokens;
  const uint32_t absent = ~__ballot_sync(~0U, present);
  const int64_t slot_head =
      present ? job.slots[row] * p.num_kv_heads + head : 0;  // index of the row in the engine
  constexpr int kRowWords = D / 16;
  const bool quartered = p.rows.order == PackOrder::kQuartered;
  uint8_t* pair_bytes = args.sides[side].pairs + slot_head * args.sides[side].pair_stride;
  auto* record_pair =
      reinterpret_cast<uint32_t*>(record + record_meta_offset(D, static_cast<KvSide>(side), token));

  if (p.direction == RepackDirection::kToRows) {
    record_to_tile<D>(record, lane, tile);
    const bool fits = !present || write_engine_pair(p.rows.meta, *record_pair, pair_bytes);
    const uint32_t refused = ~__ballot_sync(~0U, fits);
    if (refused != 0 && lane == 0)
      atomicAdd(p.refused_rows, static_cast<unsigned long long>(__popc(refused)));
    __syncwarp();
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      for (int i = lane; i < kRecordTokens * kRowWords; i += 32) {
        const int row_token = i / kRowWords, word = i % kRowWords;
        const int64_t index = __shfl_sync(~0U, slot_head, row_token);
        const uint8_t* codes = tile[s][row_token];
        uint32_t bits = 0;
        if (quartered) {
#pragma unroll
          for (int q = 0; q < 4; ++q) bits |= spread_codes(codes[q * kRowWords + word]) << (2 * q);
        } else {
          bits = *reinterpret_cast<const uint32_t*>(codes + 4 * word);
        }
        if (refused >> (16 * s + row_token) & 1U) bits = 0;
        if ((absent >> row_token & 1U) == 0) {
          *reinterpret_cast<uint32_t*>(args.sides[s].codes + index * args.sides[s].code_stride +
                                       4 * word) = bits;
        }
      }
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    for (int i = lane; i < kRecordTokens * kRowWords; i += 32) {
      const int row_token = i / kRowWords, word = i % kRowWords;
      const int64_t index = __shfl_sync(~0U, slot_head, row_token);
      uint32_t bits = 0;
      if ((absent >> row_token & 1U) == 0) {
        bits = *reinterpret_cast<const uint32_t*>(args.sides[s].codes +
                                                  index * args.sides[s].code_stride + 4 * word);
      }
      uint8_t* codes = tile[s][row_token];
      if (quartered) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          codes[q * kRowWords + word] =
              static_cast<uint8_t>(gather_codes((bits >> (2 * q)) & 0x03030303U));
        }
      } else {
        *reinterpret_cast<uint32_t*>(codes + 4 * word) = bits;
      }
    }
  }
  uint32_t scale_min = 0;
  const bool fits = !present || read_engine_pair(p.rows.meta, pair_bytes, scale_min);
  const uint32_t refused = ~__ballot_sync(~0U, fits);
  if (refused != 0 && lane == 0)
    atomicAdd(p.refused_rows, static_cast<unsigned long long>(__popc(refused)));
  __syncwarp();
  tile_to_record<D>(tile, lane, record, absent, refused);
  if (present) *record_pair = scale_min;
}

template <int D>
void launch_dim(const KernelArgs& args, cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(args.p.num_tiles) * args.p.num_kv_heads;
  const auto blocks = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  repack_kernel<D><<<blocks, 32 * kWarps, 0, stream>>>(args);
}

constexpr const char* kOp = "repack_int2";

KernelArgs make_args(const RepackParams& p) {
  const EngineRows& rows = p.rows;
  KernelArgs args{p, {}};
  if (rows.layout == EngineRows::Layout::kSglang) {
    OSCAR_CHECK(rows.meta == MetaFormat::kScaleZeroFp32 ||
                    rows.meta == MetaFormat::kScaleZeroBf16 ||
                    rows.meta == MetaFormat::kScaleZeroFp16,
                kOp, ": SGLang rows need scale and zero as fp32, bf16 or fp16");
    const int pair_stride = rows.meta == MetaFormat::kScaleZeroFp32 ? 8 : 4;
    void* const pointers[4] = {rows.k_codes, rows.k_pairs, rows.v_codes, rows.v_pairs};
    const char* const names[4] = {"k_codes", "k_pairs", "v_codes", "v_pairs"};
    for (int i = 0; i < 4; ++i) check_device_pointer(pointers[i], 8, kOp, names[i]);
    for (int side = 0; side < 2; ++side) {
      args.sides[side] = {static_cast<uint8_t*>(pointers[2 * side]),
                          static_cast<uint8_t*>(pointers[2 * side + 1]), p.head_dim / 4,
                          pair_stride};
    }
    return args;
  }
  OSCAR_CHECK(rows.layout == EngineRows::Layout::kVllm, kOp, ": unknown row layout");
  OSCAR_CHECK(rows.meta == MetaFormat::kScaleMinFp16First, kOp,
              ": vLLM rows need scale and minimum as fp16 (kScaleMinFp16First)");
  OSCAR_CHECK(rows.vllm_half_alignment == 1 || rows.vllm_half_alignment == 16, kOp,
              ": half alignment 1 or 16 expected, got ", rows.vllm_half_alignment);
  check_device_pointer(rows.slots, 4, kOp, "slots");
  const VllmSlotFormat format{p.head_dim, p.head_dim, rows.vllm_half_alignment};
  const size_t offsets[2] = {format.k_offset(), format.v_offset()};
  const int stride = static_cast<int>(format.slot_bytes());
  for (int side = 0; side < 2; ++side) {
    uint8_t* half = static_cast<uint8_t*>(rows.slots) + offsets[side];
    args.sides[side] = {half, half + VllmSlotFormat::row(p.head_dim).pair_offset(0), stride,
                        stride};
  }
  return args;
}

void check_job_tables(const RepackParams& p, cudaStream_t stream) {
  const auto jobs = read_device(p.jobs, static_cast<size_t>(p.num_jobs), kOp, stream);
  int tiles = 0;
  for (size_t j = 0; j < jobs.size(); ++j) {
    const RepackJob& job = jobs[j];
    check_job_start(job, j, tiles, kOp);
    tiles += repack_tiles(job.first_token, job.num_tokens);
    check_device_pointer(job.page_table, 4, kOp, "page table of a job");
    check_device_pointer(job.slots, 8, kOp, "slots of a job");
    const int end_page = (job.first_token + job.num_tokens - 1) / kInt2PageTokens + 1;
    const auto table = read_device(job.page_table, static_cast<size_t>(end_page), kOp, stream);
    for (int i = job.first_token / kInt2PageTokens; i < end_page; ++i)
      check_page_id(table[static_cast<size_t>(i)], p.num_pages, kOp, static_cast<int>(j), i);
    for (const int64_t slot :
         read_device(job.slots, static_cast<size_t>(job.num_tokens), kOp, stream)) {
      OSCAR_CHECK(slot >= 0 && slot < p.rows.num_slots, kOp, ": slot ", slot, " of job ", j,
                  " outside 0..", p.rows.num_slots - 1);
    }
  }
  OSCAR_CHECK(tiles == p.num_tiles, kOp, ": num_tiles ", tiles, " expected, got ", p.num_tiles);
}

}  // namespace

void repack_int2(const RepackParams& p, void* stream) {
  check_record_launch(p, kOp);
  OSCAR_CHECK(p.num_pages > 0 && p.rows.num_slots > 0, kOp,
              ": at least one page and slot expected, got ", p.num_pages, " and ",
              p.rows.num_slots);
  check_device_pointer(p.pages, 16, kOp, "pages");
  check_device_pointer(p.jobs, 8, kOp, "jobs");
  check_device_pointer(p.refused_rows, 8, kOp, "refused_rows");
  const KernelArgs args = make_args(p);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (p.check_tables) check_job_tables(p, cuda_stream);
  for_head_dim(p.head_dim, [&]<int D>() { launch_dim<D>(args, cuda_stream); });
  check_cuda(cudaGetLastError(), "repack_int2: launch");
}

}  // namespace oscar
