#include "kernels/prefill_launch.cuh"

namespace oscar::prefill {

template void launch<64>(const AttendPrefillParams&, bool, void*);

}  // namespace oscar::prefill
