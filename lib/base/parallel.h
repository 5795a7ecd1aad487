// A process-wide thread pool. Work is cut into items whose number never depends on the thread
// count, so results do not either.
#pragma once

#include <cstddef>
#include <functional>

namespace oscar {

// Number of threads parallel_for uses, the caller included. 0 = number of usable CPUs (affinity
// respected). Not to be called from inside parallel_for.
void set_num_threads(int count);
int num_threads();

// Calls body(item) for item in [0, count), in any order, from several threads; returns when all
// have finished. The first exception thrown by a body is rethrown here (the remaining items may be
// skipped). A call from inside a body runs serially in that thread.
void parallel_for(size_t count, const std::function<void(size_t item)>& body);

// Cuts [0, count) into ranges of `grain` (the last may be shorter) and calls body(begin, end) for
// each.
void parallel_for_ranges(size_t count, size_t grain,
                         const std::function<void(size_t begin, size_t end)>& body);

// Index of the calling pool thread, 0 .. num_threads() - 1 (0 outside parallel_for): for per-thread
// scratch memory.
int thread_index();

}  // namespace oscar
