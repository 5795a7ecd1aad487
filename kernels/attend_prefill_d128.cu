#include "kernels/prefill_launch.cuh"

namespace oscar::prefill {

template void launch<128>(const AttendPrefillParams&, bool, void*);

}  // namespace oscar::prefill
