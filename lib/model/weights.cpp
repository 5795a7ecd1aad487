#include "model/weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/parallel.h"
#include "io/sha256.h"
#include "model/weight_source.h"

namespace oscar {

namespace {

std::string hash_files(const std::vector<std::string>& files) {
  if (files.size() == 1) return sha256_file(files[0]);
  std::string lines;
  for (const std::string& path : files) {
    lines += sha256_file(path) + "  " + std::filesystem::path(path).filename().string() + "\n";
  }
  return sha256_hex(lines);
}

std::unique_ptr<WeightSource> open_source(const std::string& path) {
  return std::filesystem::is_directory(path) ? open_folder_source(path) : open_gguf_source(path);
}

}  // namespace

class ModelHash {
 public:
  explicit ModelHash(std::vector<std::string> files) : files_(std::move(files)) {}
  const std::string& hex() {
    std::call_once(once_, [this] { hex_ = hash_files(files_); });
    return hex_;
  }

 private:
  std::vector<std::string> files_;
  std::once_flag once_;
  std::string hex_;
};

namespace {

// What the weights point into: the mappings and the un-permuted copies.
struct Owner {
  std::shared_ptr<const void> mappings;
  std::vector<std::vector<uint8_t>> copies;
};

// File row 2i + b of a head holds row b * D/2 + i of the half-split order; returns the file row of
// every half-split row.
size_t interleaved_row(size_t row, size_t head_dim) {
  const size_t head = row / head_dim, lane = row % head_dim, half = head_dim / 2;
  return head * head_dim + 2 * (lane % half) + lane / half;
}

class Loader {
 public:
  explicit Loader(std::unique_ptr<WeightSource> source)
      : source_(std::move(source)), owner_(std::make_shared<Owner>()) {
    owner_->mappings = source_->mappings();
  }

  ModelWeights load(const std::string& path) {
    ModelWeights weights;
    weights.source_path = path;
    weights.config = source_->config();
    ModelConfig& config = weights.config;
    const std::vector<std::string> names = source_->tensor_names();
    OSCAR_CHECK(config.num_layers <= names.size(), path, ": ", config.num_layers,
                " layers, but only ", names.size(), " tensors");
    load_ends(path, weights);
    for (size_t layer = 0; layer < config.num_layers; ++layer) {
      weights.layers.push_back(load_layer(config, layer));
    }
    for (const std::string& name : names) {
      OSCAR_CHECK(used_.contains(name) || source_->ignorable(name, config), path, ": tensor ", name,
                  " is not part of a ", config.architecture, " model",
                  name.ends_with(".bias") ? " with this configuration" : "");
    }
    check_matrices();
    weights.hash = std::make_shared<ModelHash>(source_->identity_files());
    weights.owner = owner_;
    return weights;
  }

 private:
  void load_ends(const std::string& path, ModelWeights& weights) {
    ModelConfig& config = weights.config;
    const std::string embedding_name = source_->name(WeightRole::kEmbedding, 0, false);
    if (config.vocab_size == 0) {
      const StoredTensor embedding = require(embedding_name);
      OSCAR_CHECK(embedding.shape.size() == 2, embedding.where, ": expected a matrix, got ",
                  to_string(embedding.shape));
      config.vocab_size = embedding.shape[0];
    }
    weights.embedding = matrix(embedding_name, config.vocab_size, config.hidden_size);
    weights.output_norm =
        vector(source_->name(WeightRole::kOutputNorm, 0, false), config.hidden_size);
    if (source_->output_is_embedding(config)) {
      weights.output = weights.embedding;
      return;
    }
    weights.output =
        matrix(source_->name(WeightRole::kOutput, 0, false), config.vocab_size, config.hidden_size);
    if (config.tied_embeddings && !same(weights.output, weights.embedding)) {
      config.warnings.push_back(cat(path, ": ", weights.output.name, " differs from ",
                                    weights.embedding.name,
                                    " although the configuration ties them; it is used"));
    }
    config.tied_embeddings = false;
  }

  LayerWeights load_layer(const ModelConfig& config, size_t layer) {
    const size_t hidden = config.hidden_size, head_dim = config.head_dim;
    const size_t q_rows = config.num_heads * head_dim, kv_rows = config.num_kv_heads * head_dim;
    const auto name = [&](WeightRole role, bool bias = false) {
      return source_->name(role, layer, bias);
    };
    LayerWeights weights;
    weights.attention_norm = vector(name(WeightRole::kAttentionNorm), hidden);
    weights.ffn_norm = vector(name(WeightRole::kFfnNorm), hidden);
    const std::string fused = name(WeightRole::kFusedQkv);
    if (!fused.empty() && source_->find(fused)) {
      const WeightMatrix all = matrix(fused, q_rows + 2 * kv_rows, hidden);
      weights.q = slice(all, 0, q_rows);
      weights.k = slice(all, q_rows, kv_rows);
      weights.v = slice(all, q_rows + kv_rows, kv_rows);
    } else {
      weights.q = matrix(name(WeightRole::kQ), q_rows, hidden);
      weights.k = matrix(name(WeightRole::kK), kv_rows, hidden);
      weights.v = matrix(name(WeightRole::kV), kv_rows, hidden);
    }
    if (config.qkv_bias) load_biases(config, layer, weights);
    weights.o = matrix(name(WeightRole::kO), hidden, q_rows);
    if (config.output_bias) weights.o_bias = vector(name(WeightRole::kO, true), hidden);
    if (config.qk_norm) {
      weights.q_norm = vector(name(WeightRole::kQNorm), head_dim);
      weights.k_norm = vector(name(WeightRole::kKNorm), head_dim);
    }
    weights.gate = matrix(name(WeightRole::kGate), config.intermediate_size, hidden);
    weights.up = matrix(name(WeightRole::kUp), config.intermediate_size, hidden);
    weights.down = matrix(name(WeightRole::kDown), hidden, config.intermediate_size);
    if (source_->interleaved_heads(config)) {
      unpermute(weights.q, head_dim);
      unpermute(weights.k, head_dim);
      unpermute(weights.q_bias, head_dim);
      unpermute(weights.k_bias, head_dim);
    }
    return weights;
  }

