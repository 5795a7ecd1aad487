#include "base/cpu.h"

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace oscar {
namespace {

// Linux saves the tile registers only of processes that asked for them; without that their use is
// fatal.
bool request_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

CpuFeatures detect() {
  CpuFeatures features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  features.avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  features.avx512 = features.avx2 && __builtin_cpu_supports("avx512f") != 0 &&
                    __builtin_cpu_supports("avx512bw") != 0 &&
                    __builtin_cpu_supports("avx512vl") != 0 &&
                    __builtin_cpu_supports("avx512dq") != 0;
  features.avx512_bf16 = features.avx512 && __builtin_cpu_supports("avx512bf16") != 0;
  features.amx_bf16 = features.avx512_bf16 && __builtin_cpu_supports("amx-tile") != 0 &&
                      __builtin_cpu_supports("amx-bf16") != 0 && request_tiles();
#endif
  const char* limit = std::getenv("OSCAR_SIMD");
  const std::string_view level = limit == nullptr ? "" : limit;
  if (level == "scalar") features = {};
  if (level == "avx2") features.avx512 = features.avx512_bf16 = features.amx_bf16 = false;
  if (level == "avx512") features.avx512_bf16 = features.amx_bf16 = false;
  if (level == "avx512_bf16") features.amx_bf16 = false;
  return features;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

const char* simd_name() {
  const CpuFeatures& f = cpu_features();
  if (f.amx_bf16) return "amx_bf16";
  if (f.avx512_bf16) return "avx512_bf16";
  if (f.avx512) return "avx512";
  return f.avx2 ? "avx2" : "scalar";
}

}  // namespace oscar
