// Checks of device tables behind `check_tables`: arrays read back, page ids in range.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "kernels/launch_check.cuh"

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

}  // namespace oscar
