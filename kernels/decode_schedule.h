// Split-KV schedule of one decode step: cuts (sequence, KV head) pairs over the thread blocks so
// that all of them read the same number of bytes. Pure host code, tested without a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/mixed_cache.h"

namespace oscar {

// Tokens of a chunk, the unit in which the BF16 windows are read.
inline constexpr int kDecodeChunkTokens = 8;

// A run of one (sequence, KV head, column block) given to one thread block. A column is one (query
// token, query head of the group) pair: column = query_token * group + head. Device POD: everything
// a thread block must know before its first copy, so that it waits for one load only.
struct DecodeWork {
  SequenceLengths lengths;  // of the sequence; all zero: the thread block has nothing to do
  int32_t seq, kv_head, column_begin, num_columns;
  int32_t chunk_begin, chunk_end;    // BF16 chunks: the sink's, then the ring's
  int32_t page_begin, page_end;      // INT2 pages of the history
  int32_t segment, part, num_parts;  // this is part `part` of the segment
  int32_t first_slot;                // partial result of part 0 in the workspace, -1 = not split
  int32_t next;                      // the thread block's next run in the work array, -1 = none
  int32_t reserved[3];
};
static_assert(sizeof(DecodeWork) == 80);

struct DecodeProblem {
  std::vector<SequenceLengths> lengths;  // [batch], host copy of the device array
  int num_kv_heads = 0;
  int group = 0;  // query heads per KV head, 1..16
  int num_query_tokens = 1;
  int head_dim = 0;
  int sliding_window = 0;  // visible keys, the query's own included; 0 = unlimited
  int num_ctas = 0;        // thread blocks that run at once (attend_decode_int2_num_ctas)
};

struct DecodeSchedule {
  // The first run of thread block i is work[i]; further runs follow through `next`. At most
  // num_ctas + 2 * num_segments entries.
  std::vector<DecodeWork> work;
  int num_segments = 0;
  int num_slots = 0;                   // partial results in the workspace (0: no segment is split)
  int columns_per_block = 8;           // 4, 8 or 16
  double cost_max = 0, cost_mean = 0;  // modelled load of the thread blocks, in INT2 pages
};

// Columns a thread block handles at once: half a tensor-core n-tile, a whole one (8), or two.
int decode_columns_per_block(int group, int num_query_tokens);
// Cost of a BF16 chunk in INT2 pages: the ratio of their bytes.
double bf16_chunk_cost(int head_dim);
// Throws Error on an impossible problem (empty batch or sequence, unsupported shape).
DecodeSchedule make_decode_schedule(const DecodeProblem& problem);

}  // namespace oscar
