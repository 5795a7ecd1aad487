#include "model/attention_tile.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace oscar {
namespace {

// Tokens of one pass: their scores, weights and outputs stay in the first-level cache.
constexpr size_t kPassTokens = 16;

// Keys of a block that a token reads dequantized: [begin, end) within the block.
struct Segment {
  uint32_t begin = 0, end = 0;
};

// How the tokens of a pass read one side of the block.
struct SideUse {
  std::array<Segment, kPassTokens> segments;
  bool any_high = false, any_dequantized = false;
};

SideUse side_use(const size_t* ends, size_t num_tokens, size_t sink, size_t block_begin,
                 const uint32_t* visible) {
  SideUse use;
  for (size_t i = 0; i < num_tokens; ++i) {
    const size_t begin = std::clamp(sink, block_begin, block_begin + kKeyBlock) - block_begin;
    const size_t end = std::clamp(ends[i], block_begin, block_begin + kKeyBlock) - block_begin;
    const size_t limit = std::min<size_t>(end, visible[i]);
    if (begin < limit) {
      use.segments[i] = {static_cast<uint32_t>(begin), static_cast<uint32_t>(limit)};
      use.any_dequantized = true;
    }
    if (visible[i] > use.segments[i].end - use.segments[i].begin) use.any_high = true;
  }
  return use;
}

struct Scratch {
  AlignedVector<float> scores, other;    // [rows of a pass, 64]
  AlignedVector<uint32_t> weight_pairs;  // [rows of a pass, 32]
  std::vector<uint32_t> row_visible;
};

Scratch& scratch(size_t rows) {
  thread_local Scratch buffers;
  if (buffers.row_visible.size() < rows) {
    buffers.scores.resize(rows * kKeyBlock);
    buffers.other.resize(rows * kKeyBlock);
    buffers.weight_pairs.resize(rows * kKeyBlock / 2);
    buffers.row_visible.resize(rows);
  }
  return buffers;
}

// scores [rows, 64] = queries * high-precision keys for rows from first_row on.
void score_high(const QueryTile& tile, const KeyBlock& block, size_t first_row, size_t rows,
                size_t columns, float* scores) {
  const AttentionKernels& kernels = attention_kernels();
  const size_t dim = tile.head_dim;
  if (block.keys_bf16 != nullptr && tile.query_pairs != nullptr) {
    pair_kernels()->gemm(rows, columns, dim / 2, tile.query_pairs + first_row * dim / 2, dim / 2,
                         block.keys_bf16, kKeyBlock, tile.pair_scale, scores, kKeyBlock, false);
    return;
  }
  const float* queries = tile.queries + first_row * tile.width;
  if (block.keys_bf16 != nullptr) {
    kernels.gemm_bf16(rows, columns, dim, queries, tile.width, block.keys_bf16, kKeyBlock, scores,
                      kKeyBlock, false);
  } else {
    kernels.gemm(rows, columns, dim, queries, tile.width, block.keys_high, kKeyBlock, scores,
                 kKeyBlock, false);
  }
}

// out += weights * high-precision values.
void accumulate_high(const QueryTile& tile, const KeyBlock& block, size_t rows, size_t num_keys,
                     Scratch& buffers, float* out) {
  const AttentionKernels& kernels = attention_kernels();
  const float* weights = buffers.scores.data();
  if (block.values_bf16 == nullptr) {
    kernels.gemm(rows, tile.width, num_keys, weights, kKeyBlock, block.values_high, tile.width, out,
                 tile.width, true);
  } else if (tile.query_pairs == nullptr) {
    // The weights of keys behind the last visible one are 0.
    kernels.gemm_bf16(rows, tile.width, num_keys + num_keys % 2, weights, kKeyBlock,
                      block.values_bf16, tile.width, out, tile.width, true);
  } else {
    const size_t keys = padded_width(num_keys);
    uint32_t* pairs = buffers.weight_pairs.data();
    pair_kernels()->round(rows, keys, weights, kKeyBlock, pairs, kKeyBlock / 2);
    pair_kernels()->gemm(rows, tile.width, keys / 2, pairs, kKeyBlock / 2, block.values_bf16,
                         tile.width, 1.0F, out, tile.width, true);
  }
}

// scores [rows, 64] = queries * keys, each row with the form of the keys that it reads.
void score(const QueryTile& tile, const KeyBlock& block, const SideUse& use, size_t first_row,
           size_t rows, size_t columns, Scratch& buffers) {
  const AttentionKernels& kernels = attention_kernels();
  float* scores = buffers.scores.data();
  if (use.any_high) score_high(tile, block, first_row, rows, columns, scores);
  if (!use.any_dequantized) return;
  float* target = use.any_high ? buffers.other.data() : scores;
  kernels.gemm(rows, columns, tile.head_dim, tile.queries + first_row * tile.width, tile.width,
               block.keys_dequantized, kKeyBlock, target, kKeyBlock, false);
  if (!use.any_high) return;
  for (size_t r = 0; r < rows; ++r) {
    const Segment segment = use.segments[r / tile.group_size];
    std::copy(target + r * kKeyBlock + segment.begin, target + r * kKeyBlock + segment.end,
              scores + r * kKeyBlock + segment.begin);
  }
}

// out += weights * values, each row with the form of the values that it reads.
void accumulate(const QueryTile& tile, const KeyBlock& block, const SideUse& use, size_t rows,
                size_t num_keys, Scratch& buffers, float* out) {
  const AttentionKernels& kernels = attention_kernels();
  float* weights = buffers.scores.data();
  float* dequantized_weights = weights;
  if (use.any_high && use.any_dequantized) {
    dequantized_weights = buffers.other.data();
    std::fill_n(dequantized_weights, rows * kKeyBlock, 0.0F);
    for (size_t r = 0; r < rows; ++r) {
      const Segment segment = use.segments[r / tile.group_size];
      float* row = weights + r * kKeyBlock;
      std::copy(row + segment.begin, row + segment.end,
                dequantized_weights + r * kKeyBlock + segment.begin);
      std::fill(row + segment.begin, row + segment.end, 0.0F);
    }
  }
  if (use.any_high) accumulate_high(tile, block, rows, num_keys, buffers, out);
  if (use.any_dequantized) {
    kernels.gemm(rows, tile.width, num_keys, dequantized_weights, kKeyBlock,
                 block.values_dequantized, tile.width, out, tile.width, true);
  }
}

}  // namespace

