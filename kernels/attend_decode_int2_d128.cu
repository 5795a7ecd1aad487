#include "kernels/decode_launch.cuh"

namespace oscar::decode {

void launch_d128_c4(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<128, 1>(params, launch);
}
void launch_d128_c8(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<128, 2>(params, launch);
}
void launch_d128_c16(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<128, 4>(params, launch);
}

}  // namespace oscar::decode
