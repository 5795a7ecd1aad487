#include "io/capture_schema.h"

#include "io/layer_names.h"

namespace oscar {
namespace {

constexpr const char* kFormat = "oscar-capture";
constexpr int64_t kVersion = 1;
}  // namespace

const char* tensor_name(CaptureTensor tensor) {
  switch (tensor) {
    case CaptureTensor::kQ:
      return "q";
    case CaptureTensor::kK:
      return "k";
    case CaptureTensor::kV:
      return "v";
    case CaptureTensor::kO:
      return "o";
  }
  return "?";
}

size_t capture_heads(const CaptureInfo& info, CaptureTensor tensor) {
  const bool query_side = tensor == CaptureTensor::kQ || tensor == CaptureTensor::kO;
  return static_cast<size_t>(query_side ? info.num_heads : info.num_kv_heads);
}

std::string capture_dataset(int64_t layer, CaptureTensor tensor) {
  return layer_group(layer) + "/" + tensor_name(tensor);
}

void check_capture_geometry(const CaptureInfo& info, const std::string& path) {
  OSCAR_CHECK(info.head_dim > 0 && info.num_heads > 0 && info.num_kv_heads > 0 &&
                  info.num_heads % info.num_kv_heads == 0 && info.head_dim <= (1 << 20) &&
                  info.num_heads <= (1 << 20),
              path, ": impossible geometry: head_dim ", info.head_dim, ", num_heads ",
              info.num_heads, ", num_kv_heads ", info.num_kv_heads);
}

void write_capture_info(Hdf5File& file, const CaptureInfo& info) {
  file.write_attribute("/", "format", std::string(kFormat));
  file.write_attribute("/", "format_version", kVersion);
  file.write_attribute("/", "model_architecture", info.model_architecture);
  file.write_attribute("/", "model_sha256", info.model_sha256);
  file.write_attribute("/", "tokenizer_sha256", info.tokenizer_sha256);
  file.write_attribute("/", "text_sha256", info.text_sha256);
  file.write_attribute("/", "tool_version", info.tool_version);
  file.write_attribute("/", "options", info.options_json);
  file.write_attribute("/", "head_dim", info.head_dim);
  file.write_attribute("/", "num_layers", info.num_layers);
  file.write_attribute("/", "num_heads", info.num_heads);
  file.write_attribute("/", "num_kv_heads", info.num_kv_heads);
  file.write_attribute("/", "rope_theta", info.rope_theta);
  if (!info.rope_json.empty()) file.write_attribute("/", "rope", info.rope_json);
  file.write_attribute("/", "dtype", std::string(info.bf16 ? "bf16" : "f32"));
  file.write_attribute("/", "has_outputs", static_cast<int64_t>(info.has_outputs ? 1 : 0));
  file.write_attribute("/", "sequences_complete", static_cast<int64_t>(0));
}

CaptureInfo read_capture_info(const Hdf5File& file) {
  require_format(file, kFormat, kVersion);
  CaptureInfo info;
  info.model_architecture = file.string_attribute("/", "model_architecture");
  info.model_sha256 = file.string_attribute("/", "model_sha256");
  info.tokenizer_sha256 = file.string_attribute("/", "tokenizer_sha256");
  info.text_sha256 = file.string_attribute("/", "text_sha256");
  info.tool_version = file.string_attribute("/", "tool_version");
  info.options_json = file.string_attribute("/", "options");
  info.head_dim = file.int_attribute("/", "head_dim");
  info.num_layers = file.int_attribute("/", "num_layers");
  info.num_heads = file.int_attribute("/", "num_heads");
  info.num_kv_heads = file.int_attribute("/", "num_kv_heads");
  info.rope_theta = file.double_attribute("/", "rope_theta");
  if (file.has_attribute("/", "rope")) info.rope_json = file.string_attribute("/", "rope");
  const std::string dtype = file.string_attribute("/", "dtype");
  OSCAR_CHECK(dtype == "bf16" || dtype == "f32", file.path(),
              ": attribute dtype: expected bf16 or f32, got ", dtype);
  info.bf16 = dtype == "bf16";
  info.has_outputs = file.int_attribute("/", "has_outputs") != 0;
  check_capture_geometry(info, file.path());
  return info;
}

}  // namespace oscar
