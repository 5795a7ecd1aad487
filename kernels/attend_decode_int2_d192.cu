#include "kernels/decode_launch.cuh"

namespace oscar::decode {

void launch_d192_c4(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<192, 1>(params, launch);
}
void launch_d192_c8(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<192, 2>(params, launch);
}
void launch_d192_c16(const AttendDecodeParams& params, const Launch& launch) {
  launch_shape<192, 4>(params, launch);
}

}  // namespace oscar::decode
