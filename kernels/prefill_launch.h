// Launches of prefill attention by head_dim, one translation unit each.
#pragma once

#include "kernels/attend_prefill.h"

namespace oscar::prefill {

// hopper: the wgmma kernel, else the portable one. stream: a cudaStream_t.
template <int D>
void launch(const AttendPrefillParams& params, bool hopper, void* stream);

inline constexpr int kPortableRows = 64, kHopperRows = 128;

}  // namespace oscar::prefill
