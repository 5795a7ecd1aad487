// Internal to load_weights: tensors by role, whatever file format holds them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/tensor.h"
#include "io/weight_types.h"
#include "model/config.h"

namespace oscar {

enum class WeightRole : uint8_t {
  kEmbedding,
  kOutput,
  kOutputNorm,
  kAttentionNorm,
  kFfnNorm,
  kQ,
  kK,
  kV,
  kO,
  kQNorm,
  kKNorm,
  kGate,
  kUp,
  kDown,
  kFusedQkv,  // GGUF only: rows q, k, v
};

struct StoredTensor {
  std::string where;  // "<file>: tensor <name>", for messages
  std::string name;
  WeightType type = WeightType::kF32;
  Shape shape;  // slowest first
  const uint8_t* bytes = nullptr;
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual ModelConfig config() const = 0;
  // Name in the file; layer is ignored for the roles outside layers. Empty: the format has no such
  // tensor.
  virtual std::string name(WeightRole role, size_t layer, bool bias) const = 0;
  // Throws Error when the tensor's type cannot be expanded.
  virtual std::optional<StoredTensor> find(const std::string& name) const = 0;
  virtual std::vector<std::string> tensor_names() const = 0;
  // Whether rows of q and k stand in adjacent-pair order and must be un-permuted.
  virtual bool interleaved_heads(const ModelConfig& config) const = 0;
  // Decides what the output matrix is: true = the embedding. Throws Error when it is missing.
  virtual bool output_is_embedding(const ModelConfig& config) const = 0;
  // Whether an unknown tensor may be ignored without changing what is computed.
  virtual bool ignorable(std::string_view name, const ModelConfig& config) const = 0;
  virtual std::shared_ptr<const void> mappings() const = 0;
  // Files that make up the model's identity, hashed in this order.
  virtual std::vector<std::string> identity_files() const = 0;
};

std::unique_ptr<WeightSource> open_gguf_source(const std::string& path);
std::unique_ptr<WeightSource> open_folder_source(const std::string& folder);

}  // namespace oscar
