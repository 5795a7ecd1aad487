#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/launch_check.cuh"
#include "kernels/ptx.cuh"
#include "kernels/write_int2.h"

namespace oscar {
namespace {

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

// A row is spread over four lanes (a quad); these combine over it.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 2));
}
__device__ __forceinline__ float quad_min(float x) { return -quad_max(-x); }
__device__ __forceinline__ int quad_sum(int x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}

// The rank-th largest |x| of the quad's row, exactly, without a sort. The upper 16 bits of |x| are
// bf16 keys in the same order: two keys a register, compared and counted two at a time. A bisection
// over keys stops when exactly `rank` elements are at or above the bound (their minimum is the
// answer) or the bound's key is settled (then the key's few elements are gone through).
template <int N>
__device__ __forceinline__ float kth_largest(const float (&x)[N], int rank) {
  __nv_bfloat162 keys[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const uint32_t packed =
        __byte_perm(__float_as_uint(x[2 * i]), __float_as_uint(x[2 * i + 1]), 0x7632) & 0x7fff7fffU;
    keys[i] = *reinterpret_cast<const __nv_bfloat162*>(&packed);
  }
  const auto count_from = [&](int bound) {
    const uint32_t both = static_cast<uint32_t>(bound) * 0x00010001U;
    const __nv_bfloat162 threshold = *reinterpret_cast<const __nv_bfloat162*>(&both);
    __nv_bfloat162 sum = __float2bfloat162_rn(0.0F);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum = __hadd2(sum, __hge2(keys[i], threshold));
    return quad_sum(static_cast<int>(__low2float(sum) + __high2float(sum)));
  };
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(x[i]));
  largest = quad_max(largest);
  int high = static_cast<int>(__float_as_uint(largest) >> 16) + 1;  // nothing is at or above it
  int low = 0;                                                      // everything is
  int below_high = 0;                                               // elements at or above `high`
  int at_low = 4 * N;
  int probe = max(high - 128, 1);  // an octave below the largest: where clip thresholds are
  while (true) {
    const bool open = high - low > 1 && at_low != rank;
    if (!__any_sync(~0U, open)) break;
    const int count = count_from(probe);
    if (open) {
      if (count >= rank) {
        low = probe;
        at_low = count;
      } else {
        high = probe;
        below_high = count;
      }
    }
    probe = (low + high) / 2;
  }
  // Elements with key in [low, high): the answer is the (rank - below_high)-th largest of them.
  const float floor_value = __uint_as_float(static_cast<uint32_t>(low) << 16);
  if (__all_sync(~0U, at_low == rank)) {
    float least = INFINITY;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float a = fabsf(x[i]);
      least = a >= floor_value ? fminf(least, a) : least;
    }
    return quad_min(least);
  }
  int left = rank - below_high;
  float previous = __uint_as_float(static_cast<uint32_t>(high) << 16);
  float answer = 0.0F;
  bool found = false;
  while (__any_sync(~0U, !found)) {
    float next = -1.0F;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float a = fabsf(x[i]);
      next = a < previous ? fmaxf(next, a) : next;
    }
    next = quad_max(next);
    int equal = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) equal += fabsf(x[i]) == next ? 1 : 0;
    equal = quad_sum(equal);
    if (!found) {
      left -= equal;
      previous = next;
      if (left <= 0) {
        found = true;
        answer = next;
      }
    }
  }
  return answer;
}

// Two bits a dim of eight consecutive dims, `step` bits apart pairwise: K packs even and odd dims
// into the halves of a word, V packs a run into 16 bits.
__device__ __forceinline__ uint32_t pack_k(const uint32_t* codes) {
  uint32_t word = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) word += codes[e] << (16 * (e % 2) + 2 * (e / 2));
  return word;
}
__device__ __forceinline__ uint32_t pack_v(const uint32_t* codes) {
  uint32_t word = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) word += codes[e] << (2 * e);
  return word;
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

