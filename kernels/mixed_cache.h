// How the kernels see a paged mixed KV cache: BF16 sink, INT2 history, BF16 recent ring. POD, no
// CUDA headers.
//
// Token positions of a sequence: [0, sink) sink, [sink, sink + history) INT2, then `recent` tokens.
// Everything is stored rotated (and keys centred), so one rotated query serves all parts.
#pragma once

#include <cstdint>

#include "quant/int2_record.h"

namespace oscar {

enum class ElementType : uint8_t { kBf16, kFp16, kFp32 };

inline constexpr int kBf16PageTokens = 64;

// Lengths of one sequence, in tokens; read by the device. Recent token i is in ring slot
// (recent_start + i) mod capacity, capacity = 64 * number of ring pages in its table row.
struct SequenceLengths {
  int32_t sink;
  int32_t history;
  int32_t recent;
  int32_t recent_start;
};

struct MixedCacheView {
  int num_kv_heads = 0;
  int head_dim = 0;  // 64, 96, 128, 192 or 256
  // [num_int2_pages][num_kv_heads][4 records], 16-byte aligned; null only when no sequence has a
  // history.
  const void* int2_pages = nullptr;
  int num_int2_pages = 0;
  // [num_bf16_pages][num_kv_heads][64][D] each, 16-byte aligned; null only when no sequence has a
  // window.
  const uint16_t* k_bf16_pages = nullptr;
  const uint16_t* v_bf16_pages = nullptr;
  int num_bf16_pages = 0;
  // Device. [batch, int2_table_stride]: page of history tokens [64 j, 64 j + 64).
  const int32_t* int2_page_table = nullptr;
  int int2_table_stride = 0;
  // Device. [batch, bf16_table_stride]: sink_table_pages pages of the sink, then the ring's pages.
  const int32_t* bf16_page_table = nullptr;
  int bf16_table_stride = 0;
  int sink_table_pages = 0;
  // Device. [batch]
  const SequenceLengths* lengths = nullptr;
};

}  // namespace oscar