  void load_biases(const ModelConfig& config, size_t layer, LayerWeights& weights) {
    const size_t q_rows = config.num_heads * config.head_dim;
    const size_t kv_rows = config.num_kv_heads * config.head_dim;
    const std::string fused = source_->name(WeightRole::kFusedQkv, layer, true);
    if (!fused.empty() && source_->find(fused)) {
      const std::vector<float> all = vector(fused, q_rows + 2 * kv_rows);
      const auto q_end = all.begin() + static_cast<ptrdiff_t>(q_rows);
      const auto k_end = q_end + static_cast<ptrdiff_t>(kv_rows);
      weights.q_bias.assign(all.begin(), q_end);
      weights.k_bias.assign(q_end, k_end);
      weights.v_bias.assign(k_end, all.end());
      return;
    }
    weights.q_bias = vector(source_->name(WeightRole::kQ, layer, true), q_rows);
    weights.k_bias = vector(source_->name(WeightRole::kK, layer, true), kv_rows);
    weights.v_bias = vector(source_->name(WeightRole::kV, layer, true), kv_rows);
  }

  StoredTensor require(const std::string& name) {
    std::optional<StoredTensor> tensor = source_->find(name);
    OSCAR_CHECK(tensor.has_value(), source_->identity_files().front(), ": tensor ", name,
                " is missing");
    used_.insert(name);
    return *std::move(tensor);
  }

  WeightMatrix matrix(const std::string& name, size_t rows, size_t columns) {
    const StoredTensor tensor = require(name);
    OSCAR_CHECK((tensor.shape == Shape{rows, columns}), tensor.where, ": expected shape ",
                to_string(Shape{rows, columns}), ", got ", to_string(tensor.shape));
    WeightMatrix result{name, tensor.type, rows, columns, tensor.bytes};
    matrices_.push_back({result, tensor.where});
    return result;
  }

  std::vector<float> vector(const std::string& name, size_t count) {
    const StoredTensor tensor = require(name);
    OSCAR_CHECK((tensor.shape == Shape{count}), tensor.where, ": expected shape ",
                to_string(Shape{count}), ", got ", to_string(tensor.shape));
    OSCAR_CHECK(row_is_finite(tensor.type, tensor.bytes, count), tensor.where,
                ": contains NaN or infinity");
    std::vector<float> values(count);
    dequantize_row(tensor.type, tensor.bytes, count, values.data());
    return values;
  }

  static WeightMatrix slice(const WeightMatrix& all, size_t first, size_t rows) {
    return {all.name, all.type, rows, all.columns, all.row(first)};
  }

  static bool same(const WeightMatrix& a, const WeightMatrix& b) {
    return a.type == b.type && a.rows == b.rows && a.columns == b.columns &&
           std::memcmp(a.bytes, b.bytes, a.rows * row_bytes(a.type, a.columns)) == 0;
  }

  void unpermute(WeightMatrix& matrix, size_t head_dim) {
    const size_t bytes = row_bytes(matrix.type, matrix.columns);
    std::vector<uint8_t>& copy = owner_->copies.emplace_back(matrix.rows * bytes);
    for (size_t row = 0; row < matrix.rows; ++row) {
      std::memcpy(copy.data() + row * bytes, matrix.row(interleaved_row(row, head_dim)), bytes);
    }
    matrix.bytes = copy.data();
  }

  static void unpermute(std::vector<float>& bias, size_t head_dim) {
    std::vector<float> result(bias.size());
    for (size_t row = 0; row < bias.size(); ++row)
      result[row] = bias[interleaved_row(row, head_dim)];
    bias = std::move(result);
  }

  // Every element of every matrix must be finite: one pass over the stored bytes.
  void check_matrices() const {
    parallel_for(matrices_.size(), [&](size_t item) {
      const auto& [matrix, where] = matrices_[item];
      for (size_t row = 0; row < matrix.rows; ++row) {
        OSCAR_CHECK(row_is_finite(matrix.type, matrix.row(row), matrix.columns), where, ": row ",
                    row, " contains NaN or infinity");
      }
    });
  }

  struct Checked {
    WeightMatrix matrix;
    std::string where;
  };
  std::unique_ptr<WeightSource> source_;
  std::shared_ptr<Owner> owner_;
  std::set<std::string> used_;
  std::vector<Checked> matrices_;
};

}  // namespace

ModelWeights load_weights(const std::string& path) { return Loader(open_source(path)).load(path); }

std::string model_sha256(const std::string& path) {
  return hash_files(open_source(path)->identity_files());
}

const std::string& model_sha256(const ModelWeights& weights) {
  if (!weights.sha256.empty()) return weights.sha256;
  OSCAR_CHECK(weights.hash != nullptr, "these weights come from no file and have no hash");
  return weights.hash->hex();
}

}  // namespace oscar
