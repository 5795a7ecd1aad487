// Configurations from config.json and GGUF keys: defaults, RoPE variants, refusals.
#include <catch2/catch.hpp>

#include "base/error.h"
#include "io/gguf.h"
#include "model/config.h"
#include "support/paths.h"
#include "support/tiny_model.h"

using namespace oscar;
using Catch::Matchers::Contains;
using oscar_test::GgufWriter;
using oscar_test::TemporaryFolder;
using oscar_test::TinyModel;

namespace {

// A config.json of a 64-wide model with 4 heads; `fields` come first, so that they can replace the
// rest only by being absent there.
std::string base_json(const std::string& fields, const std::string& model_type = "llama") {
  return "{" + fields + (fields.empty() ? "" : ", ") + "\"model_type\": \"" + model_type +
         "\", \"hidden_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
         "\"intermediate_size\": 96, \"vocab_size\": 160, \"max_position_embeddings\": 4096, "
         "\"rms_norm_eps\": 1e-6}";
}
ModelConfig from_json(const std::string& text) {
  const TemporaryFolder folder;
  oscar_test::write_file((folder / "config.json").string(), text);
  return config_from_folder(folder.path().string());
}
std::string json_refusal(const std::string& text) {
  try {
    from_json(text);
  } catch (const Error& error) {
    CHECK_THAT(error.what(), Contains("config.json"));
    return error.what();
  }
  return "";
}
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}
ModelConfig rope_json(const std::string& fields) { return from_json(base_json(fields)); }

