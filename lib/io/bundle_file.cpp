#include "io/bundle_file.h"

#include <algorithm>
#include <cmath>

#include "base/finite.h"
#include "io/hdf5_file.h"
#include "io/layer_names.h"
#include "io/output_path.h"

namespace oscar {
namespace {

constexpr const char* kFormat = "oscar-bundle";
constexpr int64_t kVersion = 1;
constexpr double kMaxOrthogonalityError = 1e-3;  // formats.md 1: files we read

// Where a tensor stands, for messages.
struct Place {
  const Hdf5File& file;
  std::string group;
  std::string name(const char* tensor) const { return group + "/" + tensor; }
};

template <class T>
Tensor<T> read_optional(const Place& place, const char* tensor, size_t rank) {
  const std::string name = place.name(tensor);
  if (!place.file.exists(name)) return {};
  Tensor<T> values = place.file.read<T>(name, rank);
  for (const T value : values.values)
    OSCAR_CHECK(std::isfinite(value), place.file.path(), ": ", name, " has a non-finite value");
  return values;
}

template <class T>
void require_shape(const Place& place, const char* tensor, const Tensor<T>& values,
                   size_t num_heads, bool may_be_shared, const Shape& row) {
  if (values.shape.empty()) return;
  Shape per_head{num_heads}, shared{1};
  per_head.insert(per_head.end(), row.begin(), row.end());
  shared.insert(shared.end(), row.begin(), row.end());
  OSCAR_CHECK(values.shape == per_head || (may_be_shared && values.shape == shared),
              place.file.path(), ": ", place.name(tensor), ": expected shape ", to_string(per_head),
              may_be_shared ? " or " + to_string(shared) : "", ", got ", to_string(values.shape));
}

// max |R R^T - I| over all entries of one D x D matrix.
double orthogonality_error(const float* rotation, size_t dim) {
  double worst = 0.0;
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j <= i; ++j) {
      double dot = i == j ? -1.0 : 0.0;
      for (size_t c = 0; c < dim; ++c)
        dot +=
            static_cast<double>(rotation[i * dim + c]) * static_cast<double>(rotation[j * dim + c]);
      worst = std::max(worst, std::abs(dot));
    }
  }
  return worst;
}

void require_orthogonal(const Place& place, const char* tensor, const TensorF& rotation) {
  for (size_t head = 0; !rotation.empty() && head < rotation.extent(0); ++head) {
    const double error = orthogonality_error(rotation.at(head), rotation.extent(1));
    OSCAR_CHECK(error <= kMaxOrthogonalityError, place.file.path(), ": ", place.name(tensor),
                " of head ", head, " is not orthogonal: max |R R^T - I| = ", error, ", allowed ",
                kMaxOrthogonalityError);
  }
}

double read_clip(const Place& place, const char* name) {
  const double clip = place.file.double_attribute(place.group, name);
  OSCAR_CHECK(clip >= 0.0 && clip <= 1.0, place.file.path(), ": ", place.group, ": ", name,
              " must lie in [0, 1], got ", clip);
  return clip;
}

// Sets of factors [num_heads, n], each at least one and padded with zeros.
TensorF read_multipliers(const Place& place, const char* tensor, size_t num_heads) {
  TensorF sets = read_optional<float>(place, tensor, 2);
  if (sets.shape.empty()) return sets;
  OSCAR_CHECK(sets.extent(0) == num_heads && sets.extent(1) > 0, place.file.path(), ": ",
              place.name(tensor), ": expected shape [", num_heads, ", n], got ",
              to_string(sets.shape));
  for (size_t head = 0; head < num_heads; ++head) {
    const float* set = sets.at(head);
    const float* end = std::find(set, set + sets.extent(1), 0.0F);
    const bool valid = end != set &&
                       std::all_of(set, end, [](float f) { return f >= 0.1F && f <= 10.0F; }) &&
                       std::all_of(end, set + sets.extent(1), [](float f) { return f == 0.0F; });
    OSCAR_CHECK(valid, place.file.path(), ": ", place.name(tensor), " of head ", head,
                ": expected factors from 0.1 to 10, then zeros");
  }
  return sets;
}

