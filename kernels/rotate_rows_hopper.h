// The wgmma path of rotate_rows.
#pragma once

#include "kernels/rotate_rows.h"

namespace oscar::rotate {

// False: another device, or a shape that only the portable kernel has (head_dim 256 in place).
bool hopper_supports(const RotateParams& params);
// stream: a cudaStream_t.
void launch_hopper(const RotateParams& params, void* stream);

}  // namespace oscar::rotate
