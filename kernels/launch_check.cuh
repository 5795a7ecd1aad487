// What every launcher checks: CUDA errors, device pointers, properties of the current device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/error.h"

namespace oscar {

// Throws Error with CUDA's message; `what` names the operation.
void check_cuda(cudaError_t status, const char* what);
// The pointer must be non-null, aligned to `alignment` bytes and belong to the current device.
void check_device_pointer(const void* pointer, size_t alignment, const char* op, const char* name);
int device_compute_capability();  // 10 major + minor
int device_multiprocessors();
int device_shared_bytes();  // largest dynamic shared memory of a thread block

// Calls launch.operator()<D>() for head_dim 64, 96, 128, 192 or 256 (anything else, which a
// launcher refuses before, counts as 256).
template <class Launch>
void for_head_dim(int head_dim, Launch&& launch) {
  switch (head_dim) {
    case 64:
      return launch.template operator()<64>();
    case 96:
      return launch.template operator()<96>();
    case 128:
      return launch.template operator()<128>();
    case 192:
      return launch.template operator()<192>();
    default:
      return launch.template operator()<256>();
  }
}

}  // namespace oscar
