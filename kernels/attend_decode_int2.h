// One decode step of attention over a paged mixed cache (BF16 sink + INT2 history + BF16 recent) in
// one launch: split over the GPU by a host schedule, merged by the last thread block of a segment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/decode_schedule.h"
#include "kernels/mixed_cache.h"

namespace oscar {

struct AttendDecodeParams {
  MixedCacheView cache;
  int batch = 0;
  int num_query_tokens = 1;  // 1..8: the last tokens of each sequence, already in the cache
  int num_q_heads = 0;       // a multiple of cache.num_kv_heads, group 1..16
  // Device. [batch, num_query_tokens, num_q_heads, D]; strides in elements, D contiguous.
  const void* q = nullptr;
  ElementType q_type = ElementType::kBf16;
  int64_t q_seq_stride = 0, q_token_stride = 0, q_head_stride = 0;
  // Device, fp32 [1 or num_kv_heads, D, D] row-major, may be null: q' = q R (per_head picks the KV
  // head's matrix).
  const float* rotation = nullptr;
  bool rotation_per_head = false;
  // Device. [batch, num_query_tokens, num_q_heads, D] contiguous, in rotated value coordinates.
  void* out = nullptr;
  ElementType out_type = ElementType::kBf16;
  float* lse_nats = nullptr;   // device, [batch, num_query_tokens, num_q_heads], may be null
  float softmax_scale = 0.0F;  // 1 / sqrt(D) as a rule
  float softcap = 0.0F;        // scores become cap * tanh(score / cap); 0 = off
  int sliding_window = 0;      // as in the schedule; 0 = unlimited
  // Device copy of the schedule's work array.
  const DecodeWork* work = nullptr;
  int num_ctas = 0;
  int columns_per_block = 8;
  // Device, attend_decode_workspace_bytes(...) bytes, 16-byte aligned, zeroed once when allocated
  // (every launch leaves it zero); not shared by launches that may overlap.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  int num_slots = 0;  // of the schedule
  // sm_90 and later: the launch may be prepared while the previous kernel of the stream ends
  // (programmatic dependent launch); it reads nothing before that kernel's results are visible.
  bool overlap_launch = true;
  // Reads the tables back and checks every page id and length (slow, synchronises).
  bool check_tables = false;
};

// Thread blocks the kernel keeps resident on the current device.
int attend_decode_num_ctas(int head_dim, int columns_per_block);
// Enough for any schedule of num_ctas blocks, so that one workspace serves every step of a captured
// graph.
size_t attend_decode_workspace_bytes(int head_dim, int columns_per_block, int num_ctas);
// stream: a cudaStream_t (null = default). Asynchronous; only launches, so it can be captured.
// Throws Error on an unsupported shape, a null or misaligned pointer, zero lengths, or (with
// check_tables) a page id or length out of range.
void attend_decode_int2(const AttendDecodeParams& params, void* stream);

}  // namespace oscar
