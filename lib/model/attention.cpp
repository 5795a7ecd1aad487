#include "model/attention.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "model/attention_tile.h"
#include "model/kernel_scope.h"
#include "model/kv_append.h"
#include "model/rotate.h"

namespace oscar {
namespace {

// Keys of one partial softmax. Every path cuts the keys at the same positions, so prefill and
// decode agree bit for bit.
constexpr size_t kSegmentBlocks = 8;
// Tokens of one query tile; tiles start at multiples of it.
constexpr size_t kTileTokens = 64;
// Up to this many new tokens the work is split over ranges of keys instead of query tiles, and
// blocks of keys are expanded where they are used.
constexpr size_t kMaxSplitTokens = 32;
// Memory for expanded keys and values of a prefill; KV heads are taken in groups that fit.
constexpr size_t kMaxExpandedFloats = size_t{64} << 20;

// Arguments of one call, shared by the work items.
struct Call {
  const KvCache::State& state;
  size_t layer;
  const WindowPlan& plan;
  size_t first_position;
  const float* q;
  float* o;
  float* lse;                // may be null
  const PairKernels* pairs;  // null: everything in float32

  size_t width() const { return padded_width(state.head_dim); }
  // Around the products of a work item.
  KernelScope product_scope() const {
    return pairs == nullptr ? KernelScope(nullptr, nullptr)
                            : KernelScope(pairs->start, pairs->stop);
  }
  float score_scale() const {
    return static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(state.head_dim)));
  }
};

// bf16 products for rows that are held in bf16, where the processor has them.
const PairKernels* choose_pairs(const KvCache::State& state, Compute compute) {
  const bool whole = state.head_dim % kColumnMultiple == 0;
  return compute == Compute::kBf16 && state.bf16() && whole ? pair_kernels() : nullptr;
}

// Queries of a tile of rows as the blocks are multiplied with them (QueryTile).
struct Queries {
  AlignedBuffer<float> scaled;
  AlignedBuffer<uint32_t> pairs;
  std::vector<float> positions;
};

// out[i] = x[i] * factor.
void scale(const float* x, size_t count, float factor, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = x[i] * factor;
}

// The part of the scores that position-aware centering puts back (QueryTile::position_queries);
// left empty where keys are not centered so.
void load_position_queries(const Call& call, size_t head, size_t begin, size_t count,
                           std::vector<float>& out) {
  const KvCache::State& state = call.state;
  out.clear();
  const float* mean = state.position_mean(call.layer, head);
  if (mean == nullptr) return;
  const size_t rotary_dim = state.arm->rope.rotary_dim, group = state.group_size;
  out.resize(count * group * rotary_dim);
  for (size_t r = 0; r < count * group; ++r) {
    const float* query =
        call.q +
        ((begin + r / group) * state.num_heads + head * group + r % group) * state.head_dim;
    position_query(query, mean, rotary_dim, call.score_scale(), out.data() + r * rotary_dim);
  }
}

// Queries of tokens [begin, begin + count) of the call for one KV head, rotated: scaled [count *
// group, width], or pairs [count * group, D / 2], or both where packed rows are read besides.
void load_queries(const Call& call, size_t head, size_t begin, size_t count, Queries& out) {
  const KvCache::State& state = call.state;
  const size_t dim = state.head_dim, width = call.width(), group = state.group_size;
  const size_t rows = count * group;
  load_position_queries(call, head, begin, count, out.positions);
  const auto source = [&](size_t i) {
    return call.q + ((begin + i) * state.num_heads + head * group) * dim;
  };
  if (call.pairs != nullptr && !state.arm->quantized) {
    uint32_t* pairs = out.pairs.get(rows * dim / 2);
    for (size_t i = 0; i < count; ++i)
      call.pairs->round(group, dim, source(i), dim, pairs + i * group * dim / 2, dim / 2);
    return;
  }
  const float* rotation = nullptr;
  if (state.arm->quantized) {
    const PreparedSide& prepared = (*state.prepared)[call.layer].sides[kKeySide];
    if (prepared.rotated) rotation = prepared.rotation[head];
  }
  thread_local AlignedBuffer<float> gathered;
  float* rows_of_head = gathered.get(rows * dim);
  // Pairs are scaled after the product, so that queries which are bf16 already lose nothing.
  const float before = call.pairs == nullptr ? call.score_scale() : 1.0F;
  for (size_t i = 0; i < count; ++i)
    scale(source(i), group * dim, before, rows_of_head + i * group * dim);
  float* rotated = out.scaled.get(rows * width);
  rotate_rows(rows_of_head, dim, rows, dim, nullptr, rotation, rotated);
  if (call.pairs == nullptr) return;
  call.pairs->round(rows, dim, rotated, width, out.pairs.get(rows * dim / 2), dim / 2);
  scale(rotated, rows * width, call.score_scale(), rotated);
}