template <class Change>
ModelConfig from_gguf(const TinyModel& model, Change&& change) {
  const TemporaryFolder folder;
  GgufWriter writer = TinyModel(model).fill().gguf();
  change(writer);
  writer.write((folder / "m.gguf").string());
  return config_from_gguf(*GgufFile::open((folder / "m.gguf").string()));
}
template <class Change>
std::string gguf_refusal(const TinyModel& model, Change&& change) {
  try {
    from_gguf(model, change);
  } catch (const Error& error) {
    CHECK_THAT(error.what(), Contains("m.gguf"));
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("defaults of config.json", "[config]") {
  const ModelConfig config = from_json(base_json(""));
  CHECK(config.architecture == "llama");
  CHECK(config.num_kv_heads == 4);
  CHECK(config.head_dim == 16);
  CHECK(config.group_size() == 1);
  CHECK(config.rms_norm_eps == 1e-6);
  CHECK_FALSE(config.tied_embeddings);
  CHECK_FALSE(config.qkv_bias);
  CHECK_FALSE(config.qk_norm);
  CHECK(config.rope.theta == 10000.0);
  CHECK(config.rope.rotary_dim == 16);
  CHECK(config.rope.scaling == "none");
  REQUIRE(config.warnings.size() == 1);
  CHECK_THAT(config.warnings[0], Contains("rope_theta is missing"));
  CHECK(config.eos_token_ids.empty());
  CHECK(config.bos_token_id == -1);

  const ModelConfig given = from_json(
      base_json("\"num_key_value_heads\": 2, \"head_dim\": 32, \"rope_theta\": 5e5, "
                "\"tie_word_embeddings\": true, \"eos_token_id\": [7, 8], \"bos_token_id\": 1"));
  CHECK(given.num_kv_heads == 2);
  CHECK(given.head_dim == 32);
  CHECK(given.rope.theta == 5e5);
  CHECK(given.tied_embeddings);
  CHECK(given.eos_token_ids == std::vector<int64_t>{7, 8});
  CHECK(given.bos_token_id == 1);
  CHECK(given.warnings.empty());
  CHECK(from_json(base_json("\"head_dim\": null")).head_dim == 16);
}

TEST_CASE("what a family fixes", "[config]") {
  const ModelConfig qwen2 = from_json(base_json("", "qwen2"));
  CHECK(qwen2.qkv_bias);
  CHECK_FALSE(qwen2.output_bias);
  const ModelConfig qwen3 = from_json(base_json("\"attention_bias\": false", "qwen3"));
  CHECK(qwen3.qk_norm);
  CHECK_FALSE(qwen3.qkv_bias);
  const ModelConfig llama = from_json(base_json("\"attention_bias\": true"));
  CHECK(llama.qkv_bias);
  CHECK(llama.output_bias);
  const std::string by_class = replaced(base_json("\"architectures\": [\"Qwen3ForCausalLM\"]"),
                                        "\"model_type\": \"llama\", ", "");
  CHECK(from_json(by_class).architecture == "qwen3");
}

TEST_CASE("config.json is refused by field", "[config]") {
  const std::string good = base_json("");
  CHECK_THAT(json_refusal(base_json("", "mamba")), Contains("model_type: mamba"));
  CHECK_THAT(json_refusal(replaced(good, "\"model_type\": \"llama\", ", "")),
             Contains("model_type is missing"));
  CHECK_THAT(json_refusal(replaced(base_json("\"architectures\": [\"MambaForCausalLM\"]"),
                                   "\"model_type\": \"llama\", ", "")),
             Contains("MambaForCausalLM"));
  CHECK_THAT(json_refusal(replaced(good, "\"hidden_size\": 64, ", "")),
             Contains("hidden_size is missing"));
  CHECK_THAT(json_refusal(replaced(good, "\"hidden_size\": 64", "\"hidden_size\": 66")),
             Contains("66 is not a multiple of 4"));
  CHECK_THAT(json_refusal(replaced(good, "\"hidden_size\": 64", "\"hidden_size\": \"64\"")),
             Contains("hidden_size: expected an integer, got string"));
  CHECK_THAT(json_refusal(replaced(good, "\"hidden_size\": 64", "\"hidden_size\": -4")),
             Contains("hidden_size") && Contains("got -4"));
  CHECK_THAT(json_refusal(replaced(good, "\"num_hidden_layers\": 2",
                                   "\"num_hidden_layers\": 9000000000000000000")),
             Contains("num_hidden_layers"));
  CHECK_THAT(json_refusal(base_json("\"num_key_value_heads\": 3")),
             Contains("4 attention heads are not a multiple of 3"));
  CHECK_THAT(json_refusal(base_json("\"head_dim\": 15")), Contains("even number, got 15"));
  CHECK_THAT(json_refusal(base_json("\"hidden_act\": \"gelu\"")), Contains("silu, got gelu"));
  CHECK_THAT(json_refusal(base_json("\"mlp_bias\": true")), Contains("mlp_bias"));
  CHECK_THAT(json_refusal(base_json("\"quantization_config\": {}")), Contains("quantization"));
  CHECK_THAT(json_refusal(base_json("\"eos_token_id\": [1, \"a\"]")), Contains("eos_token_id"));
  CHECK_THAT(json_refusal(replaced(good, "1e-6", "0")), Contains("epsilon"));
  CHECK_THAT(json_refusal(base_json("\"hidden_size\": 64")), Contains("duplicate key"));
  CHECK_THAT(json_refusal("[1]"), Contains("expected a JSON object"));
  CHECK_THAT(json_refusal("{"), Contains("not valid JSON"));
}

TEST_CASE("sliding windows are refused only where a layer would slide", "[config]") {
  const std::string window = "\"use_sliding_window\": true, \"sliding_window\": 1024";
  CHECK_THAT(json_refusal(base_json(window + ", \"max_window_layers\": 1", "qwen2")),
             Contains("sliding window of 1024 tokens from layer 1"));
  CHECK(json_refusal(base_json(window + ", \"max_window_layers\": 2", "qwen2")).empty());
  CHECK(json_refusal(base_json("\"use_sliding_window\": false, \"sliding_window\": 8", "qwen2"))
            .empty());
  CHECK(json_refusal(base_json("\"use_sliding_window\": true, \"sliding_window\": null")).empty());
  CHECK(json_refusal(base_json("\"use_sliding_window\": true, \"sliding_window\": 4096")).empty());
  CHECK_THAT(
      json_refusal(base_json("\"layer_types\": [\"full_attention\", \"sliding_attention\"]")),
      Contains("sliding_attention"));
}

TEST_CASE("RoPE fields of config.json, old and new", "[config]") {
  const ModelConfig linear =
      rope_json("\"rope_theta\": 1e4, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 4.0}");
  CHECK(linear.rope.scaling == "linear");
  CHECK(linear.rope.factor == 4.0);

  const ModelConfig llama3 = rope_json(
      "\"rope_parameters\": {\"rope_type\": \"llama3\", \"rope_theta\": 5e5, \"factor\": 32.0, "
      "\"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
      "\"original_max_position_embeddings\": 8192}");
  CHECK(llama3.rope.scaling == "llama3");
  CHECK(llama3.rope.theta == 5e5);
  CHECK(llama3.rope.original_context_length == 8192);
  CHECK(llama3.warnings.empty());

  const ModelConfig nested = rope_json(
      "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\", \"rope_theta\": "
      "7e3}}");
  CHECK(nested.rope.theta == 7e3);

  const ModelConfig differing =
      rope_json("\"rope_theta\": 1e4, \"rope_parameters\": {\"rope_theta\": 2e4}");
  CHECK(differing.rope.theta == 2e4);
  REQUIRE(differing.warnings.size() == 1);
  CHECK_THAT(differing.warnings[0], Contains("rope_theta is 10000") && Contains("20000"));

  CHECK(rope_json("\"partial_rotary_factor\": 0.5").rope.rotary_dim == 8);
  CHECK_THAT(json_refusal(base_json("\"partial_rotary_factor\": 0.2")), Contains("even number"));
  CHECK_THAT(json_refusal(base_json("\"partial_rotary_factor\": 1.5")),
             Contains("partial_rotary_factor"));
  for (const char* type : {"dynamic", "longrope", "mrope"}) {
    CHECK_THAT(
        json_refusal(base_json(std::string("\"rope_scaling\": {\"rope_type\": \"") + type + "\"}")),
        Contains(std::string("RoPE type ") + type));
  }
  CHECK_THAT(json_refusal(base_json("\"rope_scaling\": {\"type\": \"linear\"}")),
             Contains("factor is missing"));
  CHECK_THAT(json_refusal(base_json("\"rope_scaling\": {\"type\": \"linear\", \"factor\": 0}")),
             Contains("RoPE factor"));
  CHECK_THAT(json_refusal(base_json("\"rope_theta\": -1")), Contains("RoPE theta"));
  CHECK_THAT(json_refusal(base_json("\"rope_parameters\": {\"a\": {}, \"b\": {}}")),
             Contains("several layer types"));
}

TEST_CASE("yarn: lengths and the attention factor", "[config]") {
  const auto yarn = [](const std::string& inside, const std::string& outside = "") {
    return rope_json(outside + "\"rope_scaling\": {\"type\": \"yarn\"" + inside + "}").rope;
  };
  const RopeConfig four = yarn(", \"factor\": 4.0, \"original_max_position_embeddings\": 1024");
  CHECK(four.factor == 4.0);
  CHECK(four.original_context_length == 1024);
  CHECK(four.attention_factor == Approx(1.1386294).epsilon(1e-7));
  CHECK(four.beta_fast == 32.0);
  CHECK(four.truncate);
  const RopeConfig eight = yarn(", \"factor\": 8.0, \"mscale\": 1.0, \"mscale_all_dim\": 0.5");
  CHECK(eight.attention_factor == Approx(1.0941800).epsilon(1e-7));
  CHECK(eight.original_context_length == 4096);
  CHECK(yarn(", \"factor\": 8.0, \"attention_factor\": 1.25").attention_factor == 1.25);
  // The top level wins; without a factor it is the ratio of the lengths.
  const RopeConfig ratio = yarn(", \"factor\": null, \"original_max_position_embeddings\": 1024",
                                "\"original_max_position_embeddings\": 2048, ");
  CHECK(ratio.original_context_length == 2048);
  CHECK(ratio.factor == 2.0);
  CHECK_FALSE(yarn(", \"factor\": 2.0, \"truncate\": false").truncate);
}

TEST_CASE("GGUF keys", "[config]") {
  const auto same = [](GgufWriter&) {};
  const ModelConfig llama = from_gguf({}, same);
  CHECK(llama.name == "tiny llama");
  CHECK(llama.context_length == 512);
  CHECK(llama.rope.scaling == "none");
  CHECK_FALSE(llama.tied_embeddings);
  CHECK(llama.vocab_size == 0);
  CHECK(from_gguf({.tied = true}, same).tied_embeddings);
  CHECK(from_gguf({.architecture = "qwen2"}, same).qkv_bias);
  CHECK(from_gguf({.architecture = "qwen3"}, same).qk_norm);
  CHECK(from_gguf({.attention_bias = true}, same).output_bias);

  const ModelConfig linear = from_gguf({}, [](GgufWriter& w) {
    w.f32("llama.rope.scale_linear", 2.0F);
    w.u32("tokenizer.ggml.eot_token_id", 5);
    w.u32("tokenizer.ggml.bos_token_id", 1);
    w.boolean("tokenizer.ggml.add_bos_token", true);
  });
  CHECK(linear.rope.scaling == "linear");
  CHECK(linear.rope.factor == 2.0);
  CHECK(linear.eos_token_ids == std::vector<int64_t>{2, 5});
  CHECK(linear.bos_token_id == 1);
  CHECK(linear.add_bos);
  CHECK(from_gguf({}, [](GgufWriter& w) {
          w.f32("llama.rope.scaling.factor", 0.0F);
        }).rope.scaling == "none");

  const auto yarn = [](float log_multiplier) {
    return from_gguf({.architecture = "qwen2"},
                     [log_multiplier](GgufWriter& w) {
                       w.string("qwen2.rope.scaling.type", "yarn");
                       w.f32("qwen2.rope.scaling.factor", 4.0F);
                       w.u32("qwen2.rope.scaling.original_context_length", 128);
                       w.f32("qwen2.rope.scaling.attn_factor", 2.0F);
                       if (log_multiplier != 0) {
                         w.f32("qwen2.rope.scaling.yarn_log_multiplier", log_multiplier);
                       }
                     })
        .rope;
  };
  CHECK(yarn(0).attention_factor == Approx(2 * 1.1386294).epsilon(1e-7));
  CHECK(yarn(0).original_context_length == 128);
  // m(4, 1) / m(4, 0.5) = (0.1 ln 4 + 1) / (0.05 ln 4 + 1)
  CHECK(yarn(0.5F).attention_factor == Approx(2 * 1.1386294 / 1.0693147).epsilon(1e-7));

  const ModelConfig divided = from_gguf({}, [](GgufWriter& w) {
    w.tensor_f32("rope_freqs.weight", {8}, {1, 1, 1, 1, 2, 2, 2, 32});
  });
  CHECK(divided.rope.frequency_divisors == std::vector<float>{1, 1, 1, 1, 2, 2, 2, 32});
}

TEST_CASE("GGUF configurations are refused by key", "[config]") {
  const auto with = [](auto&& change) { return gguf_refusal(TinyModel{}, change); };
  CHECK_THAT(gguf_refusal({.architecture = "phi3"}, [](GgufWriter&) {}),
             Contains("architecture phi3 is not supported"));
  CHECK_THAT(gguf_refusal({.num_heads = 5}, [](GgufWriter&) {}),
             Contains("5 attention heads are not a multiple of 2"));
  CHECK_THAT(with([](GgufWriter& w) { w.u32("llama.expert_count", 8); }), Contains("experts"));
  CHECK_THAT(with([](GgufWriter& w) { w.u32("llama.attention.sliding_window", 64); }),
             Contains("sliding window of 64"));
  CHECK_THAT(with([](GgufWriter& w) { w.string("llama.rope.scaling.type", "longrope"); }),
             Contains("longrope"));
  CHECK_THAT(with([](GgufWriter& w) {
               w.tensor_f32("rope_freqs.weight", {4}, {1, 1, 1, 1});
             }),
             Contains("rope_freqs.weight: expected [8], got [4]"));
  CHECK_THAT(with([](GgufWriter& w) {
               w.tensor_f32("rope_freqs.weight", {8}, {1, 1, 1, 1, 1, 1, 1, 0});
             }),
             Contains("rope_freqs.weight") && Contains("got 0"));
  CHECK_THAT(with([](GgufWriter& w) { w.string("llama.vocab_size", "many"); }),
             Contains("llama.vocab_size: expected an integer, got string"));

  const auto only = [](const std::vector<std::pair<std::string, uint32_t>>& keys,
                       const std::vector<int32_t>& kv_heads) {
    const TemporaryFolder folder;
    GgufWriter writer;
    writer.string("general.architecture", "llama");
    for (const auto& [key, value] : keys) writer.u32("llama." + key, value);
    if (!kv_heads.empty()) writer.i32s("llama.attention.head_count_kv", kv_heads);
    writer.f32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
    writer.write((folder / "m.gguf").string());
    try {
      const auto file = GgufFile::open((folder / "m.gguf").string());
      return std::to_string(config_from_gguf(*file).num_kv_heads);
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  std::vector<std::pair<std::string, uint32_t>> keys = {{"block_count", 2},
                                                        {"context_length", 64},
                                                        {"embedding_length", 64},
                                                        {"feed_forward_length", 64},
                                                        {"attention.head_count", 4}};
  CHECK(only(keys, {}) == "4");
  CHECK(only(keys, {2, 2}) == "2");
  CHECK_THAT(only(keys, {2, 0}), Contains("different head counts"));
  CHECK_THAT(only(keys, {0, 0}), Contains("head_count_kv: expected 1..") && Contains("got 0"));
  keys.pop_back();
  CHECK_THAT(only(keys, {}), Contains("llama.attention.head_count is missing"));
  keys.push_back({"attention.head_count", 5});
  CHECK_THAT(only(keys, {}), Contains("key_length is missing"));
}

TEST_CASE("the head width must equal the value width and, for llama, the rotary width",
          "[config]") {
  const auto refusal = [](const char* architecture, uint32_t value_length, uint32_t rotary) {
    const TemporaryFolder folder;
    GgufWriter w;
    const std::string a = architecture;
    w.string("general.architecture", a);
    for (const char* key : {".block_count", ".context_length", ".feed_forward_length"}) {
      w.u32(a + key, 2);
    }
    w.u32(a + ".embedding_length", 64);
    w.u32(a + ".attention.head_count", 4);
    w.u32(a + ".attention.value_length", value_length);
    w.u32(a + ".rope.dimension_count", rotary);
    w.f32(a + ".attention.layer_norm_rms_epsilon", 1e-5F);
    w.write((folder / "m.gguf").string());
    try {
      config_from_gguf(*GgufFile::open((folder / "m.gguf").string()));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refusal("llama", 16, 16).empty());
  CHECK_THAT(refusal("llama", 8, 16), Contains("value_length: expected the key width 16, got 8"));
  CHECK_THAT(refusal("llama", 16, 8), Contains("dimension_count: expected the head width 16"));
  CHECK(refusal("qwen3", 16, 8).empty());
  CHECK_THAT(refusal("qwen3", 16, 18), Contains("dimension_count: expected 1..16, got 18"));
  CHECK_THAT(refusal("qwen3", 16, 7), Contains("even number, got 7"));
}
