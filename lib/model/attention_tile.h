// Attention of a tile of query rows of one KV head over blocks of 64 keys, each row and side
// reading its high-precision or its dequantized form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/aligned.h"
#include "model/attention_kernels.h"

namespace oscar {

inline constexpr size_t kNotNeeded = static_cast<size_t>(-1);

// The 64 keys at positions [64 index, 64 index + 64) of one KV head. Null = no query of the tile
// reads this form. High-precision rows come as float32 or as bf16 pairs (HighPrecisionPage).
struct KeyBlock {
  size_t index = 0;
  const float* keys_high = nullptr;         // [D, 64]
  const uint32_t* keys_bf16 = nullptr;      // [D / 2, 64]
  const float* keys_dequantized = nullptr;  // [D, 64]
  const float* positions = nullptr;       // [position_dim, 64] where keys are centered by position
  const float* values_high = nullptr;     // [64, width]
  const uint32_t* values_bf16 = nullptr;  // [32, width]
  const float* values_dequantized = nullptr;
};

// Queries of consecutive tokens; row = token * group_size + head of the group.
struct QueryTile {
  size_t first_position = 0;  // of token 0
  size_t num_tokens = 0;
  size_t group_size = 1;
  size_t head_dim = 0;
  size_t width = 0;                // padded_width(head_dim)
  const float* queries = nullptr;  // [num_tokens * group_size, width], rotated, times
                                   // D^-0.5 log2(e); null when only pairs are read
  // [num_tokens * group_size, D / 2] rotated, rounded to bf16, in pairs: bf16 rows are multiplied
  // in bf16, the weights rounded too. Null: everything in float32. Needs D == width.
  const uint32_t* query_pairs = nullptr;
  float pair_scale = 1.0F;  // D^-0.5 log2(e)
  // Position-aware centering: [num_tokens * group_size, position_dim], added to the scores times
  // KeyBlock::positions; null = none.
  const float* position_queries = nullptr;
  size_t position_dim = 0;
  size_t sink = 0;                    // keys below are always high precision
  const size_t* key_end = nullptr;    // [num_tokens] keys sink <= j < key_end[i] are dequantized
  const size_t* value_end = nullptr;  // [num_tokens] the same for values

  size_t num_rows() const { return num_tokens * group_size; }
};

// Running softmax state of the rows of a tile.
struct SoftmaxState {
  std::vector<float> max_score, sum;  // [rows]; base-2 scores
  AlignedVector<float> out;           // [rows, width], not divided by sum

  void reset(size_t rows, size_t width);
};

// One step of the online softmax over one block of keys.
void attend_block(const QueryTile& tile, const KeyBlock& block, SoftmaxState& state);

// Adds a later range of keys: `range` [rows] into `total` [rows]. The same order of ranges gives
// the same bits.
struct SoftmaxView {
  float* max_score = nullptr;
  float* sum = nullptr;
  float* out = nullptr;
};
void merge_softmax(size_t num_rows, size_t width, const SoftmaxView& range,
                   const SoftmaxView& total);

}  // namespace oscar
