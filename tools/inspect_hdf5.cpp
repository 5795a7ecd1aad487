// Inspect documents of captures, bundles and moments files.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/bundle_file.h"
#include "io/capture_file.h"
#include "io/hdf5_file.h"
#include "io/moments_file.h"
#include "tools/inspect.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

std::string dump(const Json& document) {
  return document.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// JSON kept inside the file as text; shown as text when it is not JSON.
Json embedded(const std::string& text) {
  Json json = Json::parse(text, nullptr, false);
  return json.is_discarded() ? Json(text) : json;
}

Json document_of(const std::string& path, const char* format) {
  return {{"file", path}, {"format", format}, {"bytes", std::filesystem::file_size(path)}};
}

// The attributes that all of them share.
template <class Info>
void add_provenance(Json& document, const Info& info) {
  document["model_architecture"] = info.model_architecture;
  document["model_sha256"] = info.model_sha256;
  document["tokenizer_sha256"] = info.tokenizer_sha256;
  document["text_sha256"] = info.text_sha256;
  document["tool_version"] = info.tool_version;
  document["head_dim"] = info.head_dim;
  document["num_layers"] = info.num_layers;
  document["num_heads"] = info.num_heads;
  document["num_kv_heads"] = info.num_kv_heads;
  document["rope_theta"] = info.rope_theta;
}

// A row of the table of tensors; nothing for one that is absent.
template <class T>
void add_tensor(Json& tensors, const std::string& name, const T& tensor, const char* type) {
  if (tensor.empty()) return;
  tensors.push_back({{"name", name},
                     {"type", type},
                     {"shape", tensor.shape},
                     {"bytes", tensor.size() * sizeof(tensor.values[0])}});
}

// The contest of a layer, one row a side and head: the attention-output error of every candidate.
void add_contest(Json& table, int64_t layer, const Json& held_out) {
  if (!held_out.is_object() || !held_out.contains("attention_output")) return;
  const Json& sides = held_out["attention_output"];
  if (!sides.is_object()) return;
  for (const auto& [side, heads] : sides.items()) {
    if (!heads.is_array()) continue;
    for (size_t head = 0; head < heads.size(); ++head) {
      const Json& entry = heads[head];
      if (!entry.is_object() || !entry.contains("candidates")) continue;
      Json row = {{"layer", layer}, {"side", side}, {"head", head}};
      for (const char* name : {"chosen", "centered_recipe"}) {
        if (entry.contains(name)) row[name] = entry[name];
      }
      for (const Json& candidate : entry["candidates"]) {
        if (!candidate.is_object() || !candidate.contains("form") || !candidate.contains("error") ||
            !candidate["form"].is_string()) {
          continue;
        }
        row[candidate["form"].get<std::string>()] = candidate["error"];
      }
      table.push_back(std::move(row));
    }
  }
}

std::string describe_capture(const std::string& path) {
  const CaptureReader capture(path);
  const CaptureInfo& info = capture.info();
  Json document = document_of(path, "oscar-capture");
  add_provenance(document, info);
  const size_t tokens = capture.token_ids().size();
  document["tokens"] = tokens;
  const std::vector<int64_t>& offsets = capture.sequence_offsets();
  document["sequences"] = offsets.size() - 1;
  int64_t shortest = 0, longest = 0;
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    const int64_t length = offsets[i + 1] - offsets[i];
    shortest = i == 0 ? length : std::min(shortest, length);
    longest = std::max(longest, length);
  }
  document["sequence_tokens"] =
      shortest == longest ? Json(shortest) : Json(cat(shortest, " to ", longest));
  document["dtype"] = info.bf16 ? "bf16" : "f32";
  document["options"] = embedded(info.options_json);
  if (!info.rope_json.empty()) document["rope"] = embedded(info.rope_json);
  Json tensors = Json::array();
  const auto head_dim = static_cast<size_t>(info.head_dim);
  for (const int64_t layer : capture.layers()) {
    for (const CaptureTensor tensor :
         {CaptureTensor::kQ, CaptureTensor::kK, CaptureTensor::kV, CaptureTensor::kO}) {
      if (tensor == CaptureTensor::kO && !info.has_outputs) continue;
      const size_t heads = capture.num_heads(tensor);
      tensors.push_back({{"name", cat("layers/", layer, "/", tensor_name(tensor))},
                         {"type", document["dtype"]},
                         {"shape", {tokens, heads, head_dim}},
                         {"bytes", tokens * heads * head_dim * (info.bf16 ? 2 : 4)}});
    }
  }
  document["tensors"] = std::move(tensors);
  return dump(document);
}

