// Inspect documents of models: GGUF files, safetensors files, Hugging Face folders.
#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/gguf.h"
#include "io/printable.h"
#include "io/safetensors.h"
#include "model/config.h"
#include "model/weights.h"
#include "tools/inspect.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

// Replaces what is not UTF-8, so that hostile names cannot stop the output.
std::string dump(const Json& document) {
  return document.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json rope_json(const RopeConfig& rope) {
  Json json;
  json["theta"] = rope.theta;
  json["rotary_dim"] = rope.rotary_dim;
  json["scaling"] = rope.scaling;
  if (rope.scaling != "none") json["factor"] = rope.factor;
  if (rope.scaling == "llama3" || rope.scaling == "yarn") {
    json["original_context_length"] = rope.original_context_length;
  }
  if (rope.attention_factor != 1.0) json["attention_factor"] = rope.attention_factor;
  if (!rope.frequency_divisors.empty()) {
    json["frequency_divisors"] = rope.frequency_divisors.size();
  }
  return json;
}

Json model_json(const ModelConfig& config) {
  Json json;
  json["architecture"] = config.architecture;
  json["name"] = config.name;
  json["num_layers"] = config.num_layers;
  json["hidden_size"] = config.hidden_size;
  json["intermediate_size"] = config.intermediate_size;
  json["num_heads"] = config.num_heads;
  json["num_kv_heads"] = config.num_kv_heads;
  json["head_dim"] = config.head_dim;
  if (config.vocab_size != 0) json["vocab_size"] = config.vocab_size;
  json["context_length"] = config.context_length;
  json["rms_norm_eps"] = config.rms_norm_eps;
  json["qkv_bias"] = config.qkv_bias;
  json["output_bias"] = config.output_bias;
  json["qk_norm"] = config.qk_norm;
  json["tied_embeddings"] = config.tied_embeddings;
  json["eos_token_ids"] = config.eos_token_ids;
  // BF16 bytes of K and V of one token, all layers.
  json["kv_bf16_bytes_per_token"] = config.num_layers * config.num_kv_heads * config.head_dim * 4;
  json["rope"] = rope_json(config.rope);
  if (!config.warnings.empty()) {
    std::string text;
    for (const std::string& warning : config.warnings) text += (text.empty() ? "" : "; ") + warning;
    json["warnings"] = text;
  }
  return json;
}

// Runs a step that may not be supported for this file; the reason becomes part of the document.
template <class Step>
void supported(Json& document, Step&& step) {
  try {
    step();
  } catch (const Error& error) {
    document["not_supported"] = error.what();
  }
}

struct TypeTotal {
  size_t tensors = 0, elements = 0, bytes = 0;
};
void add_totals(Json& document, const std::map<std::string, TypeTotal>& totals) {
  TypeTotal all;
  Json types = Json::array();
  for (const auto& [name, total] : totals) {
    types.push_back({{"type", name},
                     {"tensors", total.tensors},
                     {"parameters", total.elements},
                     {"bytes", total.bytes}});
    all.elements += total.elements;
    all.bytes += total.bytes;
  }
  document["parameters"] = all.elements;
  document["tensor_bytes"] = all.bytes;
  if (all.elements > 0) {
    document["bits_per_parameter"] =
        8.0 * static_cast<double>(all.bytes) / static_cast<double>(all.elements);
  }
  document["types"] = std::move(types);
}

void add_safetensors(Json& document, const SafeTensors& file) {
  std::map<std::string, TypeTotal> totals;
  Json tensors = Json::array();
  for (const SafeTensor& tensor : file.tensors()) {
    TypeTotal& total = totals[tensor.dtype];
    ++total.tensors;
    total.elements += num_elements(tensor.shape);
    total.bytes += tensor.byte_count;
    Json row = {{"name", tensor.name},
                {"type", tensor.dtype},
                {"shape", tensor.shape},
                {"bytes", tensor.byte_count}};
    if (file.files().size() > 1) {
      row["file"] = std::filesystem::path(file.files()[tensor.file]->path()).filename().string();
    }
    tensors.push_back(std::move(row));
  }
  add_totals(document, totals);
  Json metadata = Json::object();
  for (const auto& [key, value] : file.metadata()) metadata[key] = printable(value);
  document["metadata"] = std::move(metadata);
  document["tensors"] = std::move(tensors);
}

Json files_json(const std::vector<std::shared_ptr<const MappedFile>>& files) {
  Json json = Json::array();
  for (const auto& file : files) {
    json.push_back({{"name", std::filesystem::path(file->path()).filename().string()},
                    {"bytes", file->size()}});
  }
  return json;
}

}  // namespace

std::string describe_gguf(const std::string& path, bool hash) {
  const auto file = GgufFile::open(path);
  Json document;
  document["file"] = path;
  document["format"] = "GGUF";
  document["version"] = file->version();
  size_t bytes = 0;
  for (const auto& part : file->files()) bytes += part->size();
  document["bytes"] = bytes;
  document["alignment"] = file->alignment();
  if (hash) supported(document, [&] { document["sha256"] = model_sha256(path); });
  supported(document, [&] {
    document["model"] = model_json(config_from_gguf(*file));
    for (const GgufTensor& tensor : file->tensors()) weight_type(*file, tensor);
  });
  std::map<std::string, TypeTotal> totals;
  Json tensors = Json::array();
  for (const GgufTensor& tensor : file->tensors()) {
    const std::string type = gguf_type_name(tensor.type_id);
    TypeTotal& total = totals[type];
    ++total.tensors;
    total.elements += num_elements(tensor.shape());
    total.bytes += tensor.byte_count;
    Json row = {{"name", std::string(tensor.name)},
                {"type", type},
                {"shape", tensor.shape()},
                {"bytes", tensor.byte_count}};
    if (file->files().size() > 1) row["part"] = tensor.file + 1;
    tensors.push_back(std::move(row));
  }
  add_totals(document, totals);
  Json metadata = Json::object();
  for (const GgufValue& value : file->metadata()) {
    metadata[std::string(value.key)] = describe(value);
  }
  document["metadata"] = std::move(metadata);
  if (file->files().size() > 1) document["files"] = files_json(file->files());
  document["tensors"] = std::move(tensors);
  return dump(document);
}

std::string describe_safetensors(const std::string& path) {
  const auto file = SafeTensors::open_file(path);
  Json document;
  document["file"] = path;
  document["format"] = "safetensors";
  document["bytes"] = file->files()[0]->size();
  add_safetensors(document, *file);
  return dump(document);
}

std::string describe_model_folder(const std::string& folder, bool hash) {
  const std::filesystem::path root(folder);
  Json document;
  document["file"] = folder;
  document["format"] = "Hugging Face folder";
  OSCAR_CHECK(std::filesystem::exists(root / "config.json"), folder,
              ": not a model folder (no config.json)");
  if (hash) supported(document, [&] { document["sha256"] = model_sha256(folder); });
  supported(document, [&] { document["model"] = model_json(config_from_folder(folder)); });
  const auto weights = SafeTensors::open_folder(folder);
  std::string others;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    if (std::filesystem::exists(root / name)) others += cat(others.empty() ? "" : " ", name);
  }
  document["other_files"] = others;
  document["files"] = files_json(weights->files());
  add_safetensors(document, *weights);
  return dump(document);
}

}  // namespace oscar
