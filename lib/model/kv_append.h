// Appending rows to a cache: check, transform and store them, pack what leaves the windows.
#pragma once

#include <cstddef>

#include "model/attention_blocks.h"

namespace oscar {

// Stores the rows of `num_tokens` new tokens (k, v [num_tokens, Hkv, D], model coordinates) and
// packs what the last of them reads packed. The cache's length grows; returns the windows as the
// new tokens see them. Throws Error naming layer, head and token when a value is not finite (the
// cache is unchanged then).
WindowPlan begin_append(KvCache::State& state, size_t layer, size_t num_tokens, const float* k,
                        const float* v);
// After the new tokens have attended: packs what leaves the windows with the call, frees pages,
// counts.
void end_append(KvCache::State& state, size_t layer, const WindowPlan& plan);

}  // namespace oscar