// Divides by the softmax sums, returns to the model's coordinates and writes o and lse.
void store_outputs(const Call& call, size_t head, size_t begin, size_t count,
                   const SoftmaxView& total) {
  const KvCache::State& state = call.state;
  const size_t width = call.width();
  const size_t rows = count * state.group_size;
  const float* rotation = nullptr;
  const float* value_mean = nullptr;
  const float* key_mean = nullptr;
  if (state.arm->quantized) {
    const PreparedSide& prepared = (*state.prepared)[call.layer].sides[kValueSide];
    value_mean = state.side_arm(call.layer, kValueSide).mean_of(head);
    key_mean = state.side_arm(call.layer, kKeySide).mean_of(head);
    if (prepared.rotated) rotation = prepared.rotation_transposed[head];
  }
  const auto query_of = [&](size_t r) {
    return (begin + r / state.group_size) * state.num_heads + head * state.group_size +
           r % state.group_size;
  };
  thread_local AlignedBuffer<float> unrotated;
  if (rotation != nullptr) {
    for (size_t r = 0; r < rows; ++r)
      scale(total.out + r * width, width, 1.0F / total.sum[r], total.out + r * width);
    rotate_rows(total.out, width, rows, state.head_dim, nullptr, rotation,
                unrotated.get(rows * width));
  }
  for (size_t r = 0; r < rows; ++r) {
    float* out = call.o + query_of(r) * state.head_dim;
    if (rotation != nullptr) {
      std::copy_n(unrotated.data() + r * width, state.head_dim, out);
    } else {
      scale(total.out + r * width, state.head_dim, 1.0F / total.sum[r], out);
    }
    for (size_t d = 0; value_mean != nullptr && d < state.head_dim; ++d) out[d] += value_mean[d];
  }
  if (call.lse == nullptr) return;
  const double score_scale = 1.0 / std::sqrt(static_cast<double>(state.head_dim));
  for (size_t r = 0; r < rows; ++r) {
    const size_t query = query_of(r);
    // Scores over centered keys lack the constant q . mean.
    double constant = 0.0;
    for (size_t d = 0; key_mean != nullptr && d < state.head_dim; ++d) {
      constant += static_cast<double>(call.q[query * state.head_dim + d]) * key_mean[d];
    }
    if (const float* mean = state.position_mean(call.layer, head); mean != nullptr) {
      constant += unrotated_product(call.q + query * state.head_dim, mean,
                                    state.arm->rope.rotary_dim, state.head_dim);
    }
    call.lse[query] = static_cast<float>(
        (total.max_score[r] + std::log2(static_cast<double>(total.sum[r]))) * std::numbers::ln2 +
        constant * score_scale);
  }
}

QueryTile make_tile(const Call& call, size_t begin, size_t count, Queries& queries) {
  return {.first_position = call.first_position + begin,
          .num_tokens = count,
          .group_size = call.state.group_size,
          .head_dim = call.state.head_dim,
          .width = call.width(),
          .queries = queries.scaled.data(),
          .query_pairs = call.pairs == nullptr ? nullptr : queries.pairs.data(),
          .pair_scale = call.score_scale(),
          .position_queries = queries.positions.empty() ? nullptr : queries.positions.data(),
          .position_dim = call.state.arm->rope.rotary_dim,
          .sink = call.state.arm->windows.sink,
          .key_end = call.plan.ends[kKeySide].data() + begin,
          .value_end = call.plan.ends[kValueSide].data() + begin};
}

SoftmaxView view(SoftmaxState& state) {
  return {state.max_score.data(), state.sum.data(), state.out.data()};
}

// Work of one item a KV head that is too small for a few tokens to be worth waking the pool.
void for_each_head(const Call& call, size_t num_tokens, const std::function<void(size_t)>& body) {
  constexpr size_t kSerialTokens = 2;
  if (num_tokens > kSerialTokens) return parallel_for(call.state.num_kv_heads, body);
  for (size_t head = 0; head < call.state.num_kv_heads; ++head) body(head);
}

// Few new tokens: work items are (KV head, segment of keys), merged in the order of the segments.
void attend_split(const Call& call, size_t num_tokens) {
  const KvCache::State& state = call.state;
  const size_t width = call.width();
  const size_t rows = num_tokens * state.group_size;
  const BlockReader reader(state, call.layer, call.plan, call.first_position + num_tokens);
  const size_t num_segments = (reader.num_blocks() + kSegmentBlocks - 1) / kSegmentBlocks;
  std::vector<Queries> queries(state.num_kv_heads);
  std::vector<SoftmaxState> partial(state.num_kv_heads * num_segments);
  for_each_head(call, num_tokens,
                [&](size_t head) { load_queries(call, head, 0, num_tokens, queries[head]); });
  parallel_for(partial.size(), [&](size_t item) {
    const size_t head = item / num_segments;
    const size_t segment = item % num_segments;
    const QueryTile tile = make_tile(call, 0, num_tokens, queries[head]);
    partial[item].reset(rows, width);
    thread_local AlignedBuffer<float> storage;
    const KernelScope scope = call.product_scope();
    const size_t end = std::min(reader.num_blocks(), (segment + 1) * kSegmentBlocks);
    for (size_t block = segment * kSegmentBlocks; block < end; ++block) {
      attend_block(tile, reader.read(head, block, storage), partial[item]);
    }
  });
  for_each_head(call, num_tokens, [&](size_t head) {
    SoftmaxState* const total = &partial[head * num_segments];
    for (size_t segment = 1; segment < num_segments; ++segment) {
      merge_softmax(rows, width, view(partial[head * num_segments + segment]), view(*total));
    }
    store_outputs(call, head, 0, num_tokens, view(*total));
  });
}

