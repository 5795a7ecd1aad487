#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "io/gguf.h"
#include "io/json_file.h"
#include "model/rope_config.h"

namespace oscar {
namespace {

// Bounds that no model approaches: they keep products of sizes far from overflow.
constexpr int64_t kMaxExtent = int64_t{1} << 24;  // hidden, intermediate, vocabulary
constexpr int64_t kMaxHeads = int64_t{1} << 16;   // heads, head width, layers
constexpr int64_t kMaxContext = int64_t{1} << 31;

size_t bounded(int64_t value, int64_t limit, const std::string& where, const std::string& field) {
  OSCAR_CHECK(value > 0 && value <= limit, where, ": ", field, ": expected 1..", limit, ", got ",
              value);
  return static_cast<size_t>(value);
}

bool known(const std::string& architecture) {
  return architecture == "llama" || architecture == "qwen2" || architecture == "qwen3";
}

// A count that is a scalar or one value a layer; all layers must agree.
int64_t uniform_count(const GgufFile& file, const std::string& key, int64_t otherwise) {
  const GgufValue* value = file.find(key);
  if (value == nullptr) return otherwise;
  if (value->type != GgufType::kArray) return file.integer(key);
  const std::vector<int64_t> counts = file.integers(key);
  OSCAR_CHECK(!counts.empty(), file.path(), ": key ", key, ": the array is empty");
  for (const int64_t count : counts) {
    OSCAR_CHECK(count == counts[0], file.path(), ": key ", key,
                ": layers with different head counts are not supported (", counts[0], " and ",
                count, ")");
  }
  return counts[0];
}

std::string model_type(const JsonObject& json) {
  std::string type = json.string("model_type", "");
  const JsonValue* classes = json.find("architectures");
  if (type.empty() && classes != nullptr && classes->is_array() && !classes->items.empty()) {
    const std::string& name = classes->items[0].text;
    if (name == "LlamaForCausalLM") type = "llama";
    if (name == "Qwen2ForCausalLM") type = "qwen2";
    if (name == "Qwen3ForCausalLM") type = "qwen3";
    OSCAR_CHECK(!type.empty(), json.where(), ": field architectures: ", name,
                " is not supported; expected llama, qwen2 or qwen3");
  }
  OSCAR_CHECK(!type.empty(), json.where(), ": field model_type is missing");
  OSCAR_CHECK(known(type), json.where(), ": field model_type: ", type,
              " is not supported; expected llama, qwen2 or qwen3");
  return type;
}

// Layers that attend to a sliding window only are refused: the runtime has none.
void check_no_sliding_window(const JsonObject& json, const ModelConfig& config) {
  const JsonValue* types = json.find("layer_types");
  if (types != nullptr) {
    for (const JsonValue& type : types->items) {
      OSCAR_CHECK(type.text == "full_attention", json.where(), ": field layer_types: ", type.text,
                  " is not supported; expected full_attention");
    }
    return;
  }
  if (!json.boolean("use_sliding_window", false) || !json.has("sliding_window")) return;
  const int64_t window = json.integer("sliding_window");
  const int64_t first = json.integer("max_window_layers", 0);
  OSCAR_CHECK(first >= static_cast<int64_t>(config.num_layers) ||
                  window >= static_cast<int64_t>(config.context_length),
              json.where(), ": field use_sliding_window: a sliding window of ", window,
              " tokens from layer ", first, " on is not supported");
}

}  // namespace

void check(const ModelConfig& config, const std::string& where) {
  OSCAR_CHECK(config.num_heads % config.num_kv_heads == 0, where, ": ", config.num_heads,
              " attention heads are not a multiple of ", config.num_kv_heads, " key-value heads");
  OSCAR_CHECK(std::isfinite(config.rms_norm_eps) && config.rms_norm_eps > 0.0, where,
              ": RMSNorm epsilon: expected a positive number, got ", config.rms_norm_eps);
  check(config.rope, where);
}

void check(const RopeConfig& rope, const std::string& where) {
  OSCAR_CHECK(rope.rotary_dim > 0 && rope.rotary_dim % 2 == 0, where,
              ": rotary width: expected an even number, got ", rope.rotary_dim);
  const auto positive = [&](const char* name, double value) {
    OSCAR_CHECK(std::isfinite(value) && value > 0.0, where, ": RoPE ", name,
                ": expected a positive number, got ", value);
  };
  positive("theta", rope.theta);
  positive("factor", rope.factor);
  positive("attention factor", rope.attention_factor);
  if (rope.scaling == "llama3" || rope.scaling == "yarn") {
    positive("original context length", rope.original_context_length);
  }
  if (rope.scaling == "llama3") {
    positive("low_freq_factor", rope.low_freq_factor);
    OSCAR_CHECK(
        std::isfinite(rope.high_freq_factor) && rope.high_freq_factor > rope.low_freq_factor, where,
        ": RoPE high_freq_factor: expected more than low_freq_factor ", rope.low_freq_factor,
        ", got ", rope.high_freq_factor);
  }
  if (rope.scaling == "yarn") {
    positive("beta_fast", rope.beta_fast);
    positive("beta_slow", rope.beta_slow);
    OSCAR_CHECK(rope.theta > 1.0, where, ": RoPE theta: expected more than 1 for yarn, got ",
                rope.theta);
  }
  for (const float divisor : rope.frequency_divisors) {
    positive("frequency divisor (rope_freqs.weight)", static_cast<double>(divisor));
  }
}

ModelConfig config_from_gguf(const GgufFile& file) {
  const std::string& where = file.path();
  ModelConfig config;
  config.architecture = file.string("general.architecture");
  OSCAR_CHECK(known(config.architecture), where, ": architecture ", config.architecture,
              " is not supported; expected llama, qwen2 or qwen3");
  const std::string prefix = config.architecture;
  const auto required = [&](const char* name, int64_t limit) {
    const std::string key = prefix + name;
    return bounded(file.integer(key), limit, where, "key " + key);
  };
  config.name = file.string("general.name", std::filesystem::path(where).stem().string());
  config.num_layers = required(".block_count", kMaxHeads);
  config.context_length = required(".context_length", kMaxContext);
  config.hidden_size = required(".embedding_length", kMaxExtent);
  config.intermediate_size = required(".feed_forward_length", kMaxExtent);
  const std::string heads_key = prefix + ".attention.head_count";
  OSCAR_CHECK(file.has(heads_key), where, ": key ", heads_key, " is missing");
  const int64_t heads = uniform_count(file, heads_key, 0);
  config.num_heads = bounded(heads, kMaxHeads, where, "key " + heads_key);
  const std::string kv_key = prefix + ".attention.head_count_kv";
  config.num_kv_heads =
      bounded(uniform_count(file, kv_key, heads), kMaxHeads, where, "key " + kv_key);

  const std::string key_length = prefix + ".attention.key_length";
  OSCAR_CHECK(file.has(key_length) || config.hidden_size % config.num_heads == 0, where, ": key ",
              key_length, " is missing and ", config.hidden_size, " is not a multiple of ",
              config.num_heads, " heads");
  const auto even_share = static_cast<int64_t>(config.hidden_size / config.num_heads);
  config.head_dim =
      bounded(file.integer(key_length, even_share), kMaxHeads, where, "key " + key_length);
  const auto head_dim = static_cast<int64_t>(config.head_dim);
  const int64_t value_length = file.integer(prefix + ".attention.value_length", head_dim);
  OSCAR_CHECK(value_length == head_dim, where, ": key ", prefix,
              ".attention.value_length: expected the key width ", head_dim, ", got ", value_length);
  if (file.has(prefix + ".vocab_size")) config.vocab_size = required(".vocab_size", kMaxExtent);
  config.rms_norm_eps = file.number(prefix + ".attention.layer_norm_rms_epsilon");
  OSCAR_CHECK(file.integer(prefix + ".expert_count", 0) == 0, where, ": key ", prefix,
              ".expert_count: mixtures of experts are not supported");
  const int64_t window = file.integer(prefix + ".attention.sliding_window", 0);
  OSCAR_CHECK(window <= 0 || window >= static_cast<int64_t>(config.context_length), where, ": key ",
              prefix, ".attention.sliding_window: a sliding window of ", window,
              " tokens is not supported");

  config.qk_norm = config.architecture == "qwen3";
  config.qkv_bias = config.architecture == "qwen2" ||
                    file.find_tensor("blk.0.attn_q.bias") != nullptr ||
                    file.find_tensor("blk.0.attn_qkv.bias") != nullptr;
  config.output_bias = file.find_tensor("blk.0.attn_output.bias") != nullptr;
  config.tied_embeddings = file.find_tensor("output.weight") == nullptr;
  read_rope_from_gguf(file, prefix, config);

  config.bos_token_id = file.integer("tokenizer.ggml.bos_token_id", -1);
  config.add_bos = file.boolean("tokenizer.ggml.add_bos_token", false);
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (!file.has(key)) continue;
    const int64_t id = file.integer(key);
    auto& ids = config.eos_token_ids;
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }
  check(config, where);
  return config;
}

