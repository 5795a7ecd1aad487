// Inspect documents of every format, their text form, and refusals.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/bundle_file.h"
#include "io/capture_file.h"
#include "io/moments_file.h"
#include "io/results.h"
#include "io/sha256.h"
#include "support/paths.h"
#include "support/small_moments.h"
#include "support/tiny_model.h"
#include "tools/inspect.h"

using namespace oscar;
using Catch::Matchers::Contains;
using nlohmann::json;
using oscar_test::TemporaryFolder;
using oscar_test::TinyModel;

namespace {

json document(const std::string& path) {
  return json::parse(inspect({.path = path, .json = true}));
}
std::string text(const std::string& path) { return inspect({.path = path}); }

}  // namespace

TEST_CASE("a GGUF file", "[inspect]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "m.gguf").string();
  auto writer = TinyModel().fill().gguf();
  writer.strings("tokenizer.ggml.tokens", {"a", "b"});
  writer.write(path);
  const json found = document(path);
  CHECK(found["format"] == "GGUF");
  CHECK(found["sha256"] == sha256_file(path));
  CHECK(found["model"]["architecture"] == "llama");
  CHECK(found["model"]["head_dim"] == 16);
  CHECK(found["model"]["kv_bf16_bytes_per_token"] == 2 * 2 * 2 * 16 * 2);
  CHECK(found["metadata"]["tokenizer.ggml.tokens"] == "[2 x string: \"a\", \"b\"]");
  REQUIRE(found["tensors"].size() == 21);
  CHECK(found["tensors"][0] == json({{"name", "token_embd.weight"},
                                     {"type", "F32"},
                                     {"shape", {160, 64}},
                                     {"bytes", 160 * 64 * 4}}));
  CHECK(found["bits_per_parameter"] == 32.0);
  CHECK_FALSE(found.contains("not_supported"));
  CHECK(json::parse(inspect({.path = path, .json = true, .hash = false})).contains("sha256") ==
        false);
  CHECK_THAT(text(path), Contains("token_embd.weight") && Contains("[160, 64]") &&
                             Contains("architecture") && Contains("KiB"));
}

TEST_CASE("a model that cannot be run is described with the reason", "[inspect]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "m.gguf").string();
  oscar_test::GgufWriter writer;
  writer.string("general.architecture", "mamba");
  writer.tensor("x.weight", {256}, 10, oscar_test::Bytes(84));
  writer.write(path);
  const json found = document(path);
  CHECK(found["tensors"][0]["type"] == "Q2_K");
  CHECK_THAT(found["not_supported"].get<std::string>(), Contains("architecture mamba"));
}

TEST_CASE("a Hugging Face folder and a safetensors file", "[inspect]") {
  const TemporaryFolder folder;
  TinyModel model;
  model.architecture = "qwen3";
  model.fill().write_folder(folder / "hf", "BF16");
  const json found = document((folder / "hf").string());
  CHECK(found["format"] == "Hugging Face folder");
  CHECK(found["model"]["architecture"] == "qwen3");
  CHECK(found["files"][0]["name"] == "model.safetensors");
  CHECK(found["sha256"].get<std::string>().size() == 64);
  CHECK(found["types"].size() == 2);
  const std::string file = (folder / "hf/model.safetensors").string();
  const json alone = document(file);
  CHECK(alone["format"] == "safetensors");
  CHECK(alone["tensors"] == found["tensors"]);
  CHECK(alone["metadata"]["format"] == "\"pt\"");
  CHECK_THAT(text(file), Contains("model.layers.1.self_attn.q_norm.weight"));
  std::filesystem::remove(folder / "hf/config.json");
  CHECK_THROWS_WITH(text((folder / "hf").string()), Contains("no config.json"));
}

TEST_CASE("a capture", "[inspect]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "c.h5").string();
  CaptureInfo info;
  info.model_architecture = "llama";
  info.model_sha256 = "abc";
  info.options_json = "{\"length\": 3}";
  info.head_dim = 4;
  info.num_layers = 1;
  info.num_heads = 2;
  info.num_kv_heads = 1;
  info.rope_theta = 1e4;
  CaptureWriter writer(path, info);
  std::vector<float> values(3 * 2 * 4);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 5.0F;
  for (const int32_t first : {10, 20}) {
    writer.begin_sequence({first, first + 1, first + 2});
    writer.append(0, values.data(), values.data(), values.data(), nullptr);
    writer.end_sequence();
  }
  writer.finish();
  const json found = document(path);
  CHECK(found["format"] == "oscar-capture");
  CHECK(found["tokens"] == 6);
  CHECK(found["sequences"] == 2);
  CHECK(found["sequence_tokens"] == 3);
  CHECK(found["options"]["length"] == 3);
  REQUIRE(found["tensors"].size() == 3);
  CHECK(found["tensors"][0] == json({{"name", "layers/0/q"},
                                     {"type", "bf16"},
                                     {"shape", {6, 2, 4}},
                                     {"bytes", 6 * 2 * 4 * 2}}));
  CHECK_THAT(text(path), Contains("layers/0/k") && Contains("model_sha256"));
}

