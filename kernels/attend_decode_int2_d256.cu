#include "kernels/decode_launch.cuh"

namespace oscar::decode {

void launch_d256_c4(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<256, 1>(params, launch);
}
void launch_d256_c8(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<256, 2>(params, launch);
}
void launch_d256_c16(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<256, 4>(params, launch);
}

}  // namespace oscar::decode
