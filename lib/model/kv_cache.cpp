#include "model/kv_cache.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include "base/error.h"
#include "base/parallel.h"
#include "model/kv_cache_state.h"

namespace oscar {
namespace {

PreparedSide prepare(const SideArm& side, size_t num_kv_heads, size_t head_dim) {
  PreparedSide prepared;
  for (const auto& codec : side.codecs) prepared.readers.emplace_back(*codec);
  prepared.centered = !side.mean.empty();
  prepared.rotated = !side.rotation.empty();
  if (!prepared.rotated) return prepared;
  const size_t width = padded_width(head_dim);
  const size_t copies = side.rotation.shape[0];
  prepared.storage.assign(copies * 2 * head_dim * width, 0.0F);
  for (size_t copy = 0; copy < copies; ++copy) {
    const float* rotation = side.rotation.at(copy);
    float* forward = prepared.storage.data() + copy * 2 * head_dim * width;
    float* backward = forward + head_dim * width;
    for (size_t i = 0; i < head_dim; ++i) {
      for (size_t j = 0; j < head_dim; ++j) {
        forward[i * width + j] = rotation[i * head_dim + j];
        backward[j * width + i] = rotation[i * head_dim + j];
      }
    }
  }
  for (size_t head = 0; head < num_kv_heads; ++head) {
    const float* forward =
        prepared.storage.data() + (copies == 1 ? 0 : head) * 2 * head_dim * width;
    prepared.rotation.push_back(forward);
    prepared.rotation_transposed.push_back(forward + head_dim * width);
  }
  return prepared;
}

PackedSide make_packed_side(const SideArm& arm, size_t sink) {
  PackedSide side;
  side.token_block = static_cast<size_t>(arm.codec(0).token_block());
  side.page_tokens = std::lcm(kPageTokens, side.token_block);
  side.bytes_per_block = arm.codec(0).bytes_per_block();
  side.end = sink;
  return side;
}

void reset_layers(KvCache::State& state) {
  state.layers.assign(state.num_layers, LayerCache{});
  for (size_t layer = 0; layer < state.num_layers && state.arm->quantized; ++layer) {
    for (const Side side : {kKeySide, kValueSide}) {
      state.layers[layer].packed[side] =
          make_packed_side(state.side_arm(layer, side), state.arm->windows.sink);
    }
    state.layers[layer].serving_end = state.arm->windows.sink;
  }
}

// `word` with its low (0) or high (1) half replaced by `value` in bf16.
uint32_t with_half(uint32_t word, size_t half, float value) {
  const uint32_t bits = float_to_bf16(value);
  return half == 0 ? (word & 0xffff0000U) | bits : (word & 0xffffU) | bits << 16;
}
float half_of(uint32_t word, size_t half) {
  return bf16_to_float(static_cast<uint16_t>(half == 0 ? word : word >> 16));
}

}  // namespace

void KvCache::State::reserve_rows(LayerCache& cache, size_t begin, size_t end) const {
  const size_t size = 2 * num_kv_heads * page_head_size();
  cache.pages.resize(std::max(cache.pages.size(), (end + kPageTokens - 1) / kPageTokens));
  for (size_t page = begin / kPageTokens; page * kPageTokens < end; ++page) {
    std::shared_ptr<HighPrecisionPage>& slot = cache.pages[page];
    if (!slot) {
      slot = std::make_shared<HighPrecisionPage>();
      if (bf16()) {
        slot->bf16.assign(size, 0);
      } else {
        slot->fp32.assign(size, 0.0F);
      }
    } else if (slot.use_count() > 1) {
      slot = std::make_shared<HighPrecisionPage>(*slot);
    }
  }
}

void KvCache::State::write_rows(LayerCache& cache, size_t position, size_t count, const float* keys,
                                const float* values) const {
  const size_t head_size = page_head_size();
  for (size_t i = 0; i < count; ++i) {
    HighPrecisionPage& page = *cache.pages[(position + i) / kPageTokens];
    const size_t slot = (position + i) % kPageTokens;
    for (size_t head = 0; head < num_kv_heads; ++head) {
      const float* key = keys + (i * num_kv_heads + head) * head_dim;
      const float* value = values + (i * num_kv_heads + head) * head_dim;
      const size_t key_base = head * head_size, value_base = (num_kv_heads + head) * head_size;
      if (!bf16()) {
        for (size_t d = 0; d < head_dim; ++d) page.fp32[key_base + d * kPageTokens + slot] = key[d];
        std::copy_n(value, head_dim, page.fp32.data() + value_base + slot * head_dim);
        continue;
      }
      uint32_t* key_words = page.bf16.data() + key_base + slot;
      for (size_t d = 0; d < head_dim; d += 2)
        key_words[d / 2 * kPageTokens] = with_half(float_to_bf16(key[d]), 1, key[d + 1]);
      uint32_t* value_words = page.bf16.data() + value_base + slot / 2 * head_dim;
      for (size_t d = 0; d < head_dim; ++d)
        value_words[d] = with_half(value_words[d], slot % 2, value[d]);
    }
  }
}

void KvCache::State::read_rows(const LayerCache& cache, Side side, size_t kv_head, size_t position,
                               size_t count, float* out, size_t out_stride) const {
  const size_t base = (side == kKeySide ? kv_head : num_kv_heads + kv_head) * page_head_size();
  for (size_t i = 0; i < count; ++i) {
    const HighPrecisionPage& page = *cache.pages[(position + i) / kPageTokens];
    const size_t slot = (position + i) % kPageTokens;
    float* row = out + i * out_stride;
    if (bf16() && side == kKeySide) {
      for (size_t d = 0; d < head_dim; ++d)
        row[d] = half_of(page.bf16[base + d / 2 * kPageTokens + slot], d % 2);
    } else if (bf16()) {
      for (size_t d = 0; d < head_dim; ++d)
        row[d] = half_of(page.bf16[base + slot / 2 * head_dim + d], slot % 2);
    } else {
      const size_t step = side == kKeySide ? kPageTokens : 1;
      const size_t first = base + (side == kKeySide ? slot : slot * head_dim);
      for (size_t d = 0; d < head_dim; ++d) row[d] = page.fp32[first + d * step];
    }
  }
}

void KvCache::State::pack(size_t layer, Side side, size_t end) {
  LayerCache& cache = layers[layer];
  PackedSide& packed = cache.packed[side];
  if (end <= packed.end) return;
  const size_t sink = arm->windows.sink;
  const size_t first = packed.end - sink;  // in packed coordinates: token 0 is the first after the
  const size_t last = end - sink;          // sink
  packed.pages.resize((last + packed.page_tokens - 1) / packed.page_tokens);
  const size_t first_page = first / packed.page_tokens;
  for (size_t page = first_page; page < packed.pages.size(); ++page) {
    std::shared_ptr<PackedPage>& slot = packed.pages[page];
    if (!slot) {
      slot = std::make_shared<PackedPage>(num_kv_heads * packed.bytes_per_head());
    } else if (slot.use_count() > 1) {
      slot = std::make_shared<PackedPage>(*slot);
    }
  }
  const size_t num_pages = packed.pages.size() - first_page;
  std::mutex stats_mutex;
  parallel_for(num_pages * num_kv_heads, [&](size_t item) {
    const size_t head = item % num_kv_heads;
    const size_t page = first_page + item / num_kv_heads;
    const size_t begin = std::max(first, page * packed.page_tokens);
    const size_t count = std::min(last, (page + 1) * packed.page_tokens) - begin;
    std::vector<float> rows(count * head_dim);
    read_rows(cache, side, head, sink + begin, count, rows.data(), head_dim);
    uint8_t* out = packed.pages[page]->data() + head * packed.bytes_per_head() +
                   begin % packed.page_tokens / packed.token_block * packed.bytes_per_block;
    EncodeStats stats;
    try {
      side_arm(layer, side)
          .codec(head)
          .encode(rows.data(), head_dim, count / packed.token_block, out, &stats);
    } catch (const Error& error) {
      fail("layer ", layer, ", KV head ", head, ", ", side == kKeySide ? "keys" : "values",
           " from token ", sink + begin, ": ", error.what());
    }
    const std::lock_guard lock(stats_mutex);
    encode.rows += stats.rows;
    encode.meta_fallbacks += stats.meta_fallbacks;
    encode.gain_clamped += stats.gain_clamped;
    encode.scale_saturated += stats.scale_saturated;
  });
  packed.end = end;
}

void KvCache::State::read_packed(size_t layer, Side side, size_t kv_head, size_t position,
                                 size_t count, float* out, size_t out_stride) const {
  const PackedSide& packed = layers[layer].packed[side];
  const PackedRowReader& reader = (*prepared)[layer].sides[side].reader(kv_head);
  const size_t block = packed.token_block;
  size_t token = position - arm->windows.sink;
  const size_t last = token + count;
  std::vector<float> partial;
  while (token < last) {
    const size_t page = token / packed.page_tokens;
    const size_t in_page = token % packed.page_tokens;
    const size_t skip = in_page % block;
    const uint8_t* bytes = packed.pages[page]->data() + kv_head * packed.bytes_per_head() +
                           in_page / block * packed.bytes_per_block;
    size_t take = std::min(last - token, packed.page_tokens - in_page);
    if (skip == 0 && take >= block) {
      take = take / block * block;
      reader.rows(bytes, take / block, out, out_stride);
    } else {  // part of a block of tokens
      take = std::min(take, block - skip);
      partial.resize(block * head_dim);
      reader.rows(bytes, 1, partial.data(), head_dim);
      for (size_t i = 0; i < take; ++i) {
        std::copy_n(partial.data() + (skip + i) * head_dim, head_dim, out + i * out_stride);
      }
    }
    token += take;
    out += take * out_stride;
  }
}

void KvCache::State::read_packed_panel(size_t layer, Side side, size_t kv_head, size_t position,
                                       size_t count, float* panel, size_t column) const {
  const PackedSide& packed = layers[layer].packed[side];
  const PackedRowReader& reader = (*prepared)[layer].sides[side].reader(kv_head);
  size_t token = position - arm->windows.sink;
  const size_t last = token + count;
  while (token < last) {
    const size_t in_page = token % packed.page_tokens;
    const size_t take = std::min(last - token, packed.page_tokens - in_page);
    const uint8_t* bytes = packed.pages[token / packed.page_tokens]->data() +
                           kv_head * packed.bytes_per_head() + in_page * packed.bytes_per_block;
    reader.panel(bytes, take, panel, column);
    token += take;
    column += take;
  }
}

void KvCache::State::drop_packed_pages(LayerCache& cache) const {
  const size_t end = std::min(cache.packed[kKeySide].end, cache.packed[kValueSide].end);
  const size_t first = (arm->windows.sink + kPageTokens - 1) / kPageTokens;
  for (size_t page = first; (page + 1) * kPageTokens <= end; ++page) cache.pages[page].reset();
}

KvCache::KvCache(const ModelConfig& config, std::shared_ptr<const KvArm> arm)
    : state_(std::make_unique<State>()) {
  OSCAR_CHECK(arm != nullptr, "KV cache: no arm given");
  check(*arm, config);
  OSCAR_CHECK(config.head_dim % 2 == 0, "KV cache: expected an even head_dim, got ",
              config.head_dim);
  State& s = *state_;
  s.num_layers = config.num_layers;
  s.num_heads = config.num_heads;
  s.num_kv_heads = config.num_kv_heads;
  s.head_dim = config.head_dim;
  s.group_size = config.group_size();
  s.arm = std::move(arm);
  auto prepared = std::make_shared<std::vector<PreparedLayer>>();
  for (const LayerArm& layer : s.arm->layers) {
    PreparedLayer item;
    item.sides[kKeySide] = prepare(layer.k, s.num_kv_heads, s.head_dim);
    item.sides[kValueSide] = prepare(layer.v, s.num_kv_heads, s.head_dim);
    prepared->push_back(std::move(item));
  }
  s.prepared = std::move(prepared);
  reset_layers(s);
}

KvCache::~KvCache() = default;
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;

size_t KvCache::length() const { return state_->layers.back().length; }
const KvArm& KvCache::arm() const { return *state_->arm; }
void KvCache::set_append_as_decode(bool decode) { state_->append_as_decode = decode; }

void KvCache::clear() {
  reset_layers(*state_);
  state_->tokens_int2_read = 0;
  state_->encode = EncodeStats{};
}

KvCache KvCache::fork() const {
  KvCache copy(std::make_unique<State>(*state_));
  return copy;
}

KvCache::KvCache(std::unique_ptr<State> state) : state_(std::move(state)) {}

CacheCounters KvCache::counters() const {
  const State& s = *state_;
  CacheCounters counters;
  counters.tokens = length();
  const LayerCache& first = s.layers.front();
  if (s.arm->quantized) {
    counters.tokens_int2_written =
        std::min(first.packed[kKeySide].end, first.packed[kValueSide].end) - s.arm->windows.sink;
  }
  counters.tokens_high_precision = first.length - counters.tokens_int2_written;
  counters.tokens_int2_read = s.tokens_int2_read;
  counters.encode = s.encode;
  for (const LayerCache& layer : s.layers) {
    for (const PackedSide& side : layer.packed) {
      for (const auto& page : side.pages) counters.bytes_packed += page->size();
      const size_t packed_tokens = s.arm->quantized ? side.end - s.arm->windows.sink : 0;
      counters.bytes_packed_used +=
          packed_tokens / side.token_block * side.bytes_per_block * s.num_kv_heads;
      counters.bytes_high_precision_used += (layer.length - packed_tokens) * s.num_kv_heads *
                                            s.head_dim *
                                            (s.bf16() ? sizeof(uint16_t) : sizeof(float));
    }
    for (const auto& page : layer.pages) {
      if (page) counters.bytes_high_precision += 4 * (page->bf16.size() + page->fp32.size());
    }
  }
  return counters;
}

void KvCache::truncate(size_t length) {
  State& s = *state_;
  const WindowSpec& windows = s.arm->windows;
  // Where the packed range of a side ends afterwards: what the next query may read packed.
  const auto new_end = [&](const PackedSide& side) {
    size_t end = side.end;
    if (windows.mode == WindowMode::kExact) {
      end = std::min(end, quantized_end(windows, length, side.token_block));
    }
    if (end > length) {
      const size_t beyond_sink = length - std::min(length, windows.sink);
      end = windows.sink + beyond_sink / side.token_block * side.token_block;
    }
    return std::max(windows.sink, end);
  };
  for (size_t index = 0; index < s.num_layers && s.arm->quantized; ++index) {
    const LayerCache& layer = s.layers[index];
    if (length >= layer.length) continue;
    for (const PackedSide& side : layer.packed) {
      for (size_t page = new_end(side) / kPageTokens; page * kPageTokens < length; ++page) {
        OSCAR_CHECK(layer.pages[page] != nullptr, "layer ", index, ": cannot truncate ",
                    layer.length, " tokens to ", length, ": token ", page * kPageTokens,
                    " is needed in high precision but is already packed; fork before appending ",
                    "instead");
      }
    }
  }
  for (LayerCache& layer : s.layers) {
    if (length >= layer.length) continue;
    layer.length = length;
    layer.pages.resize((length + kPageTokens - 1) / kPageTokens);
    if (!s.arm->quantized) continue;
    layer.serving_end = std::max(windows.sink, std::min(layer.serving_end, length));
    for (PackedSide& side : layer.packed) {
      side.end = new_end(side);
      side.pages.resize((side.end - windows.sink + side.page_tokens - 1) / side.page_tokens);
    }
  }
}

}  // namespace oscar
