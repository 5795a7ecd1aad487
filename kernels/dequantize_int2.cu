#include <cuda_runtime.h>

#include <vector>

#include "kernels/dequantize_int2.h"
#include "kernels/job_search.cuh"
#include "kernels/launch_check.cuh"
#include "kernels/record_unpack.cuh"
#include "kernels/table_check.cuh"

namespace oscar {
namespace {

constexpr int kWarps = 8;

// Stores that leave the cache first: the output is larger than the cache, and written lines that
// stay make room for each other one by one.
template <ElementType kType>
__device__ __forceinline__ void store_run(void* rows, int64_t element,
                                          const unpack::Run<kType>& run) {
  if constexpr (kType == ElementType::kFp32) {
    auto* out = reinterpret_cast<float4*>(static_cast<float*>(rows) + element);
    __stcs(out, run.low);
    __stcs(out + 1, run.high);
  } else {
    __stcs(reinterpret_cast<uint4*>(static_cast<uint16_t*>(rows) + element), run.packed);
  }
}
// Four values: the first or the last half of the run.
template <ElementType kType>
__device__ __forceinline__ void store_half_run(void* rows, int64_t element,
                                               const unpack::Run<kType>& run, int half) {
  if constexpr (kType == ElementType::kFp32) {
    __stcs(reinterpret_cast<float4*>(static_cast<float*>(rows) + element),
           half ? run.high : run.low);
  } else {
    __stcs(reinterpret_cast<uint2*>(static_cast<uint16_t*>(rows) + element),
           half ? make_uint2(run.packed.z, run.packed.w) : make_uint2(run.packed.x, run.packed.y));
  }
}

// first: row of the record's token 0; kWhole: all of its tokens belong to the job.
template <int D, ElementType kType, bool kWhole>
__device__ __forceinline__ void write_record(const DequantizeParams& p, const DequantizeJob& job,
                                             const uint8_t* record, int first, int head, int lane) {
  unpack::LaneWords<D> k_words, v_words;
  k_words.load(record, lane);
  v_words.load(record + record_code_bytes(D), lane);
  const unpack::Levels<kType> levels(unpack::load_meta(record, D, lane));
  const int64_t offset = first * p.token_stride + head * p.head_stride;
  const auto present = [&](int token) {
    return kWhole || (first + token >= 0 && first + token < job.num_tokens);
  };
  if (job.k != nullptr) {
    unpack::unpack_keys<D, kType, false>(
        k_words, levels, lane, [&](int token, int dim, const unpack::Run<kType>& run) {
          if (present(token)) store_run<kType>(job.k, offset + token * p.token_stride + dim, run);
        });
  }
  if (job.v != nullptr) {
    unpack::unpack_values<D, kType>(
        v_words, levels, lane,
        [&](int token, int dim, const unpack::Run<kType>& run) {
          if (present(token)) store_run<kType>(job.v, offset + token * p.token_stride + dim, run);
        },
        [&](int token, int dim, const unpack::Run<kType>& run, int half) {
          if (present(token))
            store_half_run<kType>(job.v, offset + token * p.token_stride + dim, run, half);
        });
  }
}

// A warp = one record (16 tokens of one KV head); heads of a tile lie side by side in the output.
template <int D, ElementType kType>
__global__ void __launch_bounds__(32 * kWarps) dequantize_kernel(const DequantizeParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= static_cast<int64_t>(p.num_tiles) * p.num_kv_heads) return;
  const int head = static_cast<int>(item % p.num_kv_heads);
  const int job_tile = static_cast<int>(item / p.num_kv_heads);
  const DequantizeJob job = p.jobs[find_tile_job(p.jobs, p.num_jobs, job_tile)];
  const int tile = job_tile - job.first_tile + job.first_token / kRecordTokens;
  const int64_t page = job.page_table[tile / kPageRecords];
  const uint8_t* record = static_cast<const uint8_t*>(job.pages) +
                          (page * p.num_kv_heads + head) * record_page_bytes(D) +
                          tile % kPageRecords * record_bytes(D);
  const int first = tile * kRecordTokens - job.first_token;
  if (first >= 0 && first + kRecordTokens <= job.num_tokens) {
    write_record<D, kType, true>(p, job, record, first, head, lane);
  } else {
    write_record<D, kType, false>(p, job, record, first, head, lane);
  }
}

template <int D>
void launch_dim(const DequantizeParams& p, cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(p.num_tiles) * p.num_kv_heads;
  const auto blocks = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  switch (p.output_type) {
    case ElementType::kBf16:
      dequantize_kernel<D, ElementType::kBf16><<<blocks, 32 * kWarps, 0, stream>>>(p);
      break;
    case ElementType::kFp16:
      dequantize_kernel<D, ElementType::kFp16><<<blocks, 32 * kWarps, 0, stream>>>(p);
      break;
    case ElementType::kFp32:
      dequantize_kernel<D, ElementType::kFp32><<<blocks, 32 * kWarps, 0, stream>>>(p);
      break;
  }
}

constexpr const char* kOp = "dequantize_int2";

void check_job_tables(const DequantizeParams& p, cudaStream_t stream) {
  const auto jobs = read_device(p.jobs, static_cast<size_t>(p.num_jobs), kOp, stream);
  int tiles = 0;
  for (size_t j = 0; j < jobs.size(); ++j) {
    const DequantizeJob& job = jobs[j];
    check_job_start(job, j, tiles, kOp);
    tiles += dequantize_tiles(job.first_token, job.num_tokens);
    check_device_pointer(job.pages, 16, kOp, "pages of a job");
    check_device_pointer(job.page_table, 4, kOp, "page table of a job");
    OSCAR_CHECK(job.k != nullptr || job.v != nullptr, kOp, ": job ", j, " writes nothing");
    if (job.k != nullptr) check_device_pointer(job.k, 16, kOp, "k of a job");
    if (job.v != nullptr) check_device_pointer(job.v, 16, kOp, "v of a job");
    const int first_page = job.first_token / kInt2PageTokens;
    const int end_page = (job.first_token + job.num_tokens - 1) / kInt2PageTokens + 1;
    const auto table = read_device(job.page_table, static_cast<size_t>(end_page), kOp, stream);
    for (int i = first_page; i < end_page; ++i)
      check_page_id(table[static_cast<size_t>(i)], job.num_pages, kOp, static_cast<int>(j), i);
  }
  OSCAR_CHECK(tiles == p.num_tiles, kOp, ": num_tiles ", tiles, " expected, got ", p.num_tiles);
}

}  // namespace

void dequantize_int2(const DequantizeParams& p, void* stream) {
  check_record_launch(p, kOp);
  OSCAR_CHECK(p.token_stride > 0 && p.token_stride % 8 == 0 && p.head_stride >= p.head_dim &&
                  p.head_stride % 8 == 0,
              kOp, ": positive strides in multiples of 8 elements expected, got ", p.token_stride,
              " and ", p.head_stride);
  OSCAR_CHECK(p.output_type == ElementType::kBf16 || p.output_type == ElementType::kFp16 ||
                  p.output_type == ElementType::kFp32,
              kOp, ": output must be bf16, fp16 or fp32");
  check_device_pointer(p.jobs, 8, kOp, "jobs");
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (p.check_tables) check_job_tables(p, cuda_stream);
  for_head_dim(p.head_dim, [&]<int D>() { launch_dim<D>(p, cuda_stream); });
  check_cuda(cudaGetLastError(), "dequantize_int2: launch");
}

}  // namespace oscar
