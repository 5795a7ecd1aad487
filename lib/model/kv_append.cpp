#include "model/kv_append.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "model/rotate.h"

namespace oscar {
namespace {

void check_finite(const KvCache::State& state, size_t layer, size_t num_tokens, const float* rows,
                  const char* what) {
  const size_t width = state.num_kv_heads * state.head_dim;
  const size_t first = state.layers[layer].length;
  parallel_for_ranges(num_tokens, kPageTokens, [&](size_t begin, size_t end) {
    // A full exponent plus its lowest bit overflows into the sign bit.
    uint32_t overflow = 0;
    for (size_t i = begin * width; i < end * width; ++i) {
      overflow |= (std::bit_cast<uint32_t>(rows[i]) & 0x7f800000U) + 0x00800000U;
    }
    if ((overflow & 0x80000000U) == 0) return;
    for (size_t i = begin * width; i < end * width; ++i) {
      OSCAR_CHECK(std::isfinite(rows[i]), "layer ", layer, ": ", what, " of token ",
                  first + i / width, ", KV head ", i % width / state.head_dim, ", dimension ",
                  i % state.head_dim, " is not finite (", rows[i], ")");
    }
  });
}

// Centers, rotates and stores the new rows, one page a work item.
void store_rows(KvCache::State& state, size_t layer, size_t num_tokens, const float* k,
                const float* v) {
  LayerCache& cache = state.layers[layer];
  const size_t first = cache.length;
  state.reserve_rows(cache, first, first + num_tokens);
  const size_t row = state.num_kv_heads * state.head_dim;
  const size_t width = padded_width(state.head_dim);
  const size_t first_page = first / kPageTokens;
  const size_t num_pages = (first + num_tokens - 1) / kPageTokens - first_page + 1;
  parallel_for(num_pages, [&](size_t item) {
    const size_t begin = std::max(first, (first_page + item) * kPageTokens);
    const size_t end = std::min(first + num_tokens, (first_page + item + 1) * kPageTokens);
    const size_t count = end - begin;
    const float* sources[2] = {k + (begin - first) * row, v + (begin - first) * row};
    if (!state.arm->quantized) {
      state.write_rows(cache, begin, count, sources[0], sources[1]);
      return;
    }
    std::vector<float> stored[2];
    std::vector<float> rotated(count * width);
    std::vector<float> centered;
    for (const Side side : {kKeySide, kValueSide}) {
      const PreparedSide& prepared = (*state.prepared)[layer].sides[side];
      stored[side].resize(count * row);
      for (size_t head = 0; head < state.num_kv_heads; ++head) {
        const float* source = sources[side] + head * state.head_dim;
        size_t stride = row;
        if (side == kKeySide && state.position_mean(layer, head) != nullptr) {
          centered.resize(count * state.head_dim);
          subtract_position_mean(state.rope_panels.panel(begin / kPageTokens),
                                 state.arm->rope.rotary_dim, begin, source, row, count,
                                 state.head_dim, state.position_mean(layer, head), centered.data());
          source = centered.data();
          stride = state.head_dim;
        }
        rotate_rows(source, stride, count, state.head_dim,
                    state.side_arm(layer, side).mean_of(head),
                    prepared.rotated ? prepared.rotation[head] : nullptr, rotated.data());
        for (size_t i = 0; i < count; ++i) {
          std::copy_n(rotated.data() + i * width, state.head_dim,
                      stored[side].data() + i * row + head * state.head_dim);
        }
      }
    }
    state.write_rows(cache, begin, count, stored[0].data(), stored[1].data());
  });
}

}  // namespace

WindowPlan begin_append(KvCache::State& state, size_t layer, size_t num_tokens, const float* k,
                        const float* v) {
  OSCAR_CHECK(layer < state.num_layers, "KV cache: layer ", layer, " of ", state.num_layers);
  check_finite(state, layer, num_tokens, k, "key");
  check_finite(state, layer, num_tokens, v, "value");
  WindowPlan plan = plan_windows(state, layer, num_tokens);
  if (state.position_mean(layer, 0) != nullptr)
    state.rope_panels.extend(state.arm->rope, state.layers[layer].length + num_tokens);
  store_rows(state, layer, num_tokens, k, v);
  state.layers[layer].length += num_tokens;
  if (state.arm->quantized) {
    for (const Side side : {kKeySide, kValueSide}) state.pack(layer, side, plan.ends[side].back());
  }
  return plan;
}

void end_append(KvCache::State& state, size_t layer, const WindowPlan& plan) {
  if (!state.arm->quantized) return;
  for (const Side side : {kKeySide, kValueSide}) state.pack(layer, side, plan.end_after[side]);
  state.layers[layer].serving_end = plan.serving_end_after;
  state.drop_packed_pages(state.layers[layer]);
}

}  // namespace oscar
