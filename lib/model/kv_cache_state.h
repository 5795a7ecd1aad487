// What a KvCache holds: pages of high-precision rows, pages of packed rows, and where each layer's
// windows stand. Shared by kv_cache.cpp and attention.cpp only.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/aligned.h"
#include "base/float16.h"
#include "model/attention_kernels.h"
#include "model/kv_cache.h"
#include "model/kv_position.h"
#include "model/packed_rows.h"

namespace oscar {

static_assert(kKeyBlock == kPageTokens, "a softmax step reads whole pages");

enum Side : size_t { kKeySide = 0, kValueSide = 1 };

// 64 consecutive tokens (by position) of all KV heads of one layer, centered and rotated. Keys lie
// dimension-major ("panel") so that scores are one matrix product; values lie token-major.
//   float32: keys [Hkv, D, 64], then values [Hkv, 64, D]
//   bf16: pairs of neighbouring rows share a word, as products of bf16 pairs read them: keys
//   [Hkv, D / 2, 64] (low half: the even dimension), then values [Hkv, 32, D] (low half: the even
//   token)
struct HighPrecisionPage {
  AlignedVector<uint32_t> bf16;  // one of the two is empty
  AlignedVector<float> fp32;
};

// `page_tokens` consecutive packed tokens, counted from the sink, of all KV heads of one side:
// [Hkv, page_tokens / token_block, bytes_per_block].
using PackedPage = std::vector<uint8_t>;

struct PackedSide {
  size_t token_block = 1;      // tokens encoded together
  size_t page_tokens = 0;      // a multiple of token_block and of kPageTokens
  size_t bytes_per_block = 0;  // the same for all heads
  size_t end = 0;              // positions [sink, end) are packed
  std::vector<std::shared_ptr<PackedPage>> pages;

  size_t bytes_per_head() const { return page_tokens / token_block * bytes_per_block; }
};

struct LayerCache {
  size_t length = 0;  // tokens appended
  // By position / 64; null = dropped because every row of it is packed.
  std::vector<std::shared_ptr<HighPrecisionPage>> pages;
  std::array<PackedSide, 2> packed;  // by Side; unused in a reference arm
  size_t serving_end = 0;            // serving windows: positions [sink, end) are out of the window
};

// Rotations prepared for the kernels, shared by a cache and its forks.
struct PreparedSide {
  bool rotated = false, centered = false;
  // [Hkv] pointers into the arm (rotation) and into `storage` (its transpose), [D, D] rows padded
  // to padded_width(D).
  std::vector<const float*> rotation, rotation_transposed;
  std::vector<float> storage;
  std::vector<PackedRowReader> readers;  // as SideArm::codecs

  const PackedRowReader& reader(size_t kv_head) const {
    return readers[readers.size() == 1 ? 0 : kv_head];
  }
};
struct PreparedLayer {
  std::array<PreparedSide, 2> sides;
};

struct KvCache::State {
  size_t num_layers = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0, group_size = 0;
  std::shared_ptr<const KvArm> arm;
  std::shared_ptr<const std::vector<PreparedLayer>> prepared;  // [num_layers], empty vector when
                                                               // not quantized
  std::vector<LayerCache> layers;
  RopePanels rope_panels;  // covers all positions where the arm centers keys by position
  bool append_as_decode = false;
  size_t tokens_int2_read = 0;  // layer 0
  EncodeStats encode;

  bool bf16() const { return arm->high_precision == HighPrecision::kBf16; }
  // Elements (words of a bf16 page) of one head and side of a page.
  size_t page_head_size() const { return kPageTokens * head_dim / (bf16() ? 2 : 1); }
  const SideArm& side_arm(size_t layer, Side side) const {
    return side == kKeySide ? arm->layers[layer].k : arm->layers[layer].v;
  }

  // Mean before RoPE of a head's keys, null without position-aware centering.
  const float* position_mean(size_t layer, size_t kv_head) const {
    return arm->quantized ? arm->layers[layer].k.position_mean_of(kv_head) : nullptr;
  }

  // Makes sure that the pages for positions [begin, end) exist and belong to this cache alone.
  void reserve_rows(LayerCache& cache, size_t begin, size_t end) const;
  // Writes stored-form rows (already centered and rotated) of positions [position, position +
  // count): keys, values [count, Hkv, D]. The pages must be reserved.
  void write_rows(LayerCache& cache, size_t position, size_t count, const float* keys,
                  const float* values) const;
  // Reads stored-form high-precision rows of one head: [count, D], out_stride floats apart.
  void read_rows(const LayerCache& cache, Side side, size_t kv_head, size_t position, size_t count,
                 float* out, size_t out_stride) const;
  // Packs positions [packed end, end) of one layer and side from their high-precision rows. end -
  // sink is a multiple of the token block.
  void pack(size_t layer, Side side, size_t end);
  // Reads dequantized stored-form rows of one head (positions within [sink, packed end)).
  void read_packed(size_t layer, Side side, size_t kv_head, size_t position, size_t count,
                   float* out, size_t out_stride) const;
  // The same rows as columns [column, column + count) of panel [D, 64]. Single-token codecs whose
  // reader has_panel().
  void read_packed_panel(size_t layer, Side side, size_t kv_head, size_t position, size_t count,
                         float* panel, size_t column) const;
  // Frees high-precision pages whose rows are all packed on both sides.
  void drop_packed_pages(LayerCache& cache) const;
};

}  // namespace oscar
