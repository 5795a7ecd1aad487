// Attention of a chunk of new tokens over themselves (causal) and over a paged mixed cache (BF16
// sink, INT2 history, BF16 recent), several sequences of different lengths in one launch.
#pragma once

#include <cstdint>

#include "kernels/mixed_cache.h"
#include "kernels/prefill_schedule.h"

namespace oscar {

// Serving windows: the cache is taken as it is when the chunk starts, for every query of the chunk.
// A query sees the sink, the recent tokens and the chunk's own keys in BF16 and the history
// dequantized; what a write kernel moves to INT2 afterwards was seen in BF16 here. lib/model's
// serving mode is this with recent = 0 (earlier chunks are all packed); its exact mode differs once
// a chunk is so long that its later queries would see cached or new tokens dequantized.
enum class PrefillPath : uint8_t {
  kAuto,      // kHopper where the device has it
  kPortable,  // mma.sync, sm_80 and later
  kHopper,    // wgmma, sm_90a
};

struct AttendPrefillParams {
  MixedCacheView cache;    // lengths may be null: the schedule carries them
  int num_q_heads = 0;     // a multiple of cache.num_kv_heads, group 1..16
  int64_t num_tokens = 0;  // new tokens of all sequences, back to back in the order of the schedule
  // Device, bf16, rotated (keys centred) as the cache is. [num_tokens, heads, D], 16-byte aligned;
  // strides in elements, multiples of 8, D contiguous.
  const uint16_t* q = nullptr;
  int64_t q_token_stride = 0, q_head_stride = 0;
  const uint16_t* k = nullptr;  // k and v: [num_tokens, num_kv_heads, D], the same strides
  const uint16_t* v = nullptr;
  int64_t kv_token_stride = 0, kv_head_stride = 0;
  // Device, [num_tokens, num_q_heads, D], in rotated value coordinates; strides as above.
  void* out = nullptr;
  ElementType out_type = ElementType::kBf16;
  int64_t out_token_stride = 0, out_head_stride = 0;
  float* lse_nats = nullptr;   // device, [num_tokens, num_q_heads], may be null
  float softmax_scale = 0.0F;  // 1 / sqrt(D) as a rule
  float softcap = 0.0F;        // scores become cap * tanh(score / cap); 0 = off
  int sliding_window = 0;      // visible keys, the query's own included; as in the schedule
  // Device copy of make_prefill_schedule's result for rows_per_tile of the same path.
  const PrefillWork* work = nullptr;
  int num_work = 0;
  PrefillPath path = PrefillPath::kAuto;
  // Reads schedule and tables back and checks every page id and length (slow, synchronises).
  bool check_tables = false;
};

// Query rows (new tokens x heads of a group) of a tile, for the current device.
int attend_prefill_rows_per_tile(PrefillPath path);

// Keys, values and probabilities enter the products as bf16 (INT2 values are rounded to bf16 once),
// sums are fp32: errors of a row are a few 1e-3 relative.
// stream: a cudaStream_t. Asynchronous; only launches, so it can be captured. Throws Error on an
// unsupported shape or device, a null or misaligned pointer, an empty schedule, or (with
// check_tables) a page id or length out of range.
void attend_prefill(const AttendPrefillParams& params, void* stream);

}  // namespace oscar
