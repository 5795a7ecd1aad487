// Writes rows of new keys and values into INT2 pages in one pass: centre, clip, quantize, pack,
// place. Prefill of thousands of tokens and flushes of a few tokens of many sequences and layers
// are the same launch: a list of jobs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/mixed_cache.h"

namespace oscar {

// One side (keys or values) of one layer.
struct WriteSide {
  const float* mean = nullptr;  // device, [num_kv_heads, D], may be null: subtracted from the rows
  int32_t clip_index = -1;  // rows are clamped to the order statistic clip_index of |row| sorted
                            // ascending (quant/clip.h gives it from the ratio); -1 = off
  int32_t reserved = 0;
};

// Consecutive tokens of one sequence and layer. Device POD. Two jobs of a launch must not touch the
// same record.
struct WriteJob {
  const void* k;  // device, [num_tokens, num_kv_heads, D], rotated rows; aligned to 16 bytes
  const void* v;
  void* pages;                // INT2 pool of the layer: [num_pages][num_kv_heads][4 records]
  const int32_t* page_table;  // of the sequence: page of history tokens [64 j, 64 j + 64)
  int32_t first_token;        // index in the history of the job's first token
  int32_t num_tokens;
  int32_t side_pair;   // keys use sides[2 side_pair], values sides[2 side_pair + 1]
  int32_t first_tile;  // records touched by the jobs before this one
};
static_assert(sizeof(WriteJob) == 48);

// What the kernel met; sums over launches, the caller zeroes it. Device POD.
struct WriteCounters {
  unsigned long long constant_rows;  // range 0 or below fp16: stored as scale 1, codes 0
  unsigned long long refused_rows;   // not finite, or beyond fp16: stored as zeros
};

struct WriteParams {
  int num_kv_heads = 0, head_dim = 0;
  ElementType input_type = ElementType::kBf16;
  int64_t token_stride = 0, head_stride = 0;  // elements, of k and v; multiples of 8
  const WriteJob* jobs = nullptr;             // device, [num_jobs], ascending first_tile
  int num_jobs = 0;
  int num_tiles = 0;                  // sum of write_tiles() over the jobs
  const WriteSide* sides = nullptr;   // device, [2 * pairs]
  WriteCounters* counters = nullptr;  // device, must not be null: refused rows must be looked at
};

// Records that tokens [first_token, first_token + num_tokens) touch.
constexpr int write_tiles(int first_token, int num_tokens) {
  return (first_token + num_tokens + kRecordTokens - 1) / kRecordTokens -
         first_token / kRecordTokens;
}

// Encoder `rtn` with metadata kScaleMinFp16 (quant/codec.h): scale = (max - min) / 3 of the clipped
// row, code = round half up of (x - min) / scale, stored as fp16 (scale, min). Codes differ from
// the CPU's only where (x - min) / scale lies within a few units in the last place of a threshold
// (the kernel multiplies by the reciprocal). Other tokens of a touched record keep their bits.
// stream: a cudaStream_t. Throws Error on an unsupported shape or a null or misaligned pointer.
void write_int2_rtn(const WriteParams& params, void* stream);

}  // namespace oscar
