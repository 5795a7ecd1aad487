#include "kernels/decode_launch.cuh"

namespace oscar::decode {

void launch_d96_c4(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<96, 1>(params, launch);
}
void launch_d96_c8(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<96, 2>(params, launch);
}
void launch_d96_c16(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<96, 4>(params, launch);
}

}  // namespace oscar::decode
