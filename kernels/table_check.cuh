// Checks that launches over records share: their shape and, behind `check_tables`, device tables
// read back, jobs in order, page ids in range.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "kernels/launch_check.cuh"
#include "quant/int2_record.h"

namespace oscar {

// Host copy of a device array; synchronises the stream.
template <class T>
std::vector<T> read_device(const T* device, size_t count, const char* op, cudaStream_t stream) {
  std::vector<T> host(count);
  if (count == 0) return host;
  check_cuda(
      cudaMemcpyAsync(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost, stream), op);
  check_cuda(cudaStreamSynchronize(stream), op);
  return host;
}

inline void check_page_id(int64_t page, int64_t num_pages, const char* op, int row, int entry) {
  OSCAR_CHECK(page >= 0 && page < num_pages, op, ": page id ", page, " of row ", row,
              " (table entry ", entry, ") outside 0..", num_pages - 1);
}

// Shape of a launch whose tiles are records of 16 tokens.
template <class Params>
void check_record_launch(const Params& p, const char* op) {
  OSCAR_CHECK(record_supports(p.head_dim), op, ": head_dim 64, 96, 128, 192 or 256 expected, got ",
              p.head_dim);
  OSCAR_CHECK(p.num_kv_heads > 0, op, ": at least one KV head expected, got ", p.num_kv_heads);
  OSCAR_CHECK(p.num_jobs > 0 && p.num_tiles > 0, op, ": at least one job and tile expected, got ",
              p.num_jobs, " and ", p.num_tiles);
  OSCAR_CHECK(static_cast<int64_t>(p.num_tiles) * p.num_kv_heads <= (int64_t{1} << 33), op,
              ": at most 2^33 records a launch, got ", p.num_tiles, " x ", p.num_kv_heads);
}

// A job of such a launch: tokens, and its first tile right after the tiles of the jobs before it.
template <class Job>
void check_job_start(const Job& job, size_t j, int tiles, const char* op) {
  OSCAR_CHECK(job.num_tokens > 0 && job.first_token >= 0, op, ": job ", j,
              ": at least one token expected, got ", job.num_tokens, " from ", job.first_token);
  OSCAR_CHECK(job.first_tile == tiles, op, ": job ", j, ": first_tile ", tiles, " expected, got ",
              job.first_tile);
}

}  // namespace oscar
