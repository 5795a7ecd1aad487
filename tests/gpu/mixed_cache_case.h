// A random paged mixed cache on host and device, and attention over it in float64: the oracle of
// the attention kernels, fed the dequantized cache.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "base/float16.h"
#include "base/random.h"
#include "gpu/device_buffer.h"
#include "kernels/mixed_cache.h"

namespace oscar_test {

using namespace oscar;

inline size_t at(int64_t i) { return static_cast<size_t>(i); }

struct CacheShape {
  int num_kv_heads = 2, head_dim = 128;
  std::vector<SequenceLengths> lengths;
  int sink_pages = 1, ring_pages = 5;
  bool share_first_page = false;  // all sequences use the same first history page (prefix)
  float key_scale = 1.0F, value_scale = 1.0F;
  uint64_t seed = 1;
};

struct MixedCacheCase {
  CacheShape shape;
  std::vector<uint8_t> int2;
  std::vector<uint16_t> k_bf16, v_bf16;
  std::vector<int32_t> int2_table, bf16_table;
  int int2_stride = 0, bf16_stride = 0, num_int2_pages = 0, num_bf16_pages = 0;
  // Dequantized values, [seq][kv_head][token][D].
  std::vector<std::vector<float>> k, v;
  std::unique_ptr<DeviceBuffer<uint8_t>> d_int2;
  std::unique_ptr<DeviceBuffer<uint16_t>> d_k, d_v;
  std::unique_ptr<DeviceBuffer<int32_t>> d_int2_table, d_bf16_table;
  std::unique_ptr<DeviceBuffer<SequenceLengths>> d_lengths;

  int tokens(int seq) const {
    const SequenceLengths& n = shape.lengths[at(seq)];
    return n.sink + n.history + n.recent;
  }
  size_t row(int seq, int head, int token) const {
    return (at(head) * at(tokens(seq)) + at(token)) * at(shape.head_dim);
  }

  explicit MixedCacheCase(const CacheShape& s) : shape(s) {
    Random random(s.seed);
    const int batch = static_cast<int>(s.lengths.size());
    for (const SequenceLengths& n : s.lengths)
      int2_stride = std::max(int2_stride, (n.history + 63) / 64);
    bf16_stride = s.sink_pages + s.ring_pages;
    num_int2_pages = batch * int2_stride + 2;
    num_bf16_pages = batch * bf16_stride + 1;
    int2_table = permuted(num_int2_pages, batch * int2_stride, random);
    bf16_table = permuted(num_bf16_pages, batch * bf16_stride, random);
    if (s.share_first_page && int2_stride > 0) {
      for (int b = 1; b < batch; ++b) int2_table[at(b * int2_stride)] = int2_table[0];
    }
    // Whatever is not part of a sequence is NaN: reading it shows.
    int2.assign(at(num_int2_pages) * at(s.num_kv_heads) * at(record_page_bytes(s.head_dim)), 0xFF);
    const size_t bf16_size = at(num_bf16_pages) * at(s.num_kv_heads) * 64 * at(s.head_dim);
    k_bf16.assign(bf16_size, 0xFFFF);
    v_bf16.assign(bf16_size, 0xFFFF);
    k.resize(at(batch));
    v.resize(at(batch));
    for (int b = 0; b < batch; ++b) {
      k[at(b)].resize(at(s.num_kv_heads) * at(tokens(b)) * at(s.head_dim));
      v[at(b)].resize(k[at(b)].size());
      for (int h = 0; h < s.num_kv_heads; ++h) {
        for (int token = 0; token < tokens(b); ++token) fill_token(b, h, token, random);
      }
    }
    d_int2 = std::make_unique<DeviceBuffer<uint8_t>>(int2);
    d_k = std::make_unique<DeviceBuffer<uint16_t>>(k_bf16);
    d_v = std::make_unique<DeviceBuffer<uint16_t>>(v_bf16);
    d_int2_table = std::make_unique<DeviceBuffer<int32_t>>(int2_table);
    d_bf16_table = std::make_unique<DeviceBuffer<int32_t>>(bf16_table);
    d_lengths = std::make_unique<DeviceBuffer<SequenceLengths>>(s.lengths);
  }

