// A small capture with known structure: anisotropic queries, keys with a constant part, values.
#pragma once

#include <string>
#include <vector>

#include "base/random.h"
#include "io/capture_file.h"

namespace oscar_test {

struct SyntheticCapture {
  size_t num_heads = 4, num_kv_heads = 2, head_dim = 16;
  std::vector<size_t> lengths{300, 200, 250};
  std::vector<int64_t> layers{0, 3};
  bool bf16 = false, outputs = false;
  double key_mean = 0.0;  // constant part of every key, times (1 + dim)
};

inline oscar::CaptureInfo synthetic_info(const SyntheticCapture& spec) {
  oscar::CaptureInfo info;
  info.model_architecture = "llama";
  info.model_sha256 = std::string(64, 'a');
  info.head_dim = static_cast<int64_t>(spec.head_dim);
  info.num_layers = 4;
  info.num_heads = static_cast<int64_t>(spec.num_heads);
  info.num_kv_heads = static_cast<int64_t>(spec.num_kv_heads);
  info.bf16 = spec.bf16;
  info.has_outputs = spec.outputs;
  return info;
}

inline std::vector<float> synthetic_rows(uint64_t seed, size_t tokens, size_t heads, size_t dim,
                                         double offset = 0.0) {
  oscar::Random random(seed);
  std::vector<float> rows(tokens * heads * dim);
  for (size_t i = 0; i < rows.size(); ++i) {
    const double d = static_cast<double>(i % dim);
    rows[i] = static_cast<float>(random.normal() / (1.0 + 0.3 * d) + offset * (1.0 + d));
  }
  return rows;
}

inline void write_synthetic_capture(const std::string& path, const SyntheticCapture& spec) {
  oscar::CaptureWriter writer(path, synthetic_info(spec));
  for (size_t s = 0; s < spec.lengths.size(); ++s) {
    const size_t length = spec.lengths[s];
    writer.begin_sequence(std::vector<int32_t>(length, 7));
    for (const int64_t layer : spec.layers) {
      const uint64_t seed = 1000 * s + 10 * static_cast<uint64_t>(layer);
      const auto q = synthetic_rows(seed, length, spec.num_heads, spec.head_dim);
      const auto k =
          synthetic_rows(seed + 1, length, spec.num_kv_heads, spec.head_dim, spec.key_mean);
      const auto v = synthetic_rows(seed + 2, length, spec.num_kv_heads, spec.head_dim);
      const auto o = synthetic_rows(seed + 3, length, spec.num_heads, spec.head_dim);
      writer.append(layer, q.data(), k.data(), v.data(), spec.outputs ? o.data() : nullptr);
    }
    writer.end_sequence();
  }
  writer.finish();
}

}  // namespace oscar_test
