#include <filesystem>

#include "base/error.h"
#include "io/bundle_file.h"
#include "io/hdf5_file.h"
#include "support/paths.h"

using namespace oscar;
using Catch::Contains;

namespace {

TensorF identity(size_t heads, size_t dim) {
  TensorF tensor({heads, dim, dim});
  for (size_t h = 0; h < heads; ++h)
    for (size_t i = 0; i < dim; ++i) tensor.at(h)[i * dim + i] = 1.0F;
  return tensor;
}

Bundle sample_bundle() {
  Bundle bundle;
  bundle.info.recipe = "best";
  bundle.info.model_architecture = "llama";
  bundle.info.model_sha256 = std::string(64, 'a');
  bundle.info.options_json = R"({"held_out": 0.2})";
  bundle.info.head_dim = bundle.info.value_head_dim = 8;
  bundle.info.num_layers = 12;
  bundle.info.num_heads = 6;
  bundle.info.num_kv_heads = 2;
  bundle.info.rope_theta = 1e4;
  bundle.info.tokens = 1000;
  bundle.info.sequence_length = 500;
  bundle.info.token_fingerprints = {-7, 5, 1LL << 60};
  for (const int64_t id : {0, 10, 2}) {
    BundleLayer layer;
    layer.k_rotation = identity(1, 8);
    layer.v_rotation = identity(2, 8);
    layer.k_eigenvalues = TensorD({1, 8}, static_cast<double>(id));
    layer.k_mean = TensorF({2, 8}, 0.5F);
    layer.k_metric = identity(2, 8);
    layer.k_scale_max = TensorF({2}, 3.0F);
    layer.v_multipliers = TensorF({2, 3}, 1.25F);
    layer.v_multipliers.values[5] = 0.0F;  // a shorter set
    layer.k_position_mean = TensorF({2, 8}, 0.25F);
    layer.k_position_offset = TensorF({2, 8}, 0.125F);
    layer.k_clip = 0.96;
    layer.v_clip = 0.92;
    layer.held_out_json = R"({"k_error": [0.1, 0.2]})";
    bundle.layers.emplace(id, layer);
  }
  return bundle;
}

}  // namespace

TEST_CASE("a bundle comes back as written, layers in numeric order") {
  oscar_test::TemporaryFolder folder;
  const Bundle written = sample_bundle();
  write_bundle(written, folder / "b.h5");
  const Bundle read = read_bundle(folder / "b.h5");
  CHECK(read.info.recipe == "best");
  CHECK(read.info.options_json == written.info.options_json);
  CHECK(read.info.tokens == 1000);
  CHECK(read.info.token_fingerprints == written.info.token_fingerprints);
  REQUIRE(read.layers.size() == 3);
  CHECK(std::next(read.layers.begin())->first == 2);
  const BundleLayer& layer = read.layers.at(10);
  CHECK(layer.v_rotation.shape == Shape{2, 8, 8});
  CHECK(layer.v_rotation.values == written.layers.at(10).v_rotation.values);
  CHECK(layer.k_eigenvalues.values == std::vector<double>(8, 10.0));
  CHECK(layer.v_mean.empty());
  CHECK(layer.k_position_mean.values == std::vector<float>(16, 0.25F));
  CHECK(layer.k_position_offset.values == std::vector<float>(16, 0.125F));
  CHECK(layer.k_scale_max.values == std::vector<float>{3.0F, 3.0F});
  CHECK(layer.held_out_json == written.layers.at(10).held_out_json);
  CHECK(layer.k_multipliers.empty());
  CHECK(layer.v_multipliers.values == std::vector<float>{1.25F, 1.25F, 1.25F, 1.25F, 1.25F, 0.0F});
  CHECK(layer.k_clip == 0.96);
}

TEST_CASE("an invalid bundle is neither written nor read") {
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "b.h5";
  const auto refuse = [&](auto change, const std::string& expected) {
    Bundle bundle = sample_bundle();
    change(bundle);
    CHECK_THROWS_WITH(write_bundle(bundle, path), Contains(expected));
    CHECK(std::filesystem::is_empty(folder.path()));
  };
  refuse([](Bundle& b) { b.layers.at(2).k_rotation.values[3] = 0.01F; }, "not orthogonal");
  refuse([](Bundle& b) { b.layers.at(2).k_mean = TensorF({3, 8}); }, "expected shape [2, 8]");
  refuse([](Bundle& b) { b.layers.at(2).k_mean = TensorF({1, 8}); }, "/layers/2/k_mean");
  refuse(
      [](Bundle& b) {
        b.layers.at(2).k_position_mean = TensorF({2, 4});
      },
      "/layers/2/k_position_mean: expected shape [2, 8]");
  refuse([](Bundle& b) { b.layers.at(2).k_position_offset = {}; }, "has only one of");
  refuse([](Bundle& b) { b.layers.at(2).k_position_mean = b.layers.at(2).k_position_offset = {}; },
         "layer 2 has no k_position_mean");
  refuse([](Bundle& b) { b.layers.at(2).k_metric.values[0] = NAN; }, "non-finite");
  refuse([](Bundle& b) { b.layers.at(2).k_clip = 1.5; }, "k_clip");
  refuse(
      [](Bundle& b) {
        b.layers.at(2).v_multipliers = TensorF({3, 1}, 1.0F);
      },
      "/layers/2/v_multipliers: expected shape [2, n], got [3, 1]");
  for (const size_t wrong : {0U, 1U, 3U})  // no set, a hole
    refuse([wrong](Bundle& b) { b.layers.at(2).v_multipliers.values[wrong] = 0.0F; },
           "expected factors from 0.1 to 10, then zeros");
  refuse([](Bundle& b) { b.layers.at(2).v_multipliers.values[1] = 11.0F; },
         "/layers/2/v_multipliers of head 0");
  refuse([](Bundle& b) { b.info.num_layers = 5; }, "layer 10");
  refuse([](Bundle& b) { b.info.num_kv_heads = 4; }, "impossible geometry");
  refuse([](Bundle& b) { b.layers.clear(); }, "no layers");
  refuse([](Bundle& b) { std::swap(b.info.token_fingerprints[0], b.info.token_fingerprints[2]); },
         "/token_fingerprints are not in ascending order");
}

TEST_CASE("files of another kind are not taken for bundles") {
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  {
    Hdf5File file = Hdf5File::create(path);
    file.close();
  }
  CHECK_THROWS_WITH(read_bundle(path), Contains("format"));
  {
    Hdf5File file = Hdf5File::create(path);
    file.write_attribute("/", "format", std::string("oscar-capture"));
    file.close();
  }
  CHECK_THROWS_WITH(read_bundle(path), Contains("expected format oscar-bundle, got oscar-capture"));
  {
    Hdf5File file = Hdf5File::create(path);
    file.write_attribute("/", "format", std::string("oscar-bundle"));
    file.write_attribute("/", "format_version", int64_t{9});
    file.close();
  }
  CHECK_THROWS_WITH(read_bundle(path), Contains("version 1, got 9"));
}
