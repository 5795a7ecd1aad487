#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/parallel.h"
#include "linalg/rotation.h"
#include "model/kv_arm_recipe.h"

namespace oscar {
namespace {

// The tensors of a bundle that concern one side of one layer.
struct BundleSide {
  const TensorF& rotation;
  const TensorF& mean;
  const TensorF *position_mean, *position_offset;  // null for values
  const TensorF& metric;
  const TensorF& scale_max;
  const TensorF& multipliers;
  double clip;
};

BundleSide bundle_side(const BundleLayer& layer, bool keys) {
  if (keys) {
    return {layer.k_rotation, layer.k_mean,      &layer.k_position_mean, &layer.k_position_offset,
            layer.k_metric,   layer.k_scale_max, layer.k_multipliers,    layer.k_clip};
  }
  return {layer.v_rotation,  layer.v_mean,        nullptr,     nullptr, layer.v_metric,
          layer.v_scale_max, layer.v_multipliers, layer.v_clip};
}

void check_bundle(const std::string& arm, const ModelConfig& config, const ArmOptions& options,
                  const Bundle& bundle) {
  const BundleInfo& info = bundle.info;
  const std::string where =
      cat("arm ", arm, ": bundle ", options.bundle_path.empty() ? "" : options.bundle_path + " ",
          "(model ", info.model_architecture, " ", info.model_sha256.substr(0, 16), ")");
  const std::string model =
      cat("model ", config.name, " (", config.architecture, " ",
          options.model_sha256.empty() ? "" : options.model_sha256.substr(0, 16), ")");
  const auto same = [&](const char* what, double of_bundle, double of_model) {
    OSCAR_CHECK(of_bundle == of_model, where, " has ", what, " ", of_bundle, ", ", model, " has ",
                of_model);
  };
  same("num_layers", static_cast<double>(info.num_layers), static_cast<double>(config.num_layers));
  same("num_heads", static_cast<double>(info.num_heads), static_cast<double>(config.num_heads));
  same("num_kv_heads", static_cast<double>(info.num_kv_heads),
       static_cast<double>(config.num_kv_heads));
  same("head_dim", static_cast<double>(info.head_dim), static_cast<double>(config.head_dim));
  same("value_head_dim", static_cast<double>(info.value_head_dim),
       static_cast<double>(config.head_dim));
  same("rope_theta", info.rope_theta, config.rope.theta);
  OSCAR_CHECK(info.model_architecture.empty() || config.architecture.empty() ||
                  info.model_architecture == config.architecture,
              where, " was made for another architecture than ", model);
  OSCAR_CHECK(options.model_sha256.empty() || info.model_sha256.empty() ||
                  info.model_sha256 == options.model_sha256,
              where, " was made for another model than ", model,
              ": the SHA-256 of the weights differ");
  for (size_t layer = 0; layer < config.num_layers; ++layer) {
    OSCAR_CHECK(bundle.layers.contains(static_cast<int64_t>(layer)), where, " has no layer ", layer,
                " of the ", config.num_layers, " of ", model);
  }
}

TensorF hadamard_rotation(const std::string& where, const SideRecipe& recipe, size_t head_dim) {
  TensorF rotation({1, head_dim, head_dim});
  try {
    rotation.values = to_float(hadamard_matrix(
        head_dim, recipe.block_hadamard ? HadamardForm::kBlock : HadamardForm::kFull));
  } catch (const Error& error) {
    fail(where, ": ", error.what(), "; suffix block-hadamard allows the block form");
  }
  return rotation;
}

// A = R^T M R of one head in double; rotation null = identity.
std::vector<double> rotated_metric(const float* metric, const float* rotation, size_t dim) {
  std::vector<double> m(metric, metric + dim * dim);
  if (rotation == nullptr) return m;
  std::vector<double> product(dim * dim, 0.0);  // M R
  std::vector<double> result(dim * dim, 0.0);   // R^T (M R)
  for (size_t i = 0; i < dim; ++i) {
    for (size_t p = 0; p < dim; ++p) {
      const double factor = m[i * dim + p];
      for (size_t j = 0; j < dim; ++j) product[i * dim + j] += factor * rotation[p * dim + j];
    }
  }
  for (size_t p = 0; p < dim; ++p) {
    for (size_t i = 0; i < dim; ++i) {
      const double factor = rotation[p * dim + i];
      for (size_t j = 0; j < dim; ++j) result[i * dim + j] += factor * product[p * dim + j];
    }
  }
  return result;
}

std::shared_ptr<const EncoderMetric> head_metric(const std::string& where, const SideRecipe& recipe,
                                                 const SideArm& side, const TensorF* metric,
                                                 size_t head, size_t dim) {
  std::vector<double> rotated(dim * dim, 0.0);
  if (recipe.identity_metric) {
    for (size_t i = 0; i < dim; ++i) rotated[i * dim + i] = 1.0;
  } else {
    rotated = rotated_metric(metric->at(head), side.rotation_of(head), dim);
  }
  try {
    return std::make_shared<EncoderMetric>(
        make_encoder_metric(rotated.data(), static_cast<int>(dim), recipe.damping));
  } catch (const Error& error) {
    fail(where, ", KV head ", head, ": ", error.what());
  }
}

// A head's set of factors without its padding.
std::vector<double> factors(const TensorF& sets, size_t head) {
  const float* begin = sets.at(head);
  return {begin, std::find(begin, begin + sets.extent(1), 0.0F)};
}

// Codecs of one side: one for all heads where nothing depends on the head.
void add_codecs(const std::string& where, const SideRecipe& recipe, CodecSpec spec,
                const BundleSide* bundle, const ModelConfig& config, SideArm& side) {
  const bool log8 = spec.meta == MetaFormat::kLog8;
  const bool with_metric = recipe.needs_metric();
  const size_t heads = config.num_kv_heads;
  if (with_metric && !recipe.identity_metric) {
    OSCAR_CHECK(bundle != nullptr && !bundle->metric.empty(), where,
                ": the bundle has no attention metric, which the feedback encoder and the metric "
                "gain need (calibrate with --recipe light, lean or best)");
  }
  if (log8) {
    OSCAR_CHECK(bundle != nullptr && !bundle->scale_max.empty(), where,
                ": the bundle has no scale constants, which meta=log8 needs");
  }
  const bool decided = recipe.multipliers_where_decided && with_metric && bundle != nullptr &&
                       !bundle->multipliers.empty();
  for (size_t head = 0; head < (with_metric || log8 ? heads : 1); ++head) {
    if (log8) spec.log8_scale_max = bundle->scale_max.values[head];
    if (decided) spec.feedback.multipliers = factors(bundle->multipliers, head);
    std::shared_ptr<const EncoderMetric> metric;
    if (with_metric) {
      metric = head_metric(where, recipe, side, bundle == nullptr ? nullptr : &bundle->metric, head,
                           config.head_dim);
    }
    try {
      side.codecs.push_back(make_codec(spec, metric));
    } catch (const Error& error) {
      fail(where, ", KV head ", head, ": ", error.what());
    }
  }
}

SideArm build_side(const std::string& where, const SideRecipe& recipe, const BundleSide* bundle,
                   const ModelConfig& config) {
  SideArm side;
  if (recipe.rotation == RotationKind::kHadamard) {
    side.rotation = hadamard_rotation(where, recipe, config.head_dim);
  } else if (recipe.rotation == RotationKind::kBundle) {
    side.rotation = bundle->rotation;
  }
  if (recipe.centering == SideRecipe::Centering::kPosition) {
    OSCAR_CHECK(!bundle->position_mean->empty(), where,
                ": the bundle has no key mean before RoPE, which k.position needs (calibrate a "
                "recipe with centered keys, from the model or from a capture that names its RoPE)");
    OSCAR_CHECK(config.rope.rotary_dim > 0, where,
                ": the RoPE of the model is not known, which k.position needs (a capture of an "
                "earlier version does not name it: capture again)");
    side.position_mean = *bundle->position_mean;
    side.mean = *bundle->position_offset;
  } else if (recipe.centering != SideRecipe::Centering::kNever) {
    OSCAR_CHECK(recipe.centering == SideRecipe::Centering::kWhereDecided || !bundle->mean.empty(),
                where, ": the bundle has no mean, which a centered arm needs");
    side.mean = bundle->mean;
  }
  CodecSpec spec = recipe.codec;
  spec.head_dim = static_cast<int>(config.head_dim);
  if (recipe.clip_from_bundle) spec.clip_ratio = bundle->clip;
  add_codecs(where, recipe, spec, bundle, config, side);
  return side;
}

// Log-8 metadata for a side that prefers it, when every layer of the bundle has the constants.
void choose_metadata(SideRecipe& recipe, const Bundle* bundle, bool keys) {
  if (!recipe.log8_where_known || bundle == nullptr) return;
  const bool known = std::all_of(
      bundle->layers.begin(), bundle->layers.end(),
      [keys](const auto& item) { return !bundle_side(item.second, keys).scale_max.empty(); });
  if (known) recipe.codec.meta = MetaFormat::kLog8;
}

// The start range that the decided multipliers belong to: that of the arm of the bundle's recipe.
StartRange decided_start(const Bundle& bundle) {
  return bundle.info.recipe == "best" ? best_feedback().start : FeedbackOptions{}.start;
}

std::string rounded(double value) {
  std::ostringstream text;
  text.precision(4);
  text << value;
  return text.str();
}

const char* meta_name(MetaFormat meta) {
  switch (meta) {
    case MetaFormat::kScaleZeroFp32:
      return "scale/zero fp32";
    case MetaFormat::kScaleZeroBf16:
      return "scale/zero bf16";
    case MetaFormat::kScaleZeroFp16:
      return "scale/zero fp16";
    case MetaFormat::kScaleMinFp16:
      return "scale/min fp16";
    case MetaFormat::kScaleMinFp16First:
      return "scale/min fp16, rounded first";
    case MetaFormat::kLog8:
      return "log-8 scale, 8-bit zero";
    case MetaFormat::kSymmetricFp16:
      return "symmetric fp16 scale";
  }
  return "";
}

const char* start_name(StartRange start) {
  switch (start) {
    case StartRange::kClip:
      return "clip";
    case StartRange::kGrid:
      return "grid";
    case StartRange::kMetricGrid:
      return "metric grid";
  }
  return "";
}

bool multipliers_differ(const std::vector<LayerArm>& layers, SideArm LayerArm::*member) {
  const auto set = [](const std::shared_ptr<const Codec>& codec) -> const std::vector<double>& {
    return codec->spec().feedback.multipliers;
  };
  const std::vector<double>& first = set((layers.front().*member).codecs.front());
  return std::any_of(layers.begin(), layers.end(), [&](const LayerArm& layer) {
    const auto& codecs = (layer.*member).codecs;
    return std::any_of(codecs.begin(), codecs.end(),
                       [&](const auto& codec) { return set(codec) != first; });
  });
}

std::string describe_side(const std::vector<LayerArm>& layers, SideArm LayerArm::*member) {
  const SideArm& side = layers.front().*member;
  const CodecSpec& spec = side.codec(0).spec();
  size_t centered = 0;
  for (const LayerArm& layer : layers) centered += (layer.*member).mean.empty() ? 0 : 1;
  const bool by_position = !side.position_mean.empty();
  std::string text = cat("INT", spec.bits, " group ", spec.group == 0 ? spec.head_dim : spec.group,
                         spec.axis == GroupAxis::kTokens ? " tokens" : "");
  text += side.rotation.empty()         ? ", not rotated"
          : side.rotation.shape[0] == 1 ? ", rotated"
                                        : ", rotated per head";
  if (by_position) {
    text += ", centered by position";
  } else if (centered > 0) {
    text += centered == layers.size() ? ", centered"
                                      : cat(", centered in ", centered, " of ", layers.size());
  }
  if (spec.levels == Levels::kTrellis) text += ", trellis levels";
  if (spec.levels == Levels::kLloydMax || spec.levels == Levels::kLloydExact) {
    text += ", Lloyd-Max levels";
  }
  if (spec.clip_ratio > 0.0) text += ", clip " + rounded(spec.clip_ratio);
  if (spec.encoder == Encoder::kFeedback) {
    const FeedbackOptions& f = spec.feedback;
    text += cat(
        f.feedback ? ", error feedback (" : ", metric search (", start_name(f.start), " start, ",
        multipliers_differ(layers, member) ? "decided" : std::to_string(f.multipliers.size()),
        " multipliers, ", f.sweeps, " sweeps, ", f.refits, " refits)");
  }
  if (spec.gain == GainRule::kPlain) text += ", plain gain";
  if (spec.gain == GainRule::kMetric) text += ", metric gain";
  return text + ", " + meta_name(spec.meta);
}

}  // namespace

KvArm make_arm(const std::string& name, const ModelConfig& config, const ArmOptions& options,
               const Bundle* bundle) {
  ArmRecipe recipe = parse_arm(name, options);
  KvArm arm;
  arm.name = name;
  arm.quantized = recipe.quantized;
  arm.high_precision = recipe.high_precision;
  arm.windows = recipe.windows;
  if (!recipe.quantized) {
    arm.bits_nominal = recipe.high_precision == HighPrecision::kFp32 ? 32.0 : 16.0;
    return arm;
  }
  if (recipe.needs_bundle()) {
    OSCAR_CHECK(bundle != nullptr, "arm ", name, ": needs a calibration bundle");
    check_bundle(name, config, options, *bundle);
    arm.bundle_sha256 = options.bundle_sha256;
    choose_metadata(recipe.k, bundle, true);
    choose_metadata(recipe.v, bundle, false);
    for (SideRecipe* side : {&recipe.k, &recipe.v})
      side->multipliers_where_decided &= side->codec.feedback.start == decided_start(*bundle);
  }
  if (recipe.k.centering == SideRecipe::Centering::kPosition) arm.rope = config.rope;
  arm.layers.resize(config.num_layers);
  parallel_for(config.num_layers, [&](size_t layer) {
    for (const bool keys : {true, false}) {
      const std::string where = cat("arm ", name, ", layer ", layer, keys ? ", keys" : ", values");
      const SideRecipe& side = keys ? recipe.k : recipe.v;
      SideArm& target = keys ? arm.layers[layer].k : arm.layers[layer].v;
      if (recipe.needs_bundle()) {
        const BundleSide source = bundle_side(bundle->layers.at(static_cast<int64_t>(layer)), keys);
        target = build_side(where, side, &source, config);
      } else {
        target = build_side(where, side, nullptr, config);
      }
    }
  });
  check(arm, config);
  const LayerArm& first = arm.layers.front();
  arm.bits_nominal =
      (nominal_bits(first.k.codec(0).spec()) + nominal_bits(first.v.codec(0).spec())) / 2.0;
  return arm;
}

std::string describe(const KvArm& arm) {
  const char* high = arm.high_precision == HighPrecision::kBf16 ? "BF16" : "FP32";
  if (!arm.quantized) return cat(arm.name, ": ", high, " cache");
  return cat(arm.name, ": ", arm.windows.mode == WindowMode::kExact ? "exact" : "serving",
             " windows ", arm.windows.sink, "/", arm.windows.recent, " ", high, "; K ",
             describe_side(arm.layers, &LayerArm::k), "; V ",
             describe_side(arm.layers, &LayerArm::v), "; ", rounded(arm.bits_nominal),
             " bits nominal");
}

}  // namespace oscar
