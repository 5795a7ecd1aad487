// Damaged captures and bundles: readers accept them or throw oscar::Error.
#include <catch2/catch.hpp>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "fuzz/mutate.h"
#include "fuzz/outcome.h"
#include "io/bundle_file.h"
#include "io/capture_file.h"
#include "support/paths.h"

using namespace oscar;
using oscar_test::Bytes;
using oscar_test::Mutator;
using oscar_test::Outcome;
using oscar_test::TemporaryFolder;

namespace {

Bytes read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

TEST_CASE("damaged bundles", "[fuzz]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "b.h5").string();
  Bundle bundle;
  bundle.info.recipe = "official";
  bundle.info.model_architecture = "llama";
  bundle.info.head_dim = bundle.info.value_head_dim = 4;
  bundle.info.num_layers = 2;
  bundle.info.num_heads = 2;
  bundle.info.num_kv_heads = 1;
  bundle.info.rope_theta = 1e4;
  bundle.info.tokens = 1024;
  for (const int64_t id : {0, 1}) {
    BundleLayer layer;
    layer.k_rotation = TensorF({1, 4, 4});
    for (size_t i = 0; i < 4; ++i) layer.k_rotation.values[5 * i] = 1.0F;
    layer.v_rotation = layer.k_rotation;
    layer.k_mean = TensorF({1, 4}, 0.5F);
    bundle.layers[id] = std::move(layer);
  }
  write_bundle(bundle, path);
  const Bytes seed = read_bytes(path);
  Mutator mutator(21);
  Outcome outcome;
  for (int i = 0; i < 1500; ++i) {
    oscar_test::write_file(path, mutator.mutate(seed, seed.size()));
    outcome.run([&] { read_bundle(path); });
  }
  CHECK(outcome.accepted > 100);
  CHECK(outcome.refused > 300);
}

TEST_CASE("damaged captures", "[fuzz]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "c.h5").string();
  {
    CaptureInfo info;
    info.model_architecture = "llama";
    info.head_dim = 4;
    info.num_layers = 2;
    info.num_heads = 2;
    info.num_kv_heads = 1;
    info.rope_theta = 1e4;
    CaptureWriter writer(path, info);
    std::vector<float> values(5 * 2 * 4);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 5.0F;
    for (const int32_t first : {10, 20}) {
      writer.begin_sequence({first, first + 1, first + 2, first + 3, first + 4});
      for (const int64_t layer : {0, 1}) {
        writer.append(layer, values.data(), values.data(), values.data(), nullptr);
      }
      writer.end_sequence();
    }
    writer.finish();
  }
  const Bytes seed = read_bytes(path);
  Mutator mutator(22);
  Outcome outcome;
  for (int i = 0; i < 800; ++i) {
    // Its metadata stands at the start; the chunk index and the data behind it are large.
    oscar_test::write_file(path, mutator.mutate(seed, 8192));
    outcome.run([&] {
      const CaptureReader reader(path);
      const auto tokens = static_cast<int64_t>(reader.token_ids().size());
      for (const int64_t layer : reader.layers()) {
        for (const char* tensor : {"q", "k", "v"}) reader.read(layer, tensor, 0, tokens);
      }
    });
  }
  CHECK(outcome.accepted > 50);
  CHECK(outcome.refused > 100);
}
