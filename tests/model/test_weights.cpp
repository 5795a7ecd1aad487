// Loading weights: the same tiny model from a folder and from GGUF, un-permutation, tied heads, and
// refusals.
#include <catch2/catch.hpp>
#include <limits>

#include "base/error.h"
#include "io/sha256.h"
#include "model/weights.h"
#include "support/paths.h"
#include "support/tiny_model.h"

using namespace oscar;
using Catch::Matchers::Contains;
using oscar_test::TemporaryFolder;
using oscar_test::TinyModel;

namespace {

std::vector<float> expand(const WeightMatrix& matrix) {
  std::vector<float> values(matrix.rows * matrix.columns);
  for (size_t row = 0; row < matrix.rows; ++row) {
    dequantize_row(matrix.type, matrix.row(row), matrix.columns,
                   values.data() + row * matrix.columns);
  }
  return values;
}

void check_equals(const ModelWeights& weights, const TinyModel& model) {
  const auto value = [&](const std::string& name) {
    const auto found = model.weights.find(name);
    return found == model.weights.end() ? std::vector<float>() : found->second.second;
  };
  CHECK(weights.config.architecture == model.architecture);
  CHECK(weights.config.vocab_size == model.vocab);
  CHECK(weights.config.head_dim == model.head_dim);
  CHECK(weights.config.tied_embeddings == model.tied);
  CHECK(weights.config.eos_token_ids == std::vector<int64_t>{2});
  CHECK(expand(weights.embedding) == value("model.embed_tokens.weight"));
  CHECK(expand(weights.output) ==
        value(model.tied ? "model.embed_tokens.weight" : "lm_head.weight"));
  CHECK(weights.output_norm == value("model.norm.weight"));
  REQUIRE(weights.layers.size() == model.num_layers);
  for (size_t layer = 0; layer < model.num_layers; ++layer) {
    const LayerWeights& w = weights.layers[layer];
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    CHECK(w.attention_norm == value(at + "input_layernorm.weight"));
    CHECK(w.ffn_norm == value(at + "post_attention_layernorm.weight"));
    CHECK(w.q_norm == value(at + "self_attn.q_norm.weight"));
    CHECK(w.k_norm == value(at + "self_attn.k_norm.weight"));
    CHECK(w.q_bias == value(at + "self_attn.q_proj.bias"));
    CHECK(w.k_bias == value(at + "self_attn.k_proj.bias"));
    CHECK(w.v_bias == value(at + "self_attn.v_proj.bias"));
    CHECK(w.o_bias == value(at + "self_attn.o_proj.bias"));
    CHECK(expand(w.q) == value(at + "self_attn.q_proj.weight"));
    CHECK(expand(w.k) == value(at + "self_attn.k_proj.weight"));
    CHECK(expand(w.v) == value(at + "self_attn.v_proj.weight"));
    CHECK(expand(w.o) == value(at + "self_attn.o_proj.weight"));
    CHECK(expand(w.gate) == value(at + "mlp.gate_proj.weight"));
    CHECK(expand(w.up) == value(at + "mlp.up_proj.weight"));
    CHECK(expand(w.down) == value(at + "mlp.down_proj.weight"));
  }
}

// The message of the refusal, "" when loading succeeds.
std::string refusal(const std::string& path) {
  try {
    load_weights(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a folder and a GGUF file of the same model give the same weights", "[weights]") {
  for (const std::string architecture : {"llama", "qwen2", "qwen3"}) {
    for (const int variant : {0, 1, 2, 3}) {
      TinyModel model;
      model.architecture = architecture;
      model.tied = variant == 1;
      model.attention_bias = variant == 2 && architecture != "qwen2";
      model.fused_qkv = variant == 3;
      model.fill();
      INFO(architecture << " variant " << variant);
      const TemporaryFolder folder;
      model.write_folder(folder / "hf");
      model.write_folder(folder / "bf16", "BF16");
      model.gguf().write((folder / "m.gguf").string());
      check_equals(load_weights((folder / "hf").string()), model);
      check_equals(load_weights((folder / "bf16").string()), model);
      check_equals(load_weights((folder / "m.gguf").string()), model);
    }
  }
}

TEST_CASE("the hash names the files", "[weights]") {
  const TemporaryFolder folder;
  const TinyModel model = TinyModel().fill();
  const std::string gguf = (folder / "m.gguf").string();
  model.gguf().write(gguf);
  const ModelWeights weights = load_weights(gguf);
  CHECK(model_sha256(weights) == sha256_file(gguf));
  CHECK(&model_sha256(weights) == &model_sha256(weights));
  model.write_folder(folder / "hf");
  const ModelWeights from_folder = load_weights((folder / "hf").string());
  const std::string lines = sha256_file((folder / "hf/config.json").string()) + "  config.json\n" +
                            sha256_file((folder / "hf/model.safetensors").string()) +
                            "  model.safetensors\n";
  CHECK(model_sha256(from_folder) == sha256_hex(lines));
  CHECK(model_sha256((folder / "hf").string()) == sha256_hex(lines));
  CHECK(model_sha256(gguf) == sha256_file(gguf));
  CHECK_THROWS_AS(model_sha256(ModelWeights{}), Error);
}

TEST_CASE("the head of a folder: present, tied, or an error", "[weights]") {
  const TemporaryFolder folder;
  TinyModel model = TinyModel().fill();
  const std::string path = (folder / "hf").string();

  // A head of its own wins over the flag, with a warning.
  model.tied = true;
  model.write_folder(path);
  ModelWeights weights = load_weights(path);
  CHECK(expand(weights.output) == model.weights.at("lm_head.weight").second);
  REQUIRE(weights.config.warnings.size() == 1);
  CHECK_THAT(weights.config.warnings[0], Contains("lm_head.weight differs"));
  // The same bytes: no warning.
  model.weights["lm_head.weight"] = model.weights["model.embed_tokens.weight"];
  model.write_folder(path);
  CHECK(load_weights(path).config.warnings.empty());

  model.weights.erase("lm_head.weight");
  model.tied = false;
  model.write_folder(path);
  CHECK_THAT(refusal(path), Contains("lm_head.weight") && Contains("tie_word_embeddings"));
}

TEST_CASE("contradictory weights are refused by name", "[weights]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "hf").string();
  const auto with = [&](auto&& change) {
    TinyModel model = TinyModel().fill();
    change(model);
    model.write_folder(path);
    return refusal(path);
  };
  CHECK(with([](TinyModel&) {}).empty());
  CHECK_THAT(with([](TinyModel& m) { m.weights.erase("model.layers.1.mlp.up_proj.weight"); }),
             Contains("model.layers.1.mlp.up_proj.weight is missing"));
  CHECK_THAT(with([](TinyModel& m) { m.num_kv_heads = 1; }),
             Contains("k_proj.weight: expected shape [16, 64], got [32, 64]"));
  CHECK_THAT(with([](TinyModel& m) { m.vocab += 1; }), Contains("expected shape [161, 64]"));
  CHECK_THAT(with([](TinyModel& m) { m.num_layers = 3; }),
             Contains("model.layers.2.input_layernorm.weight is missing"));
  CHECK_THAT(with([](TinyModel& m) { m.num_layers = 60000; }), Contains("60000 layers, but only"));
  CHECK_THAT(with([](TinyModel& m) {
               m.weights["model.layers.0.self_attn.q_proj.bias"] = {{64}, std::vector<float>(64)};
             }),
             Contains("q_proj.bias is not part of a llama model"));
  CHECK_THAT(with([](TinyModel& m) {
               m.weights["model.norm.weight"].second[5] = std::numeric_limits<float>::quiet_NaN();
             }),
             Contains("model.norm.weight: contains NaN"));
  CHECK_THAT(with([](TinyModel& m) {
               m.weights["model.layers.0.mlp.down_proj.weight"].second[96 * 7 + 3] =
                   std::numeric_limits<float>::infinity();
             }),
             Contains("model.layers.0.mlp.down_proj.weight: row 7 contains NaN or infinity"));
  // Layers beyond the configured number (next-token prediction) and inverse frequencies are
  // ignored.
  CHECK(with([](TinyModel& m) {
          m.weights["model.layers.2.anything"] = {{1}, {1}};
          m.weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{1}, {1}};
        }).empty());
}

TEST_CASE("contradictory GGUF weights are refused by name", "[weights]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "m.gguf").string();
  const auto with = [&](TinyModel model, auto&& change) {
    oscar_test::GgufWriter writer = model.fill().gguf();
    change(writer);
    writer.write(path);
    return refusal(path);
  };
  using Writer = oscar_test::GgufWriter;
  CHECK(with({}, [](Writer&) {}).empty());
  CHECK_THAT(with({}, [](Writer& w) { w.u32("llama.vocab_size", 161); }),
             Contains("token_embd.weight: expected shape [161, 64], got [160, 64]"));
  CHECK_THAT(with({},
                  [](Writer& w) {
                    w.tensor_f32("blk.0.attn_q_norm.weight", {16}, std::vector<float>(16));
                  }),
             Contains("blk.0.attn_q_norm.weight is not part of a llama model"));
  CHECK(with({}, [](Writer& w) {
          w.tensor_f32("blk.0.attn_k_rot.weight", {16, 16}, std::vector<float>(256));
        }).empty());
  TinyModel unknown;
  unknown.architecture = "gpt2";
  CHECK_THAT(with(unknown, [](Writer&) {}), Contains("architecture gpt2"));
}

TEST_CASE("the demo model loads", "[weights][model]") {
  const auto path = oscar_test::demo_model();
  SKIP_UNLESS(path, "demo model not fetched");
  const ModelWeights weights = load_weights(path->string());
  CHECK(weights.config.num_layers == 30);
  CHECK(weights.config.num_heads == 9);
  CHECK(weights.config.num_kv_heads == 3);
  CHECK(weights.config.head_dim == 64);
  CHECK(weights.config.tied_embeddings);
  CHECK(weights.config.warnings.empty());
  CHECK(model_sha256(weights) ==
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53");
}

TEST_CASE("the second real model loads", "[weights][model]") {
  const auto path = oscar_test::qwen_model();
  SKIP_UNLESS(path, "no second model");
  const ModelWeights weights = load_weights(path->string());
  CHECK(weights.config.architecture == "qwen2");
  CHECK(weights.config.head_dim == 128);
  CHECK(weights.config.num_kv_heads == 2);
  CHECK_FALSE(weights.config.tied_embeddings);
  CHECK(weights.layers[0].k_bias.size() == 256);
}
