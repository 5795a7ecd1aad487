#include <cuda_runtime.h>

#include <algorithm>
#include <set>

#include "kernels/launch_check.cuh"
#include "kernels/ptx.cuh"
#include "kernels/repack_int2.h"
#include "kernels/table_check.cuh"

namespace oscar {
namespace {

constexpr const char* kOp = "copy_pages";
constexpr int kThreads = 256;

// blockIdx.y = copy; the blocks of a copy share its page.
__global__ void __launch_bounds__(kThreads) copy_pages_kernel(const CopyPagesParams p) {
  const PageCopy copy = p.copies[blockIdx.y];
  const int64_t count = p.page_bytes / 16;
  const auto* source = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.source_pool) +
                                                      copy.source * p.page_bytes);
  auto* destination = reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.destination_pool) +
                                               copy.destination * p.page_bytes);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = source[i + j * stride];
#pragma unroll
    for (int j = 0; j < 4; ++j) destination[i + j * stride] = x[j];
  }
  for (; i < count; i += stride) destination[i] = source[i];
}

void check_copies(const CopyPagesParams& p, cudaStream_t stream) {
  const auto copies = read_device(p.copies, static_cast<size_t>(p.num_copies), kOp, stream);
  std::set<int32_t> sources, destinations;
  const bool one_pool = p.source_pool == p.destination_pool;
  for (size_t i = 0; i < copies.size(); ++i) {
    check_page_id(copies[i].source, p.num_source_pages, kOp, static_cast<int>(i), 0);
    check_page_id(copies[i].destination, p.num_destination_pages, kOp, static_cast<int>(i), 1);
    sources.insert(copies[i].source);
    OSCAR_CHECK(destinations.insert(copies[i].destination).second, kOp, ": page ",
                copies[i].destination, " is the destination of two copies");
  }
  for (const int32_t page : destinations) {
    OSCAR_CHECK(!one_pool || sources.count(page) == 0, kOp, ": page ", page,
                " is both source and destination");
  }
}

}  // namespace

void copy_pages(const CopyPagesParams& p, void* stream) {
  OSCAR_CHECK(p.num_copies > 0 && p.num_copies <= 65535, kOp, ": 1..65535 copies expected, got ",
              p.num_copies);
  OSCAR_CHECK(p.page_bytes > 0 && p.page_bytes % 16 == 0, kOp,
              ": page_bytes a positive multiple of 16 expected, got ", p.page_bytes);
  OSCAR_CHECK(p.num_source_pages > 0 && p.num_destination_pages > 0, kOp,
              ": at least one page in each pool expected, got ", p.num_source_pages, " and ",
              p.num_destination_pages);
  check_device_pointer(p.source_pool, 16, kOp, "source_pool");
  check_device_pointer(p.destination_pool, 16, kOp, "destination_pool");
  check_device_pointer(p.copies, 8, kOp, "copies");
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (p.check_tables) check_copies(p, cuda_stream);
  // About four rounds of 16 bytes a thread, so that one page alone still fills the memory system.
  const int64_t blocks = (p.page_bytes / 16 + 4 * kThreads - 1) / (4 * kThreads);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(blocks, 1024)),
                  static_cast<unsigned>(p.num_copies));
  copy_pages_kernel<<<grid, kThreads, 0, cuda_stream>>>(p);
  check_cuda(cudaGetLastError(), "copy_pages: launch");
}

}  // namespace oscar
