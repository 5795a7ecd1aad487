// Honest sizes of a KV cache: bits per element with the windows counted, under three names that are
// never mixed: nominal (formula), occupied (what serving holds), reserved (what it must set aside).
#pragma once

#include <cstddef>

#include "quant/codec.h"

namespace oscar {

// One token of one KV head, K and V.
struct CacheFormat {
  int k_head_dim = 0;
  int v_head_dim = 0;
  double k_int_bits = 2.0;  // bits per K element of a quantized row, metadata included
  double v_int_bits = 2.0;
  int high_bits = 16;  // of a window element
  size_t sink = 64;
  size_t recent = 256;
};

// A format whose two sides are stored by these codecs' rows (nominal_bits).
CacheFormat cache_format(const CodecSpec& k, const CodecSpec& v, size_t sink, size_t recent);

// Tokens in high precision and quantized, exact windows (or one serving chunk).
struct TokenSplit {
  size_t high = 0;
  size_t quantized = 0;
};
TokenSplit split_tokens(const CacheFormat& format, size_t num_tokens);

// BPE(T) = [n_hp h (D + Dv) + n_q (K bits D + V bits Dv)] / (T (D + Dv)); num_tokens > 0.
double nominal_bits_per_element(const CacheFormat& format, size_t num_tokens);

// Serving: the recent window holds recent .. recent + page - 1 tokens (recent_held, given) and
// quantized rows come in pages. `page` is in tokens, for 16-bit windows 8.
double occupied_bits_per_element(const CacheFormat& format, size_t num_tokens, size_t recent_held,
                                 size_t page = 8);

// What a request reserves for up to `max_tokens`: sink, a ring of recent + page - 1 tokens, and
// whole pages of quantized rows for all that lies past the sink.
double reserved_bytes_per_head(const CacheFormat& format, size_t max_tokens, size_t page = 8);

// Bytes of one token with all layers and KV heads: BPE (D + Dv) Hkv layers / 8. tensor_parallel
// divides the heads and replicates them when it exceeds them.
double bytes_per_token(double bits_per_element, const CacheFormat& format, size_t num_kv_heads,
                       size_t num_layers, size_t tensor_parallel = 1);

// Slots: 8 slot_bytes / (D + Dv), padding included.
double slot_bits_per_element(size_t slot_bytes, int k_head_dim, int v_head_dim);

// Times smaller than a 16-bit cache when `high_layers` of num_layers keep slots of high_slot_bytes.
double slot_compression(size_t slot_bytes, size_t high_slot_bytes, size_t num_layers,
                        size_t high_layers);

// Bytes of rotations (and means) of one layer, counted apart from BPE: fp32 [heads, D, D] and
// [heads, D] for K and V.
size_t rotation_bytes(int head_dim, size_t rotations, size_t means);

}  // namespace oscar
