// A small model with random float32 weights, for tests that need a forward pass but no files.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "model/transformer.h"

namespace oscar_test {

using namespace oscar;

// Random float32 weights of a model with grouped heads, biases and query/key norms.
struct SmallModel {
  ModelWeights weights;
  std::vector<std::unique_ptr<std::vector<float>>> storage;
  Random random{17};

  std::vector<float> vector(size_t count, double mean, double deviation) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(mean + deviation * random.normal());
    return values;
  }
  WeightMatrix matrix(const std::string& name, size_t rows, size_t columns) {
    storage.push_back(std::make_unique<std::vector<float>>(
        vector(rows * columns, 0.0, 1.0 / std::sqrt(static_cast<double>(columns)))));
    WeightMatrix result;
    result.name = name;
    result.rows = rows;
    result.columns = columns;
    result.bytes = reinterpret_cast<const uint8_t*>(storage.back()->data());
    return result;
  }

  SmallModel() {
    ModelConfig& c = weights.config;
    c.architecture = std::string("qwen3");
    c.num_layers = 3;
    c.hidden_size = 96;
    c.intermediate_size = 160;
    c.num_heads = 6;
    c.num_kv_heads = 2;
    c.head_dim = 64;
    c.vocab_size = 131;
    c.context_length = 4096;
    c.qkv_bias = c.qk_norm = true;
    c.rope.rotary_dim = 64;
    weights.embedding = matrix("embedding", c.vocab_size, c.hidden_size);
    weights.output = matrix("output", c.vocab_size, c.hidden_size);
    weights.output_norm = vector(c.hidden_size, 1.0, 0.1);
    const size_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
    for (size_t i = 0; i < c.num_layers; ++i) {
      LayerWeights w;
      w.attention_norm = vector(c.hidden_size, 1.0, 0.1);
      w.ffn_norm = vector(c.hidden_size, 1.0, 0.1);
      w.q_norm = vector(c.head_dim, 1.0, 0.1);
      w.k_norm = vector(c.head_dim, 1.0, 0.1);
      w.q_bias = vector(q, 0.0, 0.5);
      w.k_bias = vector(kv, 0.0, 0.5);
      w.v_bias = vector(kv, 0.0, 0.5);
      w.q = matrix("q", q, c.hidden_size);
      w.k = matrix("k", kv, c.hidden_size);
      w.v = matrix("v", kv, c.hidden_size);
      w.o = matrix("o", c.hidden_size, q);
      w.gate = matrix("gate", c.intermediate_size, c.hidden_size);
      w.up = matrix("up", c.intermediate_size, c.hidden_size);
      w.down = matrix("down", c.hidden_size, c.intermediate_size);
      weights.layers.push_back(std::move(w));
    }
  }

  // The model shares the storage, so it must not outlive this object.
  Transformer transformer() const {
    return Transformer(std::make_shared<const ModelWeights>(weights), Compute::kFp32);
  }
};

inline std::shared_ptr<const KvArm> reference_arm(HighPrecision precision) {
  auto arm = std::make_shared<KvArm>();
  arm->name = std::string("reference");
  arm->high_precision = precision;
  return arm;
}

inline std::vector<int32_t> random_tokens(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(131));
  return tokens;
}

}  // namespace oscar_test