  MixedCacheView view() const {
    MixedCacheView cache;
    cache.num_kv_heads = shape.num_kv_heads;
    cache.head_dim = shape.head_dim;
    cache.int2_pages = d_int2->get();
    cache.num_int2_pages = num_int2_pages;
    cache.k_bf16_pages = d_k->get();
    cache.v_bf16_pages = d_v->get();
    cache.num_bf16_pages = num_bf16_pages;
    cache.int2_page_table = d_int2_table->get();
    cache.int2_table_stride = int2_stride;
    cache.bf16_page_table = d_bf16_table->get();
    cache.bf16_table_stride = bf16_stride;
    cache.sink_table_pages = shape.sink_pages;
    cache.lengths = d_lengths->get();
    return cache;
  }

  // Attention of one query row at position `position`, in float64; returns the natural log-sum-exp.
  double attend(const std::vector<double>& q, int seq, int head, int position, double scale,
                double softcap, int window, std::vector<double>& out) const {
    const int first = window > 0 ? std::max(0, position - window + 1) : 0;
    const auto dim = at(shape.head_dim);
    std::vector<double> scores;
    double high = -INFINITY;
    for (int token = first; token <= position; ++token) {
      const float* key = k[at(seq)].data() + row(seq, head, token);
      double dot = 0;
      for (size_t d = 0; d < dim; ++d) dot += q[d] * static_cast<double>(key[d]);
      dot *= scale;
      if (softcap > 0) dot = softcap * std::tanh(dot / softcap);
      scores.push_back(dot);
      high = std::max(high, dot);
    }
    out.assign(dim, 0.0);
    double sum = 0;
    for (int token = first; token <= position; ++token) {
      const double p = std::exp(scores[at(token - first)] - high);
      const float* value = v[at(seq)].data() + row(seq, head, token);
      sum += p;
      for (size_t d = 0; d < dim; ++d) out[d] += p * static_cast<double>(value[d]);
    }
    for (double& x : out) x /= sum;
    return high + std::log(sum);
  }

 private:
  static std::vector<int32_t> permuted(int pages, int count, Random& random) {
    std::vector<int32_t> ids;
    for (int i = 0; i < pages; ++i) ids.push_back(i);
    random.shuffle(ids);
    ids.resize(at(count));
    return ids;
  }
  void fill_token(int b, int h, int token, Random& random) {
    const SequenceLengths& n = shape.lengths[at(b)];
    float* key = k[at(b)].data() + row(b, h, token);
    float* value = v[at(b)].data() + row(b, h, token);
    const int dim = shape.head_dim;
    if (token >= n.sink && token < n.sink + n.history) {
      const int i = token - n.sink;
      const int page = int2_table[at(b * int2_stride + i / 64)];
      uint8_t* record = int2.data() +
                        (at(page) * at(shape.num_kv_heads) + at(h)) * at(record_page_bytes(dim)) +
                        at(i % 64 / 16) * at(record_bytes(dim));
      const bool shared_row = shape.share_first_page && b > 0 && i < 64;
      if (!shared_row) {
        write_random(record, KvSide::kKey, i % 16, shape.key_scale, random);
        write_random(record, KvSide::kValue, i % 16, shape.value_scale, random);
      }
      record_decode_row(record, dim, KvSide::kKey, i % 16, key);
      record_decode_row(record, dim, KvSide::kValue, i % 16, value);
      return;
    }
    int entry = token / 64, slot = token;
    if (token >= n.sink) {
      slot = (token - n.sink - n.history + n.recent_start) % (64 * shape.ring_pages);
      entry = shape.sink_pages + slot / 64;
    }
    const size_t offset =
        ((at(bf16_table[at(b * bf16_stride + entry)]) * at(shape.num_kv_heads) + at(h)) * 64 +
         at(slot % 64)) *
        at(dim);
    for (size_t d = 0; d < at(dim); ++d) {
      k_bf16[offset + d] = float_to_bf16(shape.key_scale * static_cast<float>(random.normal()));
      v_bf16[offset + d] = float_to_bf16(shape.value_scale * static_cast<float>(random.normal()));
      key[d] = bf16_to_float(k_bf16[offset + d]);
      value[d] = bf16_to_float(v_bf16[offset + d]);
    }
  }
  void write_random(uint8_t* record, KvSide side, int token, float size, Random& random) {
    std::vector<uint8_t> codes(at(shape.head_dim));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(4));
    const float scale = size * static_cast<float>(0.5 + 0.8 * random.uniform());
    const float min = -1.5F * scale + size * 0.2F * static_cast<float>(random.normal());
    record_write_row(record, shape.head_dim, side, token, codes.data(), float_to_fp16(scale),
                     float_to_fp16(min));
  }
};

}  // namespace oscar_test
