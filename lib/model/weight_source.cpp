#include "model/weight_source.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "base/error.h"
#include "io/gguf.h"
#include "io/json_file.h"
#include "io/safetensors.h"

namespace oscar {
namespace {

// The layer number in "<prefix><number>.rest", -1 when the name is not of that form.
int64_t layer_of(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return -1;
  const char* begin = name.data() + prefix.size();
  const char* end = name.data() + name.size();
  int64_t layer = -1;
  const auto parsed = std::from_chars(begin, end, layer);
  return parsed.ec == std::errc() && parsed.ptr != end && *parsed.ptr == '.' ? layer : -1;
}

class GgufSource : public WeightSource {
 public:
  explicit GgufSource(const std::string& path) : file_(GgufFile::open(path)) {}

  ModelConfig config() const override { return config_from_gguf(*file_); }

  std::string name(WeightRole role, size_t layer, bool bias) const override {
    const char* const ending = bias ? ".bias" : ".weight";
    if (role == WeightRole::kEmbedding) return std::string("token_embd") + ending;
    if (role == WeightRole::kOutput) return std::string("output") + ending;
    if (role == WeightRole::kOutputNorm) return std::string("output_norm") + ending;
    const char* middle = "";
    switch (role) {
      case WeightRole::kAttentionNorm:
        middle = "attn_norm";
        break;
      case WeightRole::kFfnNorm:
        middle = "ffn_norm";
        break;
      case WeightRole::kQ:
        middle = "attn_q";
        break;
      case WeightRole::kK:
        middle = "attn_k";
        break;
      case WeightRole::kV:
        middle = "attn_v";
        break;
      case WeightRole::kO:
        middle = "attn_output";
        break;
      case WeightRole::kQNorm:
        middle = "attn_q_norm";
        break;
      case WeightRole::kKNorm:
        middle = "attn_k_norm";
        break;
      case WeightRole::kGate:
        middle = "ffn_gate";
        break;
      case WeightRole::kUp:
        middle = "ffn_up";
        break;
      case WeightRole::kDown:
        middle = "ffn_down";
        break;
      default:
        middle = "attn_qkv";
        break;
    }
    return cat("blk.", layer, ".", middle, ending);
  }

  std::optional<StoredTensor> find(const std::string& name) const override {
    const GgufTensor* tensor = file_->find_tensor(name);
    if (tensor == nullptr) return std::nullopt;
    const std::string& path = file_->files()[tensor->file]->path();
    return StoredTensor{path + ": tensor " + name, name, weight_type(*file_, *tensor),
                        tensor->shape(), tensor->bytes};
  }

  std::vector<std::string> tensor_names() const override {
    std::vector<std::string> names;
    for (const GgufTensor& tensor : file_->tensors()) names.emplace_back(tensor.name);
    return names;
  }

  bool interleaved_heads(const ModelConfig& config) const override {
    return config.architecture == "llama";
  }

  bool output_is_embedding(const ModelConfig& config) const override {
    return config.tied_embeddings;
  }

  bool ignorable(std::string_view name, const ModelConfig& config) const override {
    // Rotations for a quantized cache are applied by whoever wants them; they do not change the
    // model.
    return name == "rope_freqs.weight" || name.ends_with(".attn_k_rot.weight") ||
           name.ends_with(".attn_v_rot.weight") ||
           layer_of(name, "blk.") >= static_cast<int64_t>(config.num_layers);
  }

  std::shared_ptr<const void> mappings() const override { return file_; }

  std::vector<std::string> identity_files() const override {
    std::vector<std::string> paths;
    for (const auto& file : file_->files()) paths.push_back(file->path());
    return paths;
  }

 private:
  std::shared_ptr<const GgufFile> file_;
};

class FolderSource : public WeightSource {
 public:
  explicit FolderSource(const std::string& folder)
      : folder_(folder),
        config_(config_from_folder(folder)),
        file_(SafeTensors::open_folder(folder)) {}

  ModelConfig config() const override { return config_; }

  std::string name(WeightRole role, size_t layer, bool bias) const override {
    const char* const ending = bias ? ".bias" : ".weight";
    if (role == WeightRole::kEmbedding) return std::string("model.embed_tokens") + ending;
    if (role == WeightRole::kOutput) return std::string("lm_head") + ending;
    if (role == WeightRole::kOutputNorm) return std::string("model.norm") + ending;
    const char* middle = "";
    switch (role) {
      case WeightRole::kAttentionNorm:
        middle = "input_layernorm";
        break;
      case WeightRole::kFfnNorm:
        middle = "post_attention_layernorm";
        break;
      case WeightRole::kQ:
        middle = "self_attn.q_proj";
        break;
      case WeightRole::kK:
        middle = "self_attn.k_proj";
        break;
      case WeightRole::kV:
        middle = "self_attn.v_proj";
        break;
      case WeightRole::kO:
        middle = "self_attn.o_proj";
        break;
      case WeightRole::kQNorm:
        middle = "self_attn.q_norm";
        break;
      case WeightRole::kKNorm:
        middle = "self_attn.k_norm";
        break;
      case WeightRole::kGate:
        middle = "mlp.gate_proj";
        break;
      case WeightRole::kUp:
        middle = "mlp.up_proj";
        break;
      case WeightRole::kDown:
        middle = "mlp.down_proj";
        break;
      default:
        return "";
    }
    return cat("model.layers.", layer, ".", middle, ending);
  }

  std::optional<StoredTensor> find(const std::string& name) const override {
    const SafeTensor* tensor = file_->find(name);
    if (tensor == nullptr) return std::nullopt;
    const std::string& path = file_->files()[tensor->file]->path();
    return StoredTensor{path + ": tensor " + name, name, weight_type(*file_, *tensor),
                        tensor->shape, tensor->bytes};
  }

  std::vector<std::string> tensor_names() const override {
    std::vector<std::string> names;
    for (const SafeTensor& tensor : file_->tensors()) names.push_back(tensor.name);
    return names;
  }

  bool interleaved_heads(const ModelConfig&) const override { return false; }

  bool output_is_embedding(const ModelConfig& config) const override {
    if (file_->find("lm_head.weight") != nullptr) return false;
    OSCAR_CHECK(config.tied_embeddings, folder_,
                ": tensor lm_head.weight is missing, and config.json does not set "
                "tie_word_embeddings");
    return true;
  }

  bool ignorable(std::string_view name, const ModelConfig& config) const override {
    return name.ends_with(".rotary_emb.inv_freq") ||
           layer_of(name, "model.layers.") >= static_cast<int64_t>(config.num_layers);
  }

  std::shared_ptr<const void> mappings() const override { return file_; }

  std::vector<std::string> identity_files() const override {
    const std::filesystem::path root(folder_);
    std::vector<std::string> paths = {(root / "config.json").string()};
    if (file_->has_index()) paths.push_back((root / kSafeTensorsIndexName).string());
    for (const auto& file : file_->files()) paths.push_back(file->path());
    return paths;
  }

 private:
  std::string folder_;
  ModelConfig config_;
  std::shared_ptr<const SafeTensors> file_;
};

}  // namespace

std::unique_ptr<WeightSource> open_gguf_source(const std::string& path) {
  return std::make_unique<GgufSource>(path);
}

std::unique_ptr<WeightSource> open_folder_source(const std::string& folder) {
  return std::make_unique<FolderSource>(folder);
}

}  // namespace oscar