TEST_CASE("a moments file", "[inspect]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "m.h5").string();
  MomentsInfo info = oscar_test::small_moments();
  info.sequences_complete = 1;
  MomentsLayer layer;
  layer.sums["queries"] = {TensorD({2, 4, 4}, 0.1), 140.0};
  MomentsWriter writer(path, info);
  writer.write(1, layer);
  writer.finish();
  const json found = document(path);
  CHECK(found["format"] == "oscar-moments");
  CHECK(found["kv_heads_in_file"] == "2 to 3");
  CHECK(found["tokens"] == 70);
  CHECK(found["held_out_tokens"] == 40);
  CHECK(found["sequences"] == 2);
  CHECK(found["sequences_complete"] == 1);
  CHECK(found["longest_sequence"] == 60);
  REQUIRE(found["tensors"].size() == 1);
  CHECK(found["tensors"][0] == json({{"name", "layers/1/queries"},
                                     {"type", "f64"},
                                     {"shape", {2, 4, 4}},
                                     {"bytes", 2 * 4 * 4 * 8}}));
  CHECK_THAT(text(path), Contains("layers/1/queries") && Contains("oscar-moments"));
}

TEST_CASE("a bundle: tensors, policy and held-out numbers of its layers", "[inspect]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "b.h5").string();
  Bundle bundle;
  bundle.info.recipe = "official";
  bundle.info.model_architecture = "llama";
  bundle.info.head_dim = bundle.info.value_head_dim = 4;
  bundle.info.num_layers = 3;
  bundle.info.num_heads = 2;
  bundle.info.num_kv_heads = 1;
  bundle.info.rope_theta = 1e4;
  bundle.info.tokens = 1024;
  for (int64_t id = 0; id < 3; ++id) {
    BundleLayer layer;
    layer.k_rotation = TensorF({1, 4, 4});
    for (size_t i = 0; i < 4; ++i) layer.k_rotation.values[5 * i] = 1.0F;
    layer.k_clip = id == 2 ? 0.5 : 0.96;
    layer.policy_json = "{\"rotation\": \"r_h_pbr\"}";
    layer.held_out_json = cat("{\"k\": {\"calibrated\": 0.", id + 1,
                              ", \"hadamard\": 0.5, \"calibrated_per_head\": [0.5]}}");
    bundle.layers[id] = std::move(layer);
  }
  write_bundle(bundle, path);
  const json found = document(path);
  CHECK(found["format"] == "oscar-bundle");
  CHECK(found["recipe"] == "official");
  CHECK(found["tensors"].size() == 3);
  CHECK(found["tensors"][0]["shape"] == json({1, 4, 4}));
  REQUIRE(found["held_out"].size() == 3);
  CHECK(found["held_out"][1]["k"]["calibrated"] == 0.2);
  CHECK(found["policy"][2]["rotation"] == "r_h_pbr");
  const std::string shown = text(path);
  // Layers that say the same share a row; lists per head stay in the JSON form.
  CHECK_THAT(shown, Contains("0-2") && Contains("0-1") && Contains("k.calibrated"));
  CHECK_THAT(shown, !Contains("calibrated_per_head"));
}

TEST_CASE("the contest of a bundle: one row a side and head", "[inspect]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "b.h5").string();
  Bundle bundle;
  bundle.info.recipe = "best";
  bundle.info.head_dim = bundle.info.value_head_dim = 4;
  bundle.info.num_layers = 1;
  bundle.info.num_heads = 2;
  bundle.info.num_kv_heads = 2;
  bundle.info.rope_theta = 1e4;
  BundleLayer layer;
  layer.held_out_json =
      R"({"attention_output": {"k": [
            {"chosen": "shared", "candidates": [{"form": "shared", "error": 0.25},
                                                {"form": "hadamard", "error": 0.5}]},
            {"chosen": "hadamard", "candidates": [{"form": "hadamard", "error": 0.125}, 3]},
            {"candidates": []}, 7], "v": 1}})";
  bundle.layers[0] = layer;
  write_bundle(bundle, path);
  const json found = document(path);
  REQUIRE(found["contest"].size() == 3);
  CHECK(found["contest"][0] == json({{"layer", 0},
                                     {"side", "k"},
                                     {"head", 0},
                                     {"chosen", "shared"},
                                     {"shared", 0.25},
                                     {"hadamard", 0.5}}));
  CHECK(found["contest"][1]["hadamard"] == 0.125);
  const std::string shown = text(path);
  CHECK_THAT(shown, Contains("contest (3)") && Contains("0.125") && !Contains("candidates"));
}

TEST_CASE("result rows", "[inspect]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "rows.jsonl").string();
  ResultRow row;
  row.suite = "ppl";
  row.arm = "bf16";
  ResultRow other = row;
  other.arm = "oscar";
  write_rows({row, other, row}, path);
  const json found = document(path);
  CHECK(found["rows"] == 3);
  CHECK(found["arms"] == "bf16 oscar");
}

TEST_CASE("other files are refused by name", "[inspect]") {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::string& name) {
    try {
      text((folder / name).string());
    } catch (const Error& error) {
      CHECK_THAT(error.what(), Contains(name));
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK_THAT(refusal("absent"), Contains("no such file"));
  oscar_test::write_file((folder / "empty").string(), "");
  CHECK_THAT(refusal("empty"), Contains("zero bytes"));
  oscar_test::write_file((folder / "notes.txt").string(), "hello");
  CHECK_THAT(refusal("notes.txt"), Contains("not a capture"));
  oscar_test::write_file((folder / "cut.gguf").string(), "GGUF\3");
  CHECK_THAT(refusal("cut.gguf"), Contains("truncated"));
  oscar_test::write_file((folder / "bad.safetensors").string(), "abc");
  CHECK_THAT(refusal("bad.safetensors"), Contains("8 bytes"));
  oscar_test::write_file((folder / "bad.h5").string(), "\x89HDF\r\n\x1a\n garbage");
  CHECK_FALSE(refusal("bad.h5").empty());
  CHECK_THAT(refusal(""), Contains("no config.json"));
}
