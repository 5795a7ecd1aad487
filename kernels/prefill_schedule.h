// Tiles of prefill attention: which query rows a thread block takes and which blocks of 64 keys
// they see, longest first. Pure host code, tested without a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/mixed_cache.h"

namespace oscar {

inline constexpr int kPrefillBlockKeys = 64;

// A tile of query rows of one (sequence, KV head). Row = new token * group + head of the group.
// Device POD.
struct PrefillWork {
  SequenceLengths lengths;  // of the sequence's cache when the chunk starts
  int32_t seq, kv_head;
  int32_t first_row, num_rows;
  int32_t new_begin;               // index of the sequence's first new token in q, k, v and out
  int32_t block_begin, block_end;  // of the key blocks below
  int32_t new_tokens;              // new tokens that the tile's last row sees
};
static_assert(sizeof(PrefillWork) == 48);

// Blocks of up to 64 keys of a sequence, in order of position: the sink's, the history's (one INT2
// page each), the recent ring's, the new tokens'.
enum class PrefillSource : uint8_t { kSink, kHistory, kRecent, kNew };
struct PrefillBlock {
  PrefillSource source;
  int32_t first;     // index of the block's first token in its source, a multiple of 64
  int32_t count;     // tokens, 1..64
  int32_t position;  // of the first token in the sequence
};
OSCAR_HOST_DEVICE constexpr int prefill_blocks_of(int tokens) { return (tokens + 63) / 64; }
OSCAR_HOST_DEVICE constexpr int prefill_num_blocks(const SequenceLengths& n, int new_tokens) {
  return prefill_blocks_of(n.sink) + prefill_blocks_of(n.history) + prefill_blocks_of(n.recent) +
         prefill_blocks_of(new_tokens);
}
OSCAR_HOST_DEVICE constexpr PrefillBlock prefill_block(const SequenceLengths& n, int new_tokens,
                                                       int block) {
  const int32_t tokens[4] = {n.sink, n.history, n.recent, new_tokens};
  int32_t position = 0;
  for (int s = 0; s < 4; ++s) {
    const int blocks = prefill_blocks_of(tokens[s]);
    if (block < blocks || s == 3) {
      const int32_t first = 64 * block, rest = tokens[s] - first;
      return {static_cast<PrefillSource>(s), first, rest < 64 ? rest : 64, position + first};
    }
    block -= blocks;
    position += tokens[s];
  }
  return {};
}
// The block after `block`, which must not be the last.
OSCAR_HOST_DEVICE constexpr PrefillBlock next_block(const SequenceLengths& n, int new_tokens,
                                                    const PrefillBlock& block) {
  PrefillBlock next{block.source, block.first + 64, 0, block.position + block.count};
  int tokens = 0;
  for (;;) {
    tokens = next.source == PrefillSource::kSink      ? n.sink
             : next.source == PrefillSource::kHistory ? n.history
             : next.source == PrefillSource::kRecent  ? n.recent
                                                      : new_tokens;
    if (next.first < tokens || next.source == PrefillSource::kNew) break;
    next.source = static_cast<PrefillSource>(static_cast<uint8_t>(next.source) + 1);
    next.first = 0;
  }
  const int rest = tokens - next.first;
  next.count = rest < 64 ? rest : 64;
  return next;
}

struct PrefillProblem {
  std::vector<SequenceLengths> lengths;  // [batch]: caches at the start of the chunk
  std::vector<int> new_tokens;           // [batch], at least 1 each
  int num_kv_heads = 0;
  int group = 0;           // query heads per KV head, 1..16
  int sliding_window = 0;  // visible keys, the query's own included; 0 = unlimited
  int rows_per_tile = 0;   // attend_prefill_rows_per_tile()
};

// Throws Error on an impossible problem (no sequences, no new tokens, unsupported group).
std::vector<PrefillWork> make_prefill_schedule(const PrefillProblem& problem);

}  // namespace oscar
