// Host side of one decode attention shape: ring depth by the device's shared memory, attributes,
// launch.
#pragma once

#include "kernels/decode_kernel.cuh"
#include "kernels/decode_launch.h"
#include "kernels/launch_check.cuh"

namespace oscar::decode {

// kDevice: 0 = sm_90, sm_100 (227 KB of shared memory a block), 1 = sm_80 (163 KB), 2 = sm_89,
// sm_120 (99 KB, fewer warps). Device code is compiled only where it runs.
template <int D, int NT, int W, int kEntries, int kDevice>
__global__ void __launch_bounds__(Config<D, NT, W>::kThreads, 1)
    attend_decode_entry(const __grid_constant__ AttendDecodeParams params) {
#ifdef __CUDA_ARCH__
  constexpr int here = __CUDA_ARCH__ == 900 || __CUDA_ARCH__ / 100 == 10 ? 0
                       : __CUDA_ARCH__ == 800                            ? 1
                                                                         : 2;
  if constexpr (here == kDevice) {
    attend_decode<D, NT, W, kEntries>(params);
  } else {
    __trap();
  }
#endif
}

template <int D, int NT, int W, int kEntries, int kDevice>
void launch_entries(const AttendDecodeParams& params, const Launch& launch) {
  using C = Config<D, NT, W>;
  static_assert(kEntries >= 3, "a chunk needs two entries, and one more to overlap");
  const int shared = kEntries * C::kEntryBytes + C::kFixedBytes;
  const auto kernel = attend_decode_entry<D, NT, W, kEntries, kDevice>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
             "attend_decode_int2: shared memory");
  kernel<<<params.num_ctas, C::kThreads, shared, launch.stream>>>(params);
}

template <int D, int NT>
void launch_shape(const AttendDecodeParams& params, const Launch& launch) {
  // Warps: as many as the registers allow; the arithmetic of a page is a chain of latencies that
  // only other warps can fill.
  constexpr int kWarps = D * NT <= 128 ? 15 : (D * NT <= 256 ? 11 : 7);
  if (launch.shared_bytes >= 227 * 1024) {
    launch_entries<D, NT, kWarps, ring_entries<D, NT, kWarps>(227 * 1024), 0>(params, launch);
  } else if (launch.shared_bytes >= 163 * 1024) {
    launch_entries<D, NT, kWarps, ring_entries<D, NT, kWarps>(163 * 1024), 1>(params, launch);
  } else {
    OSCAR_CHECK(launch.shared_bytes >= 99 * 1024,
                "attend_decode_int2: 99 KB of shared memory for a thread block expected, got ",
                launch.shared_bytes, " bytes");
    launch_entries<D, NT, 3, ring_entries<D, NT, 3>(99 * 1024), 2>(params, launch);
  }
}

}  // namespace oscar::decode