template <int D, ElementType kType>
__global__ void __launch_bounds__(32 * kWarps) write_rtn_kernel(const WriteParams p) {
  __shared__ __align__(16) uint8_t records[kHeadsPerBlock][record_bytes(D)];
  __shared__ int job_index;
  if (threadIdx.x == 0) {  // last job with first_tile <= tile
    int low = 0, high = p.num_jobs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (p.jobs[middle].first_tile <= static_cast<int>(blockIdx.x) ? low : high) = middle;
    }
    job_index = low;
  }
  __syncthreads();
  const WriteJob job = p.jobs[job_index];
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
  float x[D / 4];
#pragma unroll
  for (int i = 0; i < D / 4; ++i) x[i] = 0.0F;
  if (mine) {
    const int64_t offset =
        (token - job.first_token) * p.token_stride + head * p.head_stride + 8 * t;
#pragma unroll
    for (int block = 0; block < D / 32; ++block)
      load_eight<kType>(key ? job.k : job.v, offset + 32 * block, x + 8 * block);
    if (side.mean != nullptr) {
#pragma unroll
      for (int i = 0; i < D / 4; ++i)
        x[i] -= __ldg(side.mean + head * D + 32 * (i / 8) + 8 * t + i % 8);
    }
  }
  float low = x[0], high = x[0], finite = 0.0F;
#pragma unroll
  for (int i = 0; i < D / 4; ++i) {
    low = fminf(low, x[i]);
    high = fmaxf(high, x[i]);
    finite = fmaf(x[i], 0.0F, finite);  // NaN as soon as one element is not finite
  }
  low = quad_min(low);
  high = quad_max(high);
  bool refused = __shfl_xor_sync(~0U, finite, 1) != 0.0F || finite != 0.0F;
  refused = __shfl_xor_sync(~0U, static_cast<int>(refused), 2) != 0 || refused;
  if (refused) {
    low = high = 0.0F;
#pragma unroll
    for (int i = 0; i < D / 4; ++i) x[i] = 0.0F;
  }
  if (side.clip_index >= 0) {
    const float threshold = kth_largest(x, D - side.clip_index);
    low = fmaxf(low, -threshold);
    high = fminf(high, threshold);
  }
  // Clamping the row is not needed: what lies beyond [low, high] gets the end codes.
  const float range = high - low;
  const float scale = __fdiv_rn(fmaxf(range, 1e-8F), 3.0F);
  __half stored_scale = __float2half_rn(scale), stored_min = __float2half_rn(low);
  if (__hisinf(stored_scale) != 0 || __hisinf(stored_min) != 0) {
    refused = true;
    stored_scale = __float2half_rn(1.0F);
    stored_min = __float2half_rn(0.0F);
  }
  const bool constant = range == 0.0F || __heq(stored_scale, __float2half_rn(0.0F));
  if (constant) stored_scale = __float2half_rn(1.0F);
  const float inverse = constant || refused ? 0.0F : __fdiv_rn(1.0F, scale);
  uint32_t codes[D / 4];
#pragma unroll
  for (int i = 0; i < D / 4; ++i) {
    const float level = fminf(fmaxf(fmaf(x[i] - low, inverse, 0.5F), 0.0F), 3.5F);
    codes[i] = __float_as_uint(__fadd_rd(level, 8388608.0F)) & 3U;  // floor
  }
  if (mine) {
    uint8_t* record = records[warp / 4];
    place_codes<D>(record, key, record_token, t, codes);
    if (t == 0) {
      const __half2 pair = __halves2half2(stored_scale, stored_min);
      const KvSide kv_side = key ? KvSide::kKey : KvSide::kValue;
      *reinterpret_cast<__half2*>(record + record_meta_offset(D, kv_side, record_token)) = pair;
      if (refused) {
        atomicAdd(&p.counters->refused_rows, 1ULL);
      } else if (constant) {
        atomicAdd(&p.counters->constant_rows, 1ULL);
      }
    }
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