ModelConfig config_from_folder(const std::string& folder) {
  const std::filesystem::path root(folder);
  const std::string where = (root / "config.json").string();
  const JsonValue document = read_json_file(where);
  const JsonObject json(document, where);
  ModelConfig config;
  config.architecture = model_type(json);
  config.name = std::filesystem::weakly_canonical(root).filename().string();
  const auto required = [&](const char* field, int64_t limit) {
    return bounded(json.integer(field), limit, where, cat("field ", field));
  };
  config.num_layers = required("num_hidden_layers", kMaxHeads);
  config.hidden_size = required("hidden_size", kMaxExtent);
  config.intermediate_size = required("intermediate_size", kMaxExtent);
  config.num_heads = required("num_attention_heads", kMaxHeads);
  config.num_kv_heads = json.has("num_key_value_heads") ? required("num_key_value_heads", kMaxHeads)
                                                        : config.num_heads;
  OSCAR_CHECK(json.has("head_dim") || config.hidden_size % config.num_heads == 0, where,
              ": field hidden_size: ", config.hidden_size, " is not a multiple of ",
              config.num_heads, " heads, and head_dim is missing");
  config.head_dim = json.has("head_dim") ? required("head_dim", kMaxHeads)
                                         : config.hidden_size / config.num_heads;
  config.vocab_size = required("vocab_size", kMaxExtent);
  config.context_length = required("max_position_embeddings", kMaxContext);
  config.rms_norm_eps = json.number("rms_norm_eps");
  const std::string activation = json.string("hidden_act", "silu");
  OSCAR_CHECK(activation == "silu", where, ": field hidden_act: expected silu, got ", activation);
  OSCAR_CHECK(!json.boolean("mlp_bias", false), where,
              ": field mlp_bias: biases in the MLP are not supported");
  OSCAR_CHECK(!json.has("quantization_config"), where,
              ": field quantization_config: quantized Hugging Face weights are not supported (GGUF "
              "files are)");
  const bool bias = json.boolean("attention_bias", false);
  config.qkv_bias = config.architecture == "qwen2" || bias;
  config.output_bias = config.architecture != "qwen2" && bias;
  config.qk_norm = config.architecture == "qwen3";
  config.tied_embeddings = json.boolean("tie_word_embeddings", false);
  check_no_sliding_window(json, config);
  read_rope_from_json(json, config);

  const JsonValue* eos = json.find("eos_token_id");
  if (eos != nullptr && eos->is_array()) {
    for (const JsonValue& id : eos->items) {
      OSCAR_CHECK(id.is_integer(), where, ": field eos_token_id: expected integers");
      config.eos_token_ids.push_back(id.integer);
    }
  } else if (eos != nullptr) {
    config.eos_token_ids.push_back(json.integer("eos_token_id"));
  }
  config.bos_token_id = json.integer("bos_token_id", -1);
  check(config, where);
  return config;
}

}  // namespace oscar
