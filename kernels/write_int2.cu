#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/launch_check.cuh"
#include "kernels/ptx.cuh"
#include "kernels/row_select.cuh"
#include "kernels/write_int2.h"

namespace oscar {
namespace {

using namespace row_select;

constexpr int kWarps = 8;          // four a record: keys and values, tokens 0-7 and 8-15
constexpr int kHeadsPerBlock = 2;  // records of two KV heads

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
template <bool kKey>
__device__ __forceinline__ uint32_t pack_eight(const uint32_t* codes) {
  uint32_t word = 0U - pack_base(kKey);
#pragma unroll
  for (int e = 0; e < 8; ++e) word += codes[e] * (1U << pack_shift(kKey, e));
  return word;
}
__device__ __forceinline__ uint32_t pack_k(const uint32_t* codes) {
  return pack_eight<true>(codes);
}
__device__ __forceinline__ uint32_t pack_v(const uint32_t* codes) {
  return pack_eight<false>(codes);
}

// Codes [D / 4] of the quad lane t of token `token` (0-15) into a record in shared memory.
template <int D>
__device__ __forceinline__ void place_codes(uint8_t* record, bool key, int token, int t,
                                            const uint32_t (&codes)[D / 4]) {
  const int half = token / 8;
  uint8_t* area = record + (key ? 0 : record_code_bytes(D));
#pragma unroll
  for (int block = 0; block < D / 32; ++block) {  // dims 32 block + 8 t + 0..7
    constexpr int kFull = D / 64 * 2;             // blocks in full word pairs
    const int word = block / 2 * 2 + half;
    if (key) {
      const int lane = 4 * (token % 8) + t;
      if (block >= kFull) {  // single last word of D = 96: bytes 0, 2 hold tokens 0-7
        const uint32_t packed = pack_k(codes + 8 * block);
        uint8_t* at = area + 4 * record_word_index(D, lane, D / 32 - 1) + half;
        at[0] = static_cast<uint8_t>(packed);
        at[2] = static_cast<uint8_t>(packed >> 16);
      } else if (block % 2 == 1) {
        const uint32_t packed = pack_k(codes + 8 * (block - 1)) + (pack_k(codes + 8 * block) << 8);
        *reinterpret_cast<uint32_t*>(area + 4 * record_word_index(D, lane, word)) = packed;
      }
    } else {
      const uint32_t packed = pack_v(codes + 8 * block);
      if (block >= kFull) {
        for (int part = 0; part < 2; ++part) {
          const int lane = 4 * (2 * t + part) + token % 8 / 2;
          area[4 * record_word_index(D, lane, D / 32 - 1) + 2 * (token % 2) + half] =
              static_cast<uint8_t>(packed >> (8 * part));
        }
      } else {
        const int lane = 4 * (block % 2 * 4 + t) + token % 8 / 2;
        *reinterpret_cast<uint16_t*>(area + 4 * record_word_index(D, lane, word) +
                                     2 * (token % 2)) = static_cast<uint16_t>(packed);
      }
    }
  }
}

// The clipped range of a row; refused: not finite.
struct RowRange {
  float low, high;
  bool refused;
};

// This lane's part of a bf16 row, and the row's range after the clip to the rank-th largest
// magnitude (rank 0: no clip). Rows that are not `present` or refused read as zeros.
template <int D>
__device__ __forceinline__ RowRange load_bf16_row(const uint16_t* input, bool present, int rank,
                                                  float (&x)[D / 4]) {
  uint32_t pairs[D / 8];
#pragma unroll
  for (int block = 0; block < D / 32; ++block) {
    const uint4 a = present ? ptx::load_streaming(input + 32 * block) : make_uint4(0, 0, 0, 0);
    pairs[4 * block] = a.x, pairs[4 * block + 1] = a.y;
    pairs[4 * block + 2] = a.z, pairs[4 * block + 3] = a.w;
  }
  const auto pair_of = [&](int i) { return *reinterpret_cast<const __nv_bfloat162*>(&pairs[i]); };
  __nv_bfloat162 least = pair_of(0), most = pair_of(0);
#pragma unroll
  for (int i = 1; i < D / 8; ++i) {
    least = __hmin2_nan(least, pair_of(i));
    most = __hmax2_nan(most, pair_of(i));
  }
  const float2 lows = __bfloat1622float2(least), highs = __bfloat1622float2(most);
  // Differences of ends that are not finite are not finite; fmin and fmax alone would drop a NaN.
  const float ends = (lows.x - highs.x) + (lows.y - highs.y);
  RowRange row;
  row.refused = quad_sum(isfinite(ends) ? 0 : 1) != 0;
  row.low = quad_min(fminf(lows.x, lows.y));
  row.high = quad_max(fmaxf(highs.x, highs.y));
  if (row.refused) {
    row.low = row.high = 0.0F;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) pairs[i] = 0;
  }
  if (rank > 0) {
    const uint32_t top = __float_as_uint(fmaxf(-row.low, row.high)) >> 16;
    const float threshold = kth_largest_bf16(pairs, static_cast<int>(top & 0x7fffU), rank);
    row.low = fmaxf(row.low, -threshold);
    row.high = fminf(row.high, threshold);
  }
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    x[2 * i] = ptx::bf16_low(pairs[i]);
    x[2 * i + 1] = ptx::bf16_high(pairs[i]);
  }
  return row;
}