void SoftmaxState::reset(size_t rows, size_t width) {
  max_score.assign(rows, -std::numeric_limits<float>::infinity());
  sum.assign(rows, 0.0F);
  out.assign(rows * width, 0.0F);
}

void attend_block(const QueryTile& tile, const KeyBlock& block, SoftmaxState& state) {
  const size_t block_begin = block.index * kKeyBlock;
  Scratch& buffers = scratch(kPassTokens * tile.group_size);
  for (size_t first = 0; first < tile.num_tokens; first += kPassTokens) {
    const size_t count = std::min(kPassTokens, tile.num_tokens - first);
    const size_t last_position = tile.first_position + first + count - 1;
    if (last_position < block_begin) continue;
    std::array<uint32_t, kPassTokens> visible{};
    for (size_t i = 0; i < count; ++i) {
      const size_t seen = tile.first_position + first + i + 1;
      visible[i] = static_cast<uint32_t>(std::clamp(seen, block_begin, block_begin + kKeyBlock) -
                                         block_begin);
      std::fill_n(buffers.row_visible.begin() + static_cast<ptrdiff_t>(i * tile.group_size),
                  tile.group_size, visible[i]);
    }
    const size_t num_keys = visible[count - 1];
    const size_t rows = count * tile.group_size;
    const size_t first_row = first * tile.group_size;
    const SideUse keys =
        side_use(tile.key_end + first, count, tile.sink, block_begin, visible.data());
    const SideUse values =
        side_use(tile.value_end + first, count, tile.sink, block_begin, visible.data());
    score(tile, block, keys, first_row, rows, padded_width(num_keys), buffers);
    if (tile.position_queries != nullptr) {
      attention_kernels().gemm(rows, padded_width(num_keys), tile.position_dim,
                               tile.position_queries + first_row * tile.position_dim,
                               tile.position_dim, block.positions, kKeyBlock, buffers.scores.data(),
                               kKeyBlock, true);
    }
    float* out = state.out.data() + first_row * tile.width;
    attention_kernels().softmax({.num_rows = rows,
                                 .width = padded_width(num_keys),
                                 .scores = buffers.scores.data(),
                                 .num_visible = buffers.row_visible.data(),
                                 .max_score = state.max_score.data() + first_row,
                                 .sum = state.sum.data() + first_row,
                                 .out = out,
                                 .out_width = tile.width});
    accumulate(tile, block, values, rows, num_keys, buffers, out);
  }
}

void merge_softmax(size_t num_rows, size_t width, const SoftmaxView& range,
                   const SoftmaxView& total) {
  for (size_t r = 0; r < num_rows; ++r) {
    if (range.sum[r] == 0.0F) continue;  // no key of the range is visible
    float* out = total.out + r * width;
    const float* added = range.out + r * width;
    if (total.sum[r] == 0.0F) {
      total.max_score[r] = range.max_score[r];
      total.sum[r] = range.sum[r];
      std::copy_n(added, width, out);
      continue;
    }
    const float maximum = std::max(total.max_score[r], range.max_score[r]);
    const float keep = std::exp2(total.max_score[r] - maximum);
    const float add = std::exp2(range.max_score[r] - maximum);
    total.max_score[r] = maximum;
    total.sum[r] = total.sum[r] * keep + range.sum[r] * add;
    for (size_t d = 0; d < width; ++d) out[d] = out[d] * keep + added[d] * add;
  }
}

}  // namespace oscar