BundleLayer read_layer(const Hdf5File& file, const std::string& group, const BundleInfo& info) {
  const Place place{file, group};
  const auto heads = static_cast<size_t>(info.num_kv_heads);
  BundleLayer layer;
  struct Side {
    size_t dim;
    const char *rotation, *eigenvalues, *mean, *metric, *scale_max;
    TensorF *rotation_out, *mean_out, *metric_out, *scale_max_out;
    TensorD* eigenvalues_out;
  };
  const Side sides[] = {{static_cast<size_t>(info.head_dim), "k_rotation", "k_eigenvalues",
                         "k_mean", "k_metric", "k_scale_max", &layer.k_rotation, &layer.k_mean,
                         &layer.k_metric, &layer.k_scale_max, &layer.k_eigenvalues},
                        {static_cast<size_t>(info.value_head_dim), "v_rotation", "v_eigenvalues",
                         "v_mean", "v_metric", "v_scale_max", &layer.v_rotation, &layer.v_mean,
                         &layer.v_metric, &layer.v_scale_max, &layer.v_eigenvalues}};
  for (const Side& side : sides) {
    *side.rotation_out = read_optional<float>(place, side.rotation, 3);
    *side.eigenvalues_out = read_optional<double>(place, side.eigenvalues, 2);
    *side.mean_out = read_optional<float>(place, side.mean, 2);
    *side.metric_out = read_optional<float>(place, side.metric, 3);
    *side.scale_max_out = read_optional<float>(place, side.scale_max, 1);
    require_shape(place, side.rotation, *side.rotation_out, heads, true, {side.dim, side.dim});
    require_shape(place, side.eigenvalues, *side.eigenvalues_out, heads, true, {side.dim});
    require_shape(place, side.mean, *side.mean_out, heads, false, {side.dim});
    require_shape(place, side.metric, *side.metric_out, heads, false, {side.dim, side.dim});
    require_shape(place, side.scale_max, *side.scale_max_out, heads, false, {});
    require_orthogonal(place, side.rotation, *side.rotation_out);
  }
  layer.k_position_mean = read_optional<float>(place, "k_position_mean", 2);
  layer.k_position_offset = read_optional<float>(place, "k_position_offset", 2);
  require_shape(place, "k_position_mean", layer.k_position_mean, heads, false, {sides[0].dim});
  require_shape(place, "k_position_offset", layer.k_position_offset, heads, false, {sides[0].dim});
  OSCAR_CHECK(layer.k_position_mean.empty() == layer.k_position_offset.empty(), file.path(), ": ",
              group, " has only one of k_position_mean and k_position_offset");
  layer.k_multipliers = read_multipliers(place, "k_multipliers", heads);
  layer.v_multipliers = read_multipliers(place, "v_multipliers", heads);
  layer.k_clip = read_clip(place, "k_clip");
  layer.v_clip = read_clip(place, "v_clip");
  layer.policy_json = file.string_attribute(group, "policy");
  layer.held_out_json = file.string_attribute(group, "held_out");
  return layer;
}

BundleInfo read_info(const Hdf5File& file) {
  const auto integer = [&](const char* name) {
    const int64_t value = file.int_attribute("/", name);
    OSCAR_CHECK(value >= 0, file.path(), ": attribute ", name, " is negative: ", value);
    return value;
  };
  const auto text = [&](const char* name) { return file.string_attribute("/", name); };
  BundleInfo info;
  info.recipe = text("recipe");
  info.model_architecture = text("model_architecture");
  info.model_sha256 = text("model_sha256");
  info.tokenizer_sha256 = text("tokenizer_sha256");
  info.text_sha256 = text("text_sha256");
  info.tool_version = text("tool_version");
  info.options_json = text("options");
  info.head_dim = integer("head_dim");
  info.value_head_dim = integer("value_head_dim");
  info.num_layers = integer("num_layers");
  info.num_heads = integer("num_heads");
  info.num_kv_heads = integer("num_kv_heads");
  info.rope_theta = file.double_attribute("/", "rope_theta");
  info.tokens = integer("tokens");
  info.sequence_length = integer("sequence_length");
  info.approximate = integer("approximate") != 0;
  if (file.exists("/token_fingerprints"))
    info.token_fingerprints = file.read<int64_t>("/token_fingerprints", 1).values;
  OSCAR_CHECK(std::is_sorted(info.token_fingerprints.begin(), info.token_fingerprints.end()),
              file.path(), ": /token_fingerprints are not in ascending order");
  OSCAR_CHECK(info.head_dim > 0 && info.value_head_dim > 0 && info.num_kv_heads > 0 &&
                  info.num_heads % info.num_kv_heads == 0,
              file.path(), ": impossible geometry: head_dim ", info.head_dim, ", value_head_dim ",
              info.value_head_dim, ", num_heads ", info.num_heads, ", num_kv_heads ",
              info.num_kv_heads);
  return info;
}

