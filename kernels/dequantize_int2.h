// INT2 history pages back to rows [tokens, KV heads, D] of keys and values, as the cache holds them
// (rotated, centred).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/mixed_cache.h"

namespace oscar {

// Consecutive history tokens of one sequence and layer. Device POD.
struct DequantizeJob {
  const void* pages;          // INT2 pool of the layer: [num_pages][num_kv_heads][4 records]
  const int32_t* page_table;  // of the sequence: page of history tokens [64 j, 64 j + 64)
  void* k;                    // [num_tokens, num_kv_heads, D], 16-byte aligned; may be null
  void* v;
  int32_t first_token;  // index in the history of the job's first token
  int32_t num_tokens;
  int32_t first_tile;  // records touched by the jobs before this one
  int32_t num_pages;   // of the pool; only for check_tables
};
static_assert(sizeof(DequantizeJob) == 48);

struct DequantizeParams {
  int num_kv_heads = 0, head_dim = 0;
  ElementType output_type = ElementType::kBf16;
  int64_t token_stride = 0, head_stride = 0;  // elements, of k and v; multiples of 8
  const DequantizeJob* jobs = nullptr;        // device, [num_jobs], ascending first_tile
  int num_jobs = 0;
  int num_tiles = 0;  // sum of dequantize_tiles() over the jobs
  // Reads jobs and tables back and checks ids, lengths and pointers (slow, synchronises).
  bool check_tables = false;
};

// Records that tokens [first_token, first_token + num_tokens) touch.
constexpr int dequantize_tiles(int first_token, int num_tokens) {
  return (first_token + num_tokens + kRecordTokens - 1) / kRecordTokens -
         first_token / kRecordTokens;
}

// value = code * scale + min in fp32, rounded once to the output type: the bits of the CPU's
// record_decode_row. stream: a cudaStream_t. Throws Error on an unsupported shape, a null or
// misaligned pointer, no tokens, or (with check_tables) a page id out of range.
void dequantize_int2(const DequantizeParams& params, void* stream);

}  // namespace oscar
