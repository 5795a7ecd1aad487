// Run-time CPU features. Code compiled for an instruction set lives in files named *_avx2.cpp,
// *_avx512.cpp, *_avx512bf16.cpp, *_amx.cpp and is called only after the matching flag was found
// here, so that one binary runs on every x86-64 machine.
#pragma once

namespace oscar {

struct CpuFeatures {
  bool avx2 = false;         // AVX2 + FMA + F16C
  bool avx512 = false;       // AVX-512 F, BW, VL, DQ
  bool avx512_bf16 = false;  // vdpbf16ps
  bool amx_bf16 = false;     // tile unit, its use granted by the operating system
};

// Detected once; the environment variable OSCAR_SIMD=scalar|avx2|avx512|avx512_bf16 lowers the
// level (for tests and comparisons).
const CpuFeatures& cpu_features();

// Highest level in use: "scalar", "avx2", "avx512", "avx512_bf16" or "amx_bf16".
const char* simd_name();

}  // namespace oscar
