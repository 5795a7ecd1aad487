#include "model/rope_config.h"

#include <cmath>

#include "base/error.h"

namespace oscar {
namespace {

// YaRN's temperature: 1 if s <= 1 else 0.1 k ln s + 1.
double yarn_mscale(double factor, double k) {
  return factor <= 1.0 ? 1.0 : 0.1 * k * std::log(factor) + 1.0;
}

// The object that holds the RoPE fields, null when there is none.
const JsonValue* scaling_object(const JsonObject& json) {
  const JsonValue* parameters = json.find("rope_parameters");
  if (parameters == nullptr) return json.find("rope_scaling");
  OSCAR_CHECK(parameters->is_object(), json.where(), ": field rope_parameters: expected an object");
  // One object a layer type: they may differ, and then one table does not serve all layers.
  const JsonValue* only = nullptr;
  for (const auto& [key, value] : parameters->members) {
    if (!value.is_object()) continue;
    OSCAR_CHECK(only == nullptr, json.where(),
                ": field rope_parameters: several layer types are not supported (", key, ")");
    only = &value;
  }
  return only == nullptr ? parameters : only;
}

// A number that may stand in the RoPE object or at the top level; inside wins, a differing pair is
// reported.
const JsonValue* either(const JsonObject& json, const JsonObject* inside, const char* key,
                        ModelConfig& config) {
  const JsonValue* outer = json.find(key);
  const JsonValue* inner = inside == nullptr ? nullptr : inside->find(key);
  if (outer != nullptr && inner != nullptr && outer->number != inner->number) {
    config.warnings.push_back(cat(json.where(), ": ", key, " is ", outer->number,
                                  " at the top level and ", inner->number,
                                  " in the RoPE object, which wins"));
  }
  const JsonValue* found = inner != nullptr ? inner : outer;
  OSCAR_CHECK(found == nullptr || found->is_number(), json.where(), ": field ", key,
              ": expected a number");
  return found;
}

void read_llama3(const JsonObject& json, const JsonObject& inside, RopeConfig& rope) {
  rope.factor = inside.number("factor");
  rope.low_freq_factor = inside.number("low_freq_factor");
  rope.high_freq_factor = inside.number("high_freq_factor");
  rope.original_context_length = inside.has("original_max_position_embeddings")
                                     ? inside.number("original_max_position_embeddings")
                                     : json.number("original_max_position_embeddings");
}

void read_yarn(const JsonObject& json, const JsonObject& inside, const ModelConfig& config,
               RopeConfig& rope) {
  const auto context = static_cast<double>(config.context_length);
  const char* const key = "original_max_position_embeddings";
  rope.original_context_length = json.has(key) ? json.number(key) : inside.number(key, context);
  OSCAR_CHECK(rope.original_context_length > 0.0, json.where(), ": field ", key,
              ": expected a positive number, got ", rope.original_context_length);
  rope.factor = inside.number("factor", context / rope.original_context_length);
  rope.beta_fast = inside.number("beta_fast", 32.0);
  rope.beta_slow = inside.number("beta_slow", 1.0);
  rope.truncate = inside.boolean("truncate", true);
  const double mscale = inside.number("mscale", 0.0);
  const double mscale_all = inside.number("mscale_all_dim", 0.0);
  const double automatic =
      mscale != 0.0 && mscale_all != 0.0
          ? yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, mscale_all)
          : yarn_mscale(rope.factor, 1.0);
  rope.attention_factor = inside.number("attention_factor", automatic);
}

}  // namespace

