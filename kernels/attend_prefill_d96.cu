#include "kernels/prefill_launch.cuh"

namespace oscar::prefill {

template void launch<96>(const AttendPrefillParams&, bool, void*);

}  // namespace oscar::prefill