// One query tile over all of its keys.
void attend_tile(const Call& call, const ExpandedBlocks& blocks, size_t head, size_t begin,
                 size_t count) {
  const size_t width = call.width();
  const size_t rows = count * call.state.group_size;
  thread_local Queries queries;
  thread_local SoftmaxState segment;
  thread_local SoftmaxState total;
  load_queries(call, head, begin, count, queries);
  const QueryTile tile = make_tile(call, begin, count, queries);
  total.reset(rows, width);
  const KernelScope scope = call.product_scope();
  const size_t end_block = (call.first_position + begin + count - 1) / kKeyBlock + 1;
  for (size_t block = 0; block < end_block; block += kSegmentBlocks) {
    segment.reset(rows, width);
    for (size_t b = block; b < std::min(end_block, block + kSegmentBlocks); ++b) {
      attend_block(tile, blocks.view(head, b), segment);
    }
    merge_softmax(rows, width, view(segment), view(total));
  }
  store_outputs(call, head, begin, count, view(total));
}

// Many new tokens: keys and values are expanded once, work items are (KV head, query tile), the
// longest first.
void attend_tiles(const Call& call, size_t num_tokens) {
  const KvCache::State& state = call.state;
  const BlockReader reader(state, call.layer, call.plan, call.first_position + num_tokens);
  const size_t heads_at_once =
      std::clamp(kMaxExpandedFloats / std::max<size_t>(1, reader.floats_per_head()), size_t{1},
                 state.num_kv_heads);
  const size_t first_tile = call.first_position / kTileTokens;
  const size_t num_tiles = (call.first_position + num_tokens - 1) / kTileTokens - first_tile + 1;
  for (size_t first = 0; first < state.num_kv_heads; first += heads_at_once) {
    const size_t heads = std::min(heads_at_once, state.num_kv_heads - first);
    const ExpandedBlocks blocks(reader, first, heads);
    parallel_for(heads * num_tiles, [&](size_t item) {
      const size_t tile = first_tile + num_tiles - 1 - item / heads;
      const size_t begin = std::max(call.first_position, tile * kTileTokens);
      const size_t end = std::min(call.first_position + num_tokens, (tile + 1) * kTileTokens);
      attend_tile(call, blocks, first + item % heads, begin - call.first_position, end - begin);
    });
  }
}

}  // namespace

void append_and_attend(KvCache& cache, size_t layer, size_t num_tokens, const float* q,
                       const float* k, const float* v, float* o, float* lse, Compute compute) {
  if (num_tokens == 0) return;
  KvCache::State& state = cache.state();
  const WindowPlan plan = begin_append(state, layer, num_tokens, k, v);
  const Call call{.state = state,
                  .layer = layer,
                  .plan = plan,
                  .first_position = state.layers[layer].length - num_tokens,
                  .q = q,
                  .o = o,
                  .lse = lse,
                  .pairs = choose_pairs(state, compute)};
  if (num_tokens <= kMaxSplitTokens) {
    attend_split(call, num_tokens);
  } else {
    attend_tiles(call, num_tokens);
  }
  end_append(state, layer, plan);
  if (layer == 0) {
    for (const size_t end : plan.ends[kKeySide]) {
      state.tokens_int2_read += end - state.arm->windows.sink;
    }
  }
}

KvCache quantize_after_prefill(const KvCache& reference, const ModelConfig& config,
                               std::shared_ptr<const KvArm> arm) {
  const KvCache::State& source = reference.state();
  OSCAR_CHECK(!source.arm->quantized, "after-prefill needs the cache of a reference arm, got ",
              source.arm->name);
  KvCache cache(config, std::move(arm));
  const size_t row = source.num_kv_heads * source.head_dim;
  for (size_t layer = 0; layer < source.num_layers; ++layer) {
    const LayerCache& rows = source.layers[layer];
    if (rows.length == 0) continue;
    std::vector<float> k(rows.length * row);
    std::vector<float> v(rows.length * row);
    for (size_t head = 0; head < source.num_kv_heads; ++head) {
      const size_t offset = head * source.head_dim;
      source.read_rows(rows, kKeySide, head, 0, rows.length, k.data() + offset, row);
      source.read_rows(rows, kValueSide, head, 0, rows.length, v.data() + offset, row);
    }
    end_append(cache.state(), layer,
               begin_append(cache.state(), layer, rows.length, k.data(), v.data()));
  }
  return cache;
}

}  // namespace oscar
