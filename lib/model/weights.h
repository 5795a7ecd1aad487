// The weights of a model as they lie in the file (memory-mapped, stored type kept), with names
// resolved to their role.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/weight_types.h"
#include "model/config.h"

namespace oscar {

// A matrix [rows = outputs, columns = inputs], row-major, each row `row_bytes(type, columns)`
// bytes. y = x W^T.
struct WeightMatrix {
  std::string name;
  WeightType type = WeightType::kF32;
  size_t rows = 0, columns = 0;
  const uint8_t* bytes = nullptr;  // null: absent
  bool present() const { return bytes != nullptr; }
  const uint8_t* row(size_t index) const { return bytes + index * row_bytes(type, columns); }
};

struct LayerWeights {
  std::vector<float> attention_norm, ffn_norm;        // [hidden]
  std::vector<float> q_norm, k_norm;                  // [head_dim], qwen3 only
  std::vector<float> q_bias, k_bias, v_bias, o_bias;  // empty = none
  WeightMatrix q, k, v, o, gate, up, down;  // q, k rows in Hugging Face (half-split) lane order
};

class ModelHash;  // hash of the model's files, computed once on first use

struct ModelWeights {
  ModelConfig config;
  WeightMatrix embedding, output;  // output == embedding when tied
  std::vector<float> output_norm;  // [hidden]
  std::vector<LayerWeights> layers;
  std::string source_path;            // as given by the user
  std::string sha256;                 // when not empty, what model_sha256() returns
  std::shared_ptr<ModelHash> hash;    // computes and keeps the hash; null for hand-made weights
  std::shared_ptr<const void> owner;  // keeps the mappings and permuted copies alive
};

// path: a .gguf file or a Hugging Face folder. Throws Error naming file and tensor for anything
// missing, contradictory, unsupported or non-finite (norms, biases and matrices); a tensor of a
// layer that no such model has is refused as well, because ignoring it would compute another model.
ModelWeights load_weights(const std::string& path);

// SHA-256 (hex) that identifies the model in provenance attributes: of the GGUF file; of the lines
// "<sha256>  <file name>\n" of its parts when it is split; of such lines of config.json, the index
// when there is one and the weight files (by name) for a folder. Computed once for each loaded
// model. Throws Error when weights neither have a sha256 nor files.
const std::string& model_sha256(const ModelWeights& weights);
// The same hash from the files alone, without loading the weights.
std::string model_sha256(const std::string& path);

}  // namespace oscar
