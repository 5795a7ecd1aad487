// The launchers of the decode attention shapes, one translation unit a head_dim (they compile in
// parallel). Private to kernels/.
#pragma once

#include "kernels/attend_decode_int2.h"

struct CUstream_st;

namespace oscar::decode {

struct Launch {
  CUstream_st* stream;
  int shared_bytes;   // what a thread block may have on this device
  bool programmatic;  // sm_90 and later: may be brought in while the previous kernel ends
};

void launch_d64_c4(const AttendDecodeParams& params, const Launch& launch);
void launch_d64_c8(const AttendDecodeParams& params, const Launch& launch);
void launch_d64_c16(const AttendDecodeParams& params, const Launch& launch);
void launch_d96_c4(const AttendDecodeParams& params, const Launch& launch);
void launch_d96_c8(const AttendDecodeParams& params, const Launch& launch);
void launch_d96_c16(const AttendDecodeParams& params, const Launch& launch);
void launch_d128_c4(const AttendDecodeParams& params, const Launch& launch);
void launch_d128_c8(const AttendDecodeParams& params, const Launch& launch);
void launch_d128_c16(const AttendDecodeParams& params, const Launch& launch);
void launch_d192_c4(const AttendDecodeParams& params, const Launch& launch);
void launch_d192_c8(const AttendDecodeParams& params, const Launch& launch);
void launch_d192_c16(const AttendDecodeParams& params, const Launch& launch);
void launch_d256_c4(const AttendDecodeParams& params, const Launch& launch);
void launch_d256_c8(const AttendDecodeParams& params, const Launch& launch);
void launch_d256_c16(const AttendDecodeParams& params, const Launch& launch);

}  // namespace oscar::decode
