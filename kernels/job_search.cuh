// Which job of a launch a tile belongs to; device code.
#pragma once

namespace oscar {

// Last job with first_tile <= tile (jobs lie in ascending first_tile): the warp narrows the range
// 32-fold a step. All lanes must call it.
template <class Job>
__device__ __forceinline__ int find_tile_job(const Job* jobs, int num_jobs, int tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int begin = 0, count = num_jobs;
  while (count > 1) {
    const int step = (count + 31) / 32, at = begin + lane * step;
    const bool before = lane * step < count && jobs[at].first_tile <= tile;
    const int last = 31 - __clz(static_cast<int>(__ballot_sync(~0U, before)));
    const int end = begin + count;
    begin += last * step;
    count = step < end - begin ? step : end - begin;
  }
  return begin;
}

}  // namespace oscar