void write_info(Hdf5File& file, const BundleInfo& info) {
  file.write_attribute("/", "format", std::string(kFormat));
  file.write_attribute("/", "format_version", kVersion);
  file.write_attribute("/", "recipe", info.recipe);
  file.write_attribute("/", "model_architecture", info.model_architecture);
  file.write_attribute("/", "model_sha256", info.model_sha256);
  file.write_attribute("/", "tokenizer_sha256", info.tokenizer_sha256);
  file.write_attribute("/", "text_sha256", info.text_sha256);
  file.write_attribute("/", "tool_version", info.tool_version);
  file.write_attribute("/", "options", info.options_json);
  file.write_attribute("/", "head_dim", info.head_dim);
  file.write_attribute("/", "value_head_dim", info.value_head_dim);
  file.write_attribute("/", "num_layers", info.num_layers);
  file.write_attribute("/", "num_heads", info.num_heads);
  file.write_attribute("/", "num_kv_heads", info.num_kv_heads);
  file.write_attribute("/", "rope_theta", info.rope_theta);
  file.write_attribute("/", "tokens", info.tokens);
  file.write_attribute("/", "sequence_length", info.sequence_length);
  file.write_attribute("/", "approximate", static_cast<int64_t>(info.approximate ? 1 : 0));
  if (info.token_fingerprints.empty()) return;
  Tensor<int64_t> fingerprints({info.token_fingerprints.size()});
  fingerprints.values = info.token_fingerprints;
  file.write("/token_fingerprints", fingerprints);
}

template <class T>
void write_optional(Hdf5File& file, const std::string& name, const Tensor<T>& tensor) {
  if (!tensor.empty()) file.write(name, tensor);
}

}  // namespace

// A tensor that every layer has or none: one that is missing in some layers was lost. (Value means
// and scale constants are decided layer by layer.)
static void require_in_every_layer(const Bundle& bundle, const std::string& path) {
  const std::pair<const char*, TensorF BundleLayer::*> tensors[] = {
      {"k_rotation", &BundleLayer::k_rotation}, {"v_rotation", &BundleLayer::v_rotation},
      {"k_mean", &BundleLayer::k_mean},         {"k_position_mean", &BundleLayer::k_position_mean},
      {"k_metric", &BundleLayer::k_metric},     {"v_metric", &BundleLayer::v_metric}};
  for (const auto& [name, member] : tensors) {
    int64_t with = -1, without = -1;
    for (const auto& [id, layer] : bundle.layers) ((layer.*member).empty() ? without : with) = id;
    OSCAR_CHECK(with < 0 || without < 0, path, ": layer ", without, " has no ", name,
                ", which layer ", with, " has");
  }
}

Bundle read_bundle(const std::string& path) {
  const Hdf5File file = Hdf5File::open(path);
  require_format(file, kFormat, kVersion);
  Bundle bundle;
  bundle.info = read_info(file);
  for (const int64_t id : layer_ids(file)) {
    OSCAR_CHECK(id < bundle.info.num_layers, path, ": layer ", id, " in a model of ",
                bundle.info.num_layers, " layers");
    bundle.layers.emplace(id, read_layer(file, layer_group(id), bundle.info));
  }
  OSCAR_CHECK(!bundle.layers.empty(), path, ": the bundle has no layers");
  require_in_every_layer(bundle, path);
  return bundle;
}

void write_bundle(const Bundle& bundle, const std::string& path) {
  OutputPath output(path);
  Hdf5File file = Hdf5File::create(output.temporary());
  write_info(file, bundle.info);
  file.create_group("/layers");
  for (const auto& [id, layer] : bundle.layers) {
    const std::string group = layer_group(id);
    file.create_group(group);
    write_optional(file, group + "/k_rotation", layer.k_rotation);
    write_optional(file, group + "/v_rotation", layer.v_rotation);
    write_optional(file, group + "/k_eigenvalues", layer.k_eigenvalues);
    write_optional(file, group + "/v_eigenvalues", layer.v_eigenvalues);
    write_optional(file, group + "/k_mean", layer.k_mean);
    write_optional(file, group + "/v_mean", layer.v_mean);
    write_optional(file, group + "/k_position_mean", layer.k_position_mean);
    write_optional(file, group + "/k_position_offset", layer.k_position_offset);
    write_optional(file, group + "/k_metric", layer.k_metric);
    write_optional(file, group + "/v_metric", layer.v_metric);
    write_optional(file, group + "/k_scale_max", layer.k_scale_max);
    write_optional(file, group + "/v_scale_max", layer.v_scale_max);
    write_optional(file, group + "/k_multipliers", layer.k_multipliers);
    write_optional(file, group + "/v_multipliers", layer.v_multipliers);
    file.write_attribute(group, "k_clip", layer.k_clip);
    file.write_attribute(group, "v_clip", layer.v_clip);
    file.write_attribute(group, "policy", layer.policy_json);
    file.write_attribute(group, "held_out", layer.held_out_json);
  }
  file.close();
  read_bundle(output.temporary());  // what we would refuse to read is never handed out
  output.commit();
}

}  // namespace oscar
