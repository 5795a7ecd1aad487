// Host side of one decode attention shape: warps and ring depth by the device's shared memory,
// attributes, launch.
#pragma once

#include "kernels/decode_kernel.cuh"
#include "kernels/decode_launch.h"
#include "kernels/launch_check.cuh"

namespace oscar::decode {

// kDevice: 0 = sm_90, sm_100 (227 KB of shared memory a block), 1 = sm_80 (163 KB), 2 = sm_89,
// sm_120 (99 KB, fewer warps). Device code is compiled only where it runs.
template <int D, int C, int W, int kEntries, int kDevice>
__global__ void __launch_bounds__(Config<D, C, W>::kThreads, 1)
    attend_decode_entry(const __grid_constant__ AttendDecodeParams params) {
#ifdef __CUDA_ARCH__
  constexpr int here = __CUDA_ARCH__ == 900 || __CUDA_ARCH__ / 100 == 10 ? 0
                       : __CUDA_ARCH__ == 800                            ? 1
                                                                         : 2;
  if constexpr (here == kDevice) {
    attend_decode<D, C, W, kEntries>(params);
  } else {
    __trap();
  }
#endif
}

template <int D, int C, int W, int kSharedBytes, int kDevice>
void launch_entries(const AttendDecodeParams& params, const Launch& launch) {
  using Conf = Config<D, C, W>;
  constexpr int kEntries = ring_entries<Conf>(kSharedBytes);
  static_assert(kEntries >= W);
  const int shared = kEntries * Conf::kEntryBytes + Conf::kFixedBytes;
  const auto kernel = attend_decode_entry<D, C, W, kEntries, kDevice>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
             "attend_decode_int2: shared memory");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.num_ctas));
  config.blockDim = dim3(Conf::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = launch.stream;
  // The kernel waits for its predecessors by itself, before it reads anything.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = launch.programmatic ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), "attend_decode_int2: launch");
}

template <int D, int C>
void launch_shape(const AttendDecodeParams& params, const Launch& launch) {
  // Warps: as many as the registers allow; the arithmetic of a page is a chain of latencies that
  // only other warps can fill.
  constexpr int kWork = D * (C == 4 ? 2 : 1);
  constexpr int kWarps = kWork <= 128 || (D == 192 && C == 1) ? 15 : (kWork <= 256 ? 11 : 7);
  if (launch.shared_bytes >= 227 * 1024) {
    launch_entries<D, C, kWarps, 227 * 1024, 0>(params, launch);
  } else if (launch.shared_bytes >= 163 * 1024) {
    launch_entries<D, C, kWarps, 163 * 1024, 1>(params, launch);
  } else {
    OSCAR_CHECK(launch.shared_bytes >= 99 * 1024,
                "attend_decode_int2: 99 KB of shared memory for a thread block expected, got ",
                launch.shared_bytes, " bytes");
    launch_entries<D, C, 3, 99 * 1024, 2>(params, launch);
  }
}

}  // namespace oscar::decode
