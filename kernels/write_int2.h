// Writes rows of new keys and values into INT2 pages in one pass: rotate, centre, quantize, pack,
// place. Prefill of thousands of tokens and flushes of a few tokens of many sequences and layers
// are the same launch: a list of jobs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/mixed_cache.h"

namespace oscar {

// One side (keys or values) of one layer. Device POD.
struct WriteSide {
  // device, [num_kv_heads, D], read when WriteParams::subtract_mean: subtracted from the rows (from
  // the rotated rows, so mean * R, when they are rotated).
  const float* mean = nullptr;
  // device, pack_write_rotation() of every head, read when WriteParams::rotate.
  const void* rotation = nullptr;
  int64_t rotation_head_bytes = 0;  // between heads; 0 = one rotation for all
  // device, pack_write_metric() of every head, consecutive; read by encoder `feedback`.
  const void* metric = nullptr;
  // Rows are clamped to the order statistic clip_index of |row| sorted ascending (quant/clip.h
  // gives it from the ratio); -1 = off. Encoder `feedback`: of the start range.
  int32_t clip_index = -1;
  int32_t gain = 0;  // encoder `feedback`: 1 = unbiased gain in the metric (GainRule::kMetric)
};
static_assert(sizeof(WriteSide) == 40);

// Consecutive tokens of one sequence and layer. Device POD. Two jobs of a launch must not write the
// same token.
struct WriteJob {
  const void* k;  // device, [num_tokens, num_kv_heads, D]; aligned to 16 bytes
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
  unsigned long long gain_clamped;   // feedback: gain outside [0.8, 1.5]
};

inline constexpr int kWriteMultipliers = 5;

struct WriteParams {
  int num_kv_heads = 0, head_dim = 0;
  ElementType input_type = ElementType::kBf16;
  int64_t token_stride = 0, head_stride = 0;  // elements, of k and v; multiples of 8
  bool subtract_mean = false;                 // every side has a mean
  bool rotate = false;                        // every side has a rotation
  const WriteJob* jobs = nullptr;             // device, [num_jobs], ascending first_tile; encoder
                                              // feedback and rotate: fastest sorted by side_pair
  int num_jobs = 0;
  int num_tiles = 0;                  // sum of write_tiles() over the jobs
  const WriteSide* sides = nullptr;   // device, [2 * num_pairs]
  int num_pairs = 1;                  // side pairs, one a layer
  WriteCounters* counters = nullptr;  // device, must not be null: refused rows must be looked at
  // feedback: candidates are the start range times these (FeedbackOptions::multipliers; repeat one
  // when there are fewer).
  float multipliers[kWriteMultipliers] = {0.85F, 1.0F, 1.15F, 1.35F, 1.6F};
};

// Records that tokens [first_token, first_token + num_tokens) touch.
OSCAR_HOST_DEVICE constexpr int write_tiles(int first_token, int num_tokens) {
  return (first_token + num_tokens + kRecordTokens - 1) / kRecordTokens -
         first_token / kRecordTokens;
}

enum class WriteEncoder : uint8_t { kRtn, kFeedback };

// Bytes of one head's packed matrices; multiples of 16.
OSCAR_HOST_DEVICE constexpr int64_t write_rotation_bytes(int head_dim) {
  return int64_t{4} * head_dim * head_dim;
}
OSCAR_HOST_DEVICE constexpr int64_t write_metric_bytes(int head_dim) {
  const int64_t blocks = head_dim / 16;
  return blocks * (blocks + 1) / 2 * 1024 + blocks * 1024 + int64_t{8} * head_dim;
}
// Host: one head's rotation [D, D] (rows rotated = row * R) as tensor-core fragments of two fp16
// pieces (22 bits). The order of the columns depends on the encoder. Throws Error on an unsupported
// head_dim or entries that are not finite or above 2.
std::vector<uint8_t> pack_write_rotation(const float* rotation, int head_dim, WriteEncoder encoder);
// Host: one head's metric A = L diag(pivot) L^T (EncoderMetric::l [D, D] and pivot [D]) for encoder
// `feedback`. Throws Error on an unsupported head_dim or |entries| of 240 or more.
std::vector<uint8_t> pack_write_metric(const float* l, const float* pivot, int head_dim);

// Encoder `rtn` with metadata kScaleMinFp16 (quant/codec.h): scale = (max - min) / 3 of the clipped
// row, code = (x - min) / scale rounded, stored as fp16 (scale, min). Rotated rows are rounded to
// bf16 first, as a cache with BF16 windows holds them. Codes differ from the CPU's only where
// (x - min) / scale lies within two units in the last place of a threshold (the kernel multiplies
// by the reciprocal). Other tokens of a touched record keep their bits.
// stream: a cudaStream_t. Throws Error on an unsupported shape or a null or misaligned pointer.
void write_int2_rtn(const WriteParams& params, void* stream);

// Encoder `feedback` (Encoder::kFeedback without grid, sweeps and refits; recipes lean and light):
// start range of the clipped row, kWriteMultipliers candidates, error feedback in the side's
// metric, the cheapest candidate, gain. Rows are rounded to bf16 after centring and rotation, as
// the windows hold them. The same bytes as the CPU's but for codes whose target lies within
// rounding of a threshold, and what follows from them.
void write_int2_feedback(const WriteParams& params, void* stream);

}  // namespace oscar
