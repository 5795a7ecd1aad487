// Which keys each query of a call reads dequantized, and the cache pages as blocks of 64 keys:
// high-precision rows in place, packed rows expanded to float32.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "model/attention_tile.h"
#include "model/kv_cache_state.h"

namespace oscar {

// The windows as the queries of one call see them.
struct WindowPlan {
  // [num_tokens] by Side: keys sink <= j < ends[side][i] are dequantized for token i;
  // non-decreasing. = sink for every token in a reference arm.
  std::array<std::vector<size_t>, 2> ends;
  std::array<size_t, 2> end_after{};  // packed end after the call
  size_t serving_end_after = 0;
};
WindowPlan plan_windows(const KvCache::State& state, size_t layer, size_t num_tokens);

// Reads the blocks that the queries of one call need. Forms: high precision for keys below the sink
// and from the first query's packed end on, dequantized up to the last query's.
class BlockReader {
 public:
  // length: tokens in the layer, the new ones included.
  BlockReader(const KvCache::State& state, size_t layer, const WindowPlan& plan, size_t length);

  size_t num_blocks() const { return num_blocks_; }
  size_t num_kv_heads() const { return state_.num_kv_heads; }
  // Floats to expand for block `block` of one head, and for all blocks.
  size_t floats(size_t block) const;
  size_t floats_per_head() const;
  // Expands one block into storage [floats(block)]; what lies in the cache in a usable form is
  // pointed to.
  KeyBlock read(size_t head, size_t block, float* storage) const;
  KeyBlock read(size_t head, size_t block, AlignedBuffer<float>& storage) const;

 private:
  bool needs_high(Side side, size_t block) const;
  bool needs_dequantized(Side side, size_t block) const;
  // High-precision values whose rows have no padding in the cache, but need one.
  bool copies_values() const { return padded_width(state_.head_dim) != state_.head_dim; }
  void view_high(size_t head, size_t block, KeyBlock& view) const;
  void copy_values(size_t head, size_t block, float* out) const;
  void dequantize(Side side, size_t head, size_t block, float* out) const;

  const KvCache::State& state_;
  size_t layer_;
  size_t num_blocks_;
  std::array<size_t, 2> first_end_{}, last_end_{};
};

// All blocks of KV heads [first_head, first_head + num_heads), expanded in parallel.
class ExpandedBlocks {
 public:
  ExpandedBlocks(const BlockReader& reader, size_t first_head, size_t num_heads);
  const KeyBlock& view(size_t head, size_t block) const {
    return blocks_[(head - first_head_) * num_blocks_ + block];
  }

 private:
  size_t first_head_, num_blocks_;
  AlignedBuffer<float> storage_;
  std::vector<KeyBlock> blocks_;
};

}  // namespace oscar