void read_rope_from_json(const JsonObject& json, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  const JsonValue* object = scaling_object(json);
  JsonValue nothing;
  nothing.kind = JsonValue::Kind::kObject;
  const JsonObject inside(object == nullptr ? nothing : *object, json.where() + ": RoPE object");

  const JsonValue* theta = either(json, &inside, "rope_theta", config);
  if (theta == nullptr) {
    config.warnings.push_back(cat(json.where(), ": rope_theta is missing, 10000 is used"));
  } else {
    rope.theta = theta->number;
  }
  const JsonValue* partial = either(json, &inside, "partial_rotary_factor", config);
  const double fraction = partial == nullptr ? 1.0 : partial->number;
  OSCAR_CHECK(fraction > 0.0 && fraction <= 1.0, json.where(),
              ": field partial_rotary_factor: expected a number in (0, 1], got ", fraction);
  rope.rotary_dim = static_cast<size_t>(static_cast<double>(config.head_dim) * fraction);

  const std::string type = inside.string("rope_type", inside.string("type", "default"));
  if (type == "default") {
    rope.scaling = "none";
  } else if (type == "linear") {
    rope.scaling = type;
    rope.factor = inside.number("factor");
  } else if (type == "llama3") {
    rope.scaling = type;
    read_llama3(json, inside, rope);
  } else if (type == "yarn") {
    rope.scaling = type;
    read_yarn(json, inside, config, rope);
  } else {
    fail(json.where(), ": RoPE type ", type, ", expected default, linear, llama3 or yarn");
  }
}

void read_rope_from_gguf(const GgufFile& file, const std::string& prefix, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  const std::string scaling = prefix + ".rope.scaling.";
  const int64_t width =
      file.integer(prefix + ".rope.dimension_count", static_cast<int64_t>(config.head_dim));
  OSCAR_CHECK(width > 0 && static_cast<size_t>(width) <= config.head_dim, file.path(), ": key ",
              prefix, ".rope.dimension_count: expected 1..", config.head_dim, ", got ", width);
  OSCAR_CHECK(config.architecture != "llama" || static_cast<size_t>(width) == config.head_dim,
              file.path(), ": key ", prefix, ".rope.dimension_count: expected the head width ",
              config.head_dim, ", got ", width);
  rope.rotary_dim = static_cast<size_t>(width);
  rope.theta = file.number(prefix + ".rope.freq_base", 10000.0);
  rope.factor = file.number(scaling + "factor", file.number(prefix + ".rope.scale_linear", 1.0));
  if (rope.factor == 0.0) rope.factor = 1.0;

  const std::string_view type = file.string(scaling + "type", "linear");
  if (type == "none" || (type == "linear" && rope.factor == 1.0)) {
    rope.scaling = "none";
    rope.factor = 1.0;
  } else if (type == "linear") {
    rope.scaling = "linear";
  } else if (type == "yarn") {
    rope.scaling = "yarn";
    rope.original_context_length = file.number(scaling + "original_context_length",
                                               static_cast<double>(config.context_length));
    rope.beta_fast = file.number(scaling + "yarn_beta_fast", 32.0);
    rope.beta_slow = file.number(scaling + "yarn_beta_slow", 1.0);
    const double log_multiplier = file.number(scaling + "yarn_log_multiplier", 0.0);
    rope.attention_factor = yarn_mscale(rope.factor, 1.0);
    if (log_multiplier != 0.0) rope.attention_factor /= yarn_mscale(rope.factor, log_multiplier);
    rope.attention_factor *= file.number(scaling + "attn_factor", 1.0);
  } else {
    fail(file.path(), ": key ", scaling, "type: expected none, linear or yarn, got ", type);
  }

  const GgufTensor* divisors = file.find_tensor("rope_freqs.weight");
  if (divisors == nullptr) return;
  OSCAR_CHECK(divisors->ne == std::vector<size_t>{rope.rotary_dim / 2}, file.path(),
              ": tensor rope_freqs.weight: expected ", to_string(Shape{rope.rotary_dim / 2}),
              ", got ", to_string(divisors->shape()));
  rope.frequency_divisors.resize(rope.rotary_dim / 2);
  dequantize_row(weight_type(file, *divisors), divisors->bytes, rope.frequency_divisors.size(),
                 rope.frequency_divisors.data());
}

}  // namespace oscar
