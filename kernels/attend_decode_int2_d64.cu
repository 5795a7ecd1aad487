#include "kernels/decode_launch.cuh"

namespace oscar::decode {

void launch_d64_c4(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<64, 1>(params, launch);
}
void launch_d64_c8(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<64, 2>(params, launch);
}
void launch_d64_c16(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<64, 4>(params, launch);
}

}  // namespace oscar::decode
