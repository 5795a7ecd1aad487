// Host side of one prefill attention shape.
#pragma once

#include "kernels/launch_check.cuh"
#include "kernels/prefill_hopper.cuh"
#include "kernels/prefill_launch.h"

namespace oscar::prefill {

static_assert(Portable<128>::kRows == kPortableRows && Hopper<128>::kRows == kHopperRows);

template <int D>
void launch(const AttendPrefillParams& params, bool hopper, void* stream) {
  const auto kernel = hopper ? attend_hopper_kernel<D> : attend_portable_kernel<D>;
  const int shared = hopper ? Hopper<D>::kShared : Portable<D>::kShared;
  const int threads = hopper ? Hopper<D>::kThreads : 32 * Portable<D>::kWarps;
  OSCAR_CHECK(shared <= device_shared_bytes(), "attend_prefill: ", shared,
              " bytes of shared memory for a thread block expected, the device has ",
              device_shared_bytes());
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
             "attend_prefill: shared memory");
  kernel<<<static_cast<unsigned>(params.num_work), threads, shared,
           static_cast<cudaStream_t>(stream)>>>(params);
}

}  // namespace oscar::prefill
