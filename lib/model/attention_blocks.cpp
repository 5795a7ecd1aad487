#include "model/attention_blocks.h"

#include <algorithm>

#include "base/parallel.h"

namespace oscar {

WindowPlan plan_windows(const KvCache::State& state, size_t layer, size_t num_tokens) {
  const WindowSpec& windows = state.arm->windows;
  const LayerCache& cache = state.layers[layer];
  WindowPlan plan;
  for (std::vector<size_t>& ends : plan.ends) ends.assign(num_tokens, windows.sink);
  plan.end_after = {windows.sink, windows.sink};
  if (!state.arm->quantized) return plan;
  const auto whole_blocks = [&](Side side, size_t end) {
    const size_t block = cache.packed[side].token_block;
    return windows.sink + (end - windows.sink) / block * block;
  };
  if (windows.mode == WindowMode::kExact) {
    for (const Side side : {kKeySide, kValueSide}) {
      for (size_t i = 0; i < num_tokens; ++i) {
        plan.ends[side][i] =
            quantized_end(windows, cache.length + i, cache.packed[side].token_block);
      }
      plan.end_after[side] = plan.ends[side].back();
    }
    return plan;
  }
  size_t end = cache.serving_end;
  const bool decode = state.append_as_decode || num_tokens == 1;
  // A prefill chunk finds everything before it packed and leaves the last `recent` tokens.
  if (!decode) end = std::max(end, cache.length);
  for (size_t i = 0; i < num_tokens; ++i) {
    const size_t length = cache.length + i + 1;
    const size_t flush = flush_block(*state.arm);
    while (decode && length >= end + windows.recent + flush) end += flush;
    for (const Side side : {kKeySide, kValueSide}) plan.ends[side][i] = whole_blocks(side, end);
  }
  const size_t length = cache.length + num_tokens;
  if (!decode && length > windows.recent) end = std::max(end, length - windows.recent);
  plan.serving_end_after = end;
  for (const Side side : {kKeySide, kValueSide}) plan.end_after[side] = whole_blocks(side, end);
  return plan;
}

BlockReader::BlockReader(const KvCache::State& state, size_t layer, const WindowPlan& plan,
                         size_t length)
    : state_(state), layer_(layer), num_blocks_((length + kKeyBlock - 1) / kKeyBlock) {
  for (const Side side : {kKeySide, kValueSide}) {
    first_end_[side] = plan.ends[side].front();
    last_end_[side] = plan.ends[side].back();
  }
}

bool BlockReader::needs_high(Side side, size_t block) const {
  return block * kKeyBlock < state_.arm->windows.sink || (block + 1) * kKeyBlock > first_end_[side];
}

bool BlockReader::needs_dequantized(Side side, size_t block) const {
  return std::max(block * kKeyBlock, state_.arm->windows.sink) <
         std::min((block + 1) * kKeyBlock, last_end_[side]);
}

size_t BlockReader::floats(size_t block) const {
  const size_t key_floats = state_.head_dim * kKeyBlock;
  const size_t value_floats = padded_width(state_.head_dim) * kKeyBlock;
  size_t total = 0;
  if (needs_dequantized(kKeySide, block)) total += key_floats;
  if (needs_dequantized(kValueSide, block)) total += value_floats;
  if (needs_high(kValueSide, block) && copies_values()) total += value_floats;
  return total;
}

size_t BlockReader::floats_per_head() const {
  size_t total = 0;
  for (size_t block = 0; block < num_blocks_; ++block) total += floats(block);
  return total;
}

void BlockReader::view_high(size_t head, size_t block, KeyBlock& view) const {
  const size_t size = state_.page_head_size(), values = (state_.num_kv_heads + head) * size;
  if (needs_high(kKeySide, block)) {
    const HighPrecisionPage& page = *state_.layers[layer_].pages[block];
    if (state_.bf16()) {
      view.keys_bf16 = page.bf16.data() + head * size;
    } else {
      view.keys_high = page.fp32.data() + head * size;
    }
  }
  if (needs_high(kValueSide, block) && !copies_values()) {
    const HighPrecisionPage& page = *state_.layers[layer_].pages[block];
    if (state_.bf16()) {
      view.values_bf16 = page.bf16.data() + values;
    } else {
      view.values_high = page.fp32.data() + values;
    }
  }
}

void BlockReader::copy_values(size_t head, size_t block, float* out) const {
  const size_t width = padded_width(state_.head_dim);
  std::fill_n(out, width * kKeyBlock, 0.0F);
  state_.read_rows(state_.layers[layer_], kValueSide, head, block * kKeyBlock, kKeyBlock, out,
                   width);
}

void BlockReader::dequantize(Side side, size_t head, size_t block, float* out) const {
  const size_t width = padded_width(state_.head_dim);
  const size_t begin = std::max(block * kKeyBlock, state_.arm->windows.sink);
  const size_t end = std::min((block + 1) * kKeyBlock, last_end_[side]);
  if (side == kKeySide && (*state_.prepared)[layer_].sides[side].reader(head).has_panel()) {
    if (end - begin < kKeyBlock) std::fill_n(out, state_.head_dim * kKeyBlock, 0.0F);
    state_.read_packed_panel(layer_, side, head, begin, end - begin, out,
                             begin - block * kKeyBlock);
    return;
  }
  thread_local std::vector<float> staged;
  float* rows = out;
  if (side == kKeySide) {
    staged.resize(kKeyBlock * width);
    rows = staged.data();
  }
  if (end - begin < kKeyBlock || width != state_.head_dim) {
    std::fill_n(rows, kKeyBlock * width, 0.0F);
  }
  state_.read_packed(layer_, side, head, begin, end - begin,
                     rows + (begin - block * kKeyBlock) * width, width);
  if (side == kKeySide) {
    attention_kernels().transpose(rows, width, kKeyBlock, state_.head_dim, out);
  }
}

KeyBlock BlockReader::read(size_t head, size_t block, float* storage) const {
  KeyBlock view{.index = block};
  if (state_.position_mean(layer_, head) != nullptr)
    view.positions = state_.rope_panels.panel(block);
  const size_t key_floats = state_.head_dim * kKeyBlock;
  const size_t value_floats = padded_width(state_.head_dim) * kKeyBlock;
  const auto next = [&storage](size_t floats) {
    float* const here = storage;
    storage += floats;
    return here;
  };
  view_high(head, block, view);
  if (needs_dequantized(kKeySide, block)) {
    float* out = next(key_floats);
    dequantize(kKeySide, head, block, out);
    view.keys_dequantized = out;
  }
  if (needs_high(kValueSide, block) && copies_values()) {
    float* out = next(value_floats);
    copy_values(head, block, out);
    view.values_high = out;
  }
  if (needs_dequantized(kValueSide, block)) {
    float* out = next(value_floats);
    dequantize(kValueSide, head, block, out);
    view.values_dequantized = out;
  }
  return view;
}

KeyBlock BlockReader::read(size_t head, size_t block, AlignedBuffer<float>& storage) const {
  return read(head, block, storage.get(floats(block)));
}

ExpandedBlocks::ExpandedBlocks(const BlockReader& reader, size_t first_head, size_t num_heads)
    : first_head_(first_head), num_blocks_(reader.num_blocks()) {
  std::vector<size_t> offsets(num_blocks_ + 1, 0);
  for (size_t block = 0; block < num_blocks_; ++block) {
    offsets[block + 1] = offsets[block] + reader.floats(block);
  }
  const size_t per_head = offsets.back();
  float* const storage = storage_.get(num_heads * per_head);
  blocks_.resize(num_heads * num_blocks_);
  const auto read = [&](size_t item) {
    const size_t head = item / num_blocks_, block = item % num_blocks_;
    blocks_[item] =
        reader.read(first_head + head, block, storage + head * per_head + offsets[block]);
  };
  if (per_head > 0) {
    parallel_for(blocks_.size(), read);
  } else {
    for (size_t item = 0; item < blocks_.size(); ++item) read(item);
  }
}

}  // namespace oscar
