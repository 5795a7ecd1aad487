#include "quant/lane_kernels.h"

#include <string_view>

#include "base/cpu.h"

namespace oscar {

const LaneKernels* lane_kernels(const char* name) {
  const std::string_view wanted = name;
  if (wanted == "avx512") return cpu_features().avx512 ? avx512_lane_kernels() : nullptr;
  if (wanted == "avx2") return cpu_features().avx2 ? avx2_lane_kernels() : nullptr;
  return wanted == "scalar" ? scalar_lane_kernels() : nullptr;
}

const LaneKernels& lane_kernels() {
  for (const char* name : {"avx512", "avx2"})
    if (const LaneKernels* kernels = lane_kernels(name)) return *kernels;
  return *scalar_lane_kernels();
}

}  // namespace oscar