std::string describe_bundle(const std::string& path) {
  const Bundle bundle = read_bundle(path);
  const BundleInfo& info = bundle.info;
  Json document = document_of(path, "oscar-bundle");
  document["recipe"] = info.recipe;
  add_provenance(document, info);
  document["value_head_dim"] = info.value_head_dim;
  document["tokens"] = info.tokens;
  document["sequence_length"] = info.sequence_length;
  document["approximate"] = info.approximate;
  document["options"] = embedded(info.options_json);
  Json tensors = Json::array(), clips = Json::array(), policies = Json::array(),
       held_out = Json::array(), contest = Json::array();
  for (const auto& [id, layer] : bundle.layers) {
    const auto add = [&, layer_id = id](const char* name, const auto& tensor, const char* type) {
      add_tensor(tensors, cat("layers/", layer_id, "/", name), tensor, type);
    };
    add("k_rotation", layer.k_rotation, "f32");
    add("v_rotation", layer.v_rotation, "f32");
    add("k_eigenvalues", layer.k_eigenvalues, "f64");
    add("v_eigenvalues", layer.v_eigenvalues, "f64");
    add("k_mean", layer.k_mean, "f32");
    add("v_mean", layer.v_mean, "f32");
    add("k_position_mean", layer.k_position_mean, "f32");
    add("k_position_offset", layer.k_position_offset, "f32");
    add("k_metric", layer.k_metric, "f32");
    add("v_metric", layer.v_metric, "f32");
    add("k_scale_max", layer.k_scale_max, "f32");
    add("v_scale_max", layer.v_scale_max, "f32");
    add("k_multipliers", layer.k_multipliers, "f32");
    add("v_multipliers", layer.v_multipliers, "f32");
    clips.push_back({{"layer", id}, {"k_clip", layer.k_clip}, {"v_clip", layer.v_clip}});
    const auto add_json = [&, layer_id = id](Json& table, const std::string& text) {
      Json row = {{"layer", layer_id}};
      const Json content = embedded(text);
      if (content.is_object()) {
        row.update(content);
      } else {
        row["text"] = content;
      }
      if (row.size() > 1) table.push_back(std::move(row));
    };
    add_json(policies, layer.policy_json);
    add_json(held_out, layer.held_out_json);
    add_contest(contest, id, embedded(layer.held_out_json));
  }
  document["clip"] = std::move(clips);
  document["policy"] = std::move(policies);
  document["held_out"] = std::move(held_out);
  if (!contest.empty()) document["contest"] = std::move(contest);
  document["tensors"] = std::move(tensors);
  return dump(document);
}

std::string describe_moments(const std::string& path) {
  const MomentsReader moments(path);
  const MomentsInfo& info = moments.info();
  Json document = document_of(path, "oscar-moments");
  add_provenance(document, info);
  document["kv_heads_in_file"] =
      cat(info.first_kv_head, " to ", info.first_kv_head + info.local_kv_heads - 1);
  document["compute"] = info.compute;
  document["output_projection"] = info.output_projection;
  document["sink"] = info.sink;
  document["recent"] = info.recent;
  document["tokens"] = info.calibration_tokens();
  document["held_out_tokens"] = info.held_out_tokens();
  document["sequences"] = info.sequences.size();
  document["sequences_complete"] = info.sequences_complete;
  document["longest_sequence"] = info.longest_sequence();
  document["proxy_approximate"] = info.proxy_approximate;
  document["options"] = embedded(info.options_json);
  Json tensors = Json::array();
  for (const int64_t id : moments.layers()) {
    const MomentsLayer layer = moments.read(id);
    const auto add = [&](const std::string& name, const auto& tensor, const char* type) {
      add_tensor(tensors, cat("layers/", id, "/", name), tensor, type);
    };
    for (const auto& [name, moment] : layer.sums) add(name, moment.sum, "f64");
    add("weight_sums", layer.weight_sums, "f64");
    add("output_energy", layer.output_energy, "f64");
    for (const auto& [name, rows] : layer.rows) add(name, rows, "f32");
    add("contest_tokens", layer.contest_tokens, "i64");
  }
  document["tensors"] = std::move(tensors);
  return dump(document);
}

}  // namespace

std::string describe_hdf5(const std::string& path) {
  std::string format;
  {
    const Hdf5File file = Hdf5File::open(path);
    if (file.has_attribute("/", "format")) format = file.string_attribute("/", "format");
  }
  if (format == "oscar-capture") return describe_capture(path);
  if (format == "oscar-bundle") return describe_bundle(path);
  if (format == "oscar-moments") return describe_moments(path);
  fail(path,
       ": an HDF5 file that is no capture, bundle or moments file (attribute format: expected ",
       "oscar-capture, oscar-bundle or oscar-moments, got ", format.empty() ? "nothing" : format,
       ")");
}

}  // namespace oscar