// The same for any input type, centred. mean: this lane's part, may be null.
template <int D, ElementType kType>
__device__ __forceinline__ RowRange load_row(const void* input, int64_t offset, bool present,
                                             const float* mean, int rank, float (&x)[D / 4]) {
#pragma unroll
  for (int i = 0; i < D / 4; ++i) x[i] = 0.0F;
  if (present) {
#pragma unroll
    for (int block = 0; block < D / 32; ++block)
      load_eight<kType>(input, offset + 32 * block, x + 8 * block);
    if (mean != nullptr) {
#pragma unroll
      for (int i = 0; i < D / 4; ++i) x[i] -= __ldg(mean + 32 * (i / 8) + i % 8);
    }
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

// Quantizes a row and puts codes and metadata into a record in shared memory.
template <int D>
__device__ __forceinline__ void encode_row(uint8_t* record, bool key, int record_token, int t,
                                           bool present, const RowRange& row,
                                           const float (&x)[D / 4], WriteCounters* counters) {
  bool refused = row.refused;
  const float range = row.high - row.low;
  const float scale = __fdiv_rn(fmaxf(range, 1e-8F), 3.0F);
  __half stored_scale = __float2half_rn(scale), stored_min = __float2half_rn(row.low);
  if (__hisinf(stored_scale) != 0 || __hisinf(stored_min) != 0) {
    refused = true;
    stored_scale = __float2half_rn(1.0F);
    stored_min = __float2half_rn(0.0F);
  }
  const bool constant = range == 0.0F || __heq(stored_scale, __float2half_rn(0.0F));
  if (constant) stored_scale = __float2half_rn(1.0F);
  // Quarter units: the saturation to [0, 1] clamps below, the clamp of x above. All operations but
  // the last round to nearest, the last one rounds down onto integers.
  const float quarter = constant || refused ? 0.0F : 0.25F * __fdiv_rn(1.0F, scale);
  uint32_t codes[D / 4];
#pragma unroll
  for (int i = 0; i < D / 4; ++i) {
    const float level = __saturatef(fmaf(fminf(x[i], row.high) - row.low, quarter, 0.125F));
    codes[i] = __float_as_uint(__fmaf_rd(level, 4.0F, 8388608.0F));
  }
  if (!present) return;
  place_codes<D>(record, key, record_token, t, codes);
  if (t != 0) return;
  const __half2 pair = __halves2half2(stored_scale, stored_min);
  const KvSide side = key ? KvSide::kKey : KvSide::kValue;
  *reinterpret_cast<__half2*>(record + record_meta_offset(D, side, record_token)) = pair;
  if (refused) {
    atomicAdd(&counters->refused_rows, 1ULL);
  } else if (constant) {
    atomicAdd(&counters->constant_rows, 1ULL);
  }
}

// Last job with first_tile <= tile: the warp narrows the range 32-fold a step.
__device__ __forceinline__ int find_job(const WriteParams& p, int tile) {
  const int lane = threadIdx.x % 32;
  int begin = 0, count = p.num_jobs;
  while (count > 1) {
    const int step = (count + 31) / 32, at = begin + lane * step;
    const bool before = lane * step < count && p.jobs[at].first_tile <= tile;
    const int last = 31 - __clz(__ballot_sync(~0U, before));
    const int end = begin + count;
    begin += last * step;
    count = min(step, end - begin);
  }
  return begin;
}

template <int D, ElementType kType>
__global__ void __launch_bounds__(32 * kWarps, D <= 128 ? 4 : 1)
    write_rtn_kernel(const WriteParams p) {
  __shared__ __align__(16) uint8_t records[kHeadsPerBlock][record_bytes(D)];
  const WriteJob job = p.jobs[find_job(p, static_cast<int>(blockIdx.x))];
  const int tile = static_cast<int>(blockIdx.x) - job.first_tile + job.first_token / kRecordTokens;
  const int tile_token = tile * kRecordTokens;
  const int job_end = job.first_token + job.num_tokens;
  const bool whole = tile_token >= job.first_token && tile_token + kRecordTokens <= job_end;
  const int64_t page = job.page_table[tile_token / kInt2PageTokens];
  const auto record_at = [&](int head) {
    return static_cast<uint8_t*>(job.pages) +
           (page * p.num_kv_heads + head) * record_page_bytes(D) +
           tile % kPageRecords * record_bytes(D);
  };
  const int first_head = blockIdx.y * kHeadsPerBlock;
  constexpr int kQuads = record_bytes(D) / 16;
  if (!whole) {  // the tokens that stay
    for (int i = threadIdx.x; i < kHeadsPerBlock * kQuads; i += 32 * kWarps) {
      if (first_head + i / kQuads < p.num_kv_heads) {
        reinterpret_cast<uint4*>(records[i / kQuads])[i % kQuads] =
            reinterpret_cast<const uint4*>(record_at(first_head + i / kQuads))[i % kQuads];
      }
    }
    __syncthreads();
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = first_head + warp / 4;
  const bool key = warp % 4 < 2;
  const int record_token = warp % 2 * 8 + g;
  const int token = tile_token + record_token;
  const bool mine = head < p.num_kv_heads && token >= job.first_token && token < job_end;
  const WriteSide side = p.sides[2 * job.side_pair + (key ? 0 : 1)];
  if (__any_sync(~0U, mine)) {
    const int64_t offset =
        (token - job.first_token) * p.token_stride + head * p.head_stride + 8 * t;
    const float* mean = side.mean != nullptr ? side.mean + head * D + 8 * t : nullptr;
    const void* input = key ? job.k : job.v;
    const int rank = side.clip_index >= 0 ? D - side.clip_index : 0;
    float x[D / 4];
    const RowRange row =
        kType == ElementType::kBf16 && mean == nullptr
            ? load_bf16_row<D>(static_cast<const uint16_t*>(input) + offset, mine, rank, x)
            : load_row<D, kType>(input, offset, mine, mean, rank, x);
    encode_row<D>(records[warp / 4], key, record_token, t, mine, row, x, p.counters);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kHeadsPerBlock * kQuads; i += 32 * kWarps) {
    if (first_head + i / kQuads < p.num_kv_heads) {
      reinterpret_cast<uint4*>(record_at(first_head + i / kQuads))[i % kQuads] =
          reinterpret_cast<const uint4*>(records[i / kQuads])[i % kQuads];
    }
  }
}

template <int D>
void launch_dim(const WriteParams& p, cudaStream_t stream) {
  const dim3 grid(p.num_tiles, (p.num_kv_heads + kHeadsPerBlock - 1) / kHeadsPerBlock);
  switch (p.input_type) {
    case ElementType::kBf16:
      write_rtn_kernel<D, ElementType::kBf16><<<grid, 32 * kWarps, 0, stream>>>(p);
      break;
    case ElementType::kFp16:
      write_rtn_kernel<D, ElementType::kFp16><<<grid, 32 * kWarps, 0, stream>>>(p);
      break;
    case ElementType::kFp32:
      write_rtn_kernel<D, ElementType::kFp32><<<grid, 32 * kWarps, 0, stream>>>(p);
      break;
  }
}

}  // namespace

void write_int2_rtn(const WriteParams& p, void* stream) {
  const char* op = "write_int2_rtn";
  OSCAR_CHECK(record_supports(p.head_dim), op, ": head_dim 64, 96, 128, 192 or 256 expected, got ",
              p.head_dim);
  OSCAR_CHECK(p.num_kv_heads > 0 && p.num_kv_heads <= 2 * 65535, op,
              ": at least one KV head expected, got ", p.num_kv_heads);
  OSCAR_CHECK(p.num_jobs > 0 && p.num_tiles > 0, op, ": at least one job and tile expected, got ",
              p.num_jobs, " and ", p.num_tiles);
  OSCAR_CHECK(p.token_stride > 0 && p.token_stride % 8 == 0 && p.head_stride >= p.head_dim &&
                  p.head_stride % 8 == 0,
              op, ": positive strides in multiples of 8 elements expected, got ", p.token_stride,
              " and ", p.head_stride);
  OSCAR_CHECK(p.input_type == ElementType::kBf16 || p.input_type == ElementType::kFp16 ||
                  p.input_type == ElementType::kFp32,
              op, ": input must be bf16, fp16 or fp32");
  check_device_pointer(p.jobs, 8, op, "jobs");
  check_device_pointer(p.sides, 8, op, "sides");
  check_device_pointer(p.counters, 8, op, "counters");
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (p.head_dim) {
    case 64:
      launch_dim<64>(p, cuda_stream);
      break;
    case 96:
      launch_dim<96>(p, cuda_stream);
      break;
    case 128:
      launch_dim<128>(p, cuda_stream);
      break;
    case 192:
      launch_dim<192>(p, cuda_stream);
      break;
    default:
      launch_dim<256>(p, cuda_stream);
  }
  check_cuda(cudaGetLastError(), "write_int2_rtn: launch");
}

}  // namespace oscar
