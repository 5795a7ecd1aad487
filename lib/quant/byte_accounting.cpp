#include "quant/byte_accounting.h"

#include <algorithm>

#include "base/error.h"

namespace oscar {
namespace {

double elements_per_token(const CacheFormat& format) {
  OSCAR_CHECK(format.k_head_dim > 0 && format.v_head_dim > 0,
              "byte accounting: head dims must be positive, got ", format.k_head_dim, " and ",
              format.v_head_dim);
  return static_cast<double>(format.k_head_dim + format.v_head_dim);
}

double high_bits_per_token(const CacheFormat& format) {
  return static_cast<double>(format.high_bits) * elements_per_token(format);
}

double quantized_bits_per_token(const CacheFormat& format) {
  return format.k_int_bits * format.k_head_dim + format.v_int_bits * format.v_head_dim;
}

size_t round_up(size_t count, size_t page) {
  OSCAR_CHECK(page > 0, "byte accounting: the page must hold at least one token");
  return (count + page - 1) / page * page;
}

}  // namespace

CacheFormat cache_format(const CodecSpec& k, const CodecSpec& v, size_t sink, size_t recent) {
  CacheFormat format;
  format.k_head_dim = k.head_dim;
  format.v_head_dim = v.head_dim;
  format.k_int_bits = nominal_bits(k);
  format.v_int_bits = nominal_bits(v);
  format.sink = sink;
  format.recent = recent;
  return format;
}

TokenSplit split_tokens(const CacheFormat& format, size_t num_tokens) {
  const size_t sink = std::min(format.sink, num_tokens);
  TokenSplit split;
  split.high = sink + std::min(format.recent, num_tokens - sink);
  split.quantized = num_tokens - split.high;
  return split;
}

double nominal_bits_per_element(const CacheFormat& format, size_t num_tokens) {
  OSCAR_CHECK(num_tokens > 0, "byte accounting: a cache without tokens has no bits per element");
  const TokenSplit split = split_tokens(format, num_tokens);
  const double bits = static_cast<double>(split.high) * high_bits_per_token(format) +
                      static_cast<double>(split.quantized) * quantized_bits_per_token(format);
  return bits / (static_cast<double>(num_tokens) * elements_per_token(format));
}

double occupied_bits_per_element(const CacheFormat& format, size_t num_tokens, size_t recent_held,
                                 size_t page) {
  OSCAR_CHECK(num_tokens > 0, "byte accounting: a cache without tokens has no bits per element");
  const size_t sink = std::min(format.sink, num_tokens);
  OSCAR_CHECK(recent_held <= num_tokens - sink && recent_held < format.recent + page,
              "byte accounting: the recent window holds at most ", format.recent + page - 1,
              " tokens of the ", num_tokens - sink, " past the sink, got ", recent_held);
  const size_t quantized = round_up(num_tokens - sink - recent_held, page);
  const double bits = static_cast<double>(sink + recent_held) * high_bits_per_token(format) +
                      static_cast<double>(quantized) * quantized_bits_per_token(format);
  return bits / (static_cast<double>(num_tokens) * elements_per_token(format));
}

double reserved_bytes_per_head(const CacheFormat& format, size_t max_tokens, size_t page) {
  const size_t past_sink = max_tokens - std::min(format.sink, max_tokens);
  const size_t ring = format.recent + page - 1;
  const double bits =
      static_cast<double>(format.sink + ring) * high_bits_per_token(format) +
      static_cast<double>(round_up(past_sink, page)) * quantized_bits_per_token(format);
  return bits / 8.0;
}

double bytes_per_token(double bits_per_element, const CacheFormat& format, size_t num_kv_heads,
                       size_t num_layers, size_t tensor_parallel) {
  OSCAR_CHECK(tensor_parallel > 0 && num_kv_heads > 0,
              "byte accounting: tensor_parallel and num_kv_heads must be positive, got ",
              tensor_parallel, " and ", num_kv_heads);
  OSCAR_CHECK(num_kv_heads % tensor_parallel == 0 || tensor_parallel % num_kv_heads == 0,
              "byte accounting: ", num_kv_heads, " KV heads cannot be spread over ",
              tensor_parallel, " devices");
  const size_t heads_per_device = std::max<size_t>(1, num_kv_heads / tensor_parallel);
  return bits_per_element * elements_per_token(format) * static_cast<double>(heads_per_device) *
         static_cast<double>(num_layers) / 8.0;
}

double slot_bits_per_element(size_t slot_bytes, int k_head_dim, int v_head_dim) {
  OSCAR_CHECK(k_head_dim > 0 && v_head_dim > 0, "byte accounting: head dims must be positive, got ",
              k_head_dim, " and ", v_head_dim);
  return 8.0 * static_cast<double>(slot_bytes) / static_cast<double>(k_head_dim + v_head_dim);
}

double slot_compression(size_t slot_bytes, size_t high_slot_bytes, size_t num_layers,
                        size_t high_layers) {
  OSCAR_CHECK(high_layers <= num_layers && num_layers > 0, "byte accounting: ", high_layers,
              " high-precision layers of ", num_layers);
  const double held = static_cast<double>(high_layers * high_slot_bytes) +
                      static_cast<double>((num_layers - high_layers) * slot_bytes);
  return static_cast<double>(num_layers * high_slot_bytes) / held;
}

size_t rotation_bytes(int head_dim, size_t rotations, size_t means) {
  const auto size = static_cast<size_t>(head_dim);
  return sizeof(float) * (rotations * size * size + means * size);
}

}  // namespace oscar
