// Damaged model files and rows: readers accept them or throw oscar::Error; they never crash, never
// throw anything else and never take memory that the file does not back.
#include <catch2/catch.hpp>

#include "base/error.h"
#include "fuzz/mutate.h"
#include "fuzz/outcome.h"
#include "io/gguf.h"
#include "io/json_file.h"
#include "io/results.h"
#include "io/safetensors.h"
#include "model/rope.h"
#include "model/weights.h"
#include "support/paths.h"
#include "support/tiny_model.h"

using namespace oscar;
using oscar_test::Bytes;
using oscar_test::Mutator;
using oscar_test::Outcome;
using oscar_test::TemporaryFolder;
using oscar_test::TinyModel;

namespace {

constexpr double kMemoryLimitMib = 1024.0;  // the sanitizers' own needs included

TinyModel small_model(const char* architecture, bool fused) {
  TinyModel model;
  model.architecture = architecture;
  model.num_layers = 1;
  model.hidden = 16;
  model.intermediate = 8;
  model.vocab = 12;
  model.num_heads = 2;
  model.num_kv_heads = 1;
  model.head_dim = 8;
  model.fused_qkv = fused;
  model.tied = fused;
  return model.fill();
}

// Everything a loaded model offers is touched, so that the sanitizers see bad pointers.
void use(const ModelWeights& weights) {
  make_rope_table(weights.config.rope, 0, 2);
  double sum = 0.0;
  const auto add = [&](const WeightMatrix& matrix) {
    std::vector<float> row(matrix.columns);
    dequantize_row(matrix.type, matrix.row(matrix.rows - 1), matrix.columns, row.data());
    for (const float value : row) sum += static_cast<double>(value);
  };
  add(weights.embedding);
  add(weights.output);
  for (const LayerWeights& layer : weights.layers) {
    for (const WeightMatrix* m :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      add(*m);
    }
  }
  REQUIRE(std::isfinite(sum));
}

}  // namespace

TEST_CASE("damaged GGUF files", "[fuzz]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "m.gguf").string();
  std::vector<Bytes> seeds;
  for (const char* architecture : {"llama", "qwen2", "qwen3"}) {
    auto writer = small_model(architecture, architecture[0] == 'l').gguf();
    writer.string("tokenizer.ggml.model", "gpt2");
    writer.strings("tokenizer.ggml.tokens", {"a", "b", "ab"});
    writer.tensor_f32("rope_freqs.weight", {4}, {1, 1, 2, 2});
    seeds.push_back(writer.bytes());
  }
  Mutator mutator(20260517);
  Outcome opened, loaded;
  for (int i = 0; i < 6000; ++i) {
    oscar_test::write_file(path,
                           mutator.mutate(seeds[static_cast<size_t>(i) % seeds.size()], 1800));
    opened.run([&] {
      const auto file = GgufFile::open(path);
      for (const GgufValue& value : file->metadata()) describe(value);
      for (const GgufTensor& tensor : file->tensors()) to_string(tensor.shape());
    });
    loaded.run([&] { use(load_weights(path)); });
  }
  CHECK(opened.accepted > 500);
  CHECK(opened.refused > 500);
  CHECK(loaded.accepted > 100);
  CHECK(loaded.refused > 500);
  CHECK(oscar_test::peak_resident_mib() < kMemoryLimitMib);
}

TEST_CASE("damaged Hugging Face folders", "[fuzz]") {
  const TemporaryFolder folder;
  const std::string root = folder.path().string();
  const TinyModel model = small_model("qwen3", false);
  model.write_folder(folder.path());
  const Bytes config = oscar_test::to_bytes(
      "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
      "\"original_max_position_embeddings\": 128}, " +
      model.config_json().substr(1));
  const Bytes weights = model.safetensors("BF16").bytes();
  std::string map;
  for (const auto& [name, weight] : model.weights) {
    map += cat(map.empty() ? "" : ", ", "\"", name, "\": \"model.safetensors\"");
  }
  const Bytes index = oscar_test::to_bytes(cat("{\"weight_map\": {", map, "}}"));
  const std::string config_path = (folder / "config.json").string();
  const std::string weights_path = (folder / "model.safetensors").string();
  const std::string index_path = (folder / kSafeTensorsIndexName).string();

  Mutator mutator(7);
  Outcome outcome;
  for (int i = 0; i < 4000; ++i) {
    const uint64_t victim = mutator.below(3);
    oscar_test::write_file(config_path,
                           victim == 0 ? mutator.mutate(config, config.size()) : config);
    oscar_test::write_file(weights_path, victim == 1 ? mutator.mutate(weights, 1500) : weights);
    oscar_test::write_file(index_path, victim == 2 ? mutator.mutate(index, index.size()) : index);
    outcome.run([&] { use(load_weights(root)); });
  }
  CHECK(outcome.accepted > 100);
  CHECK(outcome.refused > 500);
  CHECK(oscar_test::peak_resident_mib() < kMemoryLimitMib);
}

TEST_CASE("damaged JSON and result rows", "[fuzz]") {
  ResultRow row;
  row.suite = "ppl";
  row.cell = "austen";
  row.metric = "ppl";
  row.arm = "oscar";
  row.mode = "exact";
  row.n = 3;
  row.ci_method = "bootstrap";
  row.numbers["windows.sink"] = 64;
  row.labels["hashes.model"] = "00ff";
  const Bytes seed = oscar_test::to_bytes(to_json_line(row));
  const Bytes json = oscar_test::to_bytes(
      "{\"a\": [1, -2.5e3, true, null, \"\\u00e9\\ud83d\\ude00\"], \"b\": {\"c\": [[], {}]}}");
  Mutator mutator(11);
  Outcome rows, values;
  for (int i = 0; i < 20000; ++i) {
    const Bytes line = mutator.mutate(seed, seed.size());
    rows.run([&] { to_json_line(parse_result_row({line.begin(), line.end()}, "rows.jsonl:1")); });
    const Bytes text = mutator.mutate(json, json.size());
    values.run([&] { parse_json({reinterpret_cast<const char*>(text.data()), text.size()}, "x"); });
  }
  CHECK(rows.accepted > 1000);
  CHECK(rows.refused > 1000);
  CHECK(values.accepted > 1000);
  CHECK(values.refused > 1000);
}
