#include <cmath>

#include "base/error.h"
#include "base/parallel.h"
#include "calib/calibrate.h"
#include "calib/gates.h"
#include "io/hdf5_file.h"
#include "support/compare.h"
#include "support/paths.h"
#include "synthetic_capture.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Contains;

namespace {

CalibrationResult run(const std::string& path, const std::vector<std::string>& recipes,
                      double held_out = 0.2) {
  const CaptureReader reader(path);
  const auto source = capture_source(reader);
  CalibrationOptions options;
  for (const std::string& name : recipes) options.recipes.push_back(recipe_options(name));
  options.held_out_fraction = held_out;
  return calibrate(*source, options, Progress{});
}

}  // namespace

TEST_CASE("a capture becomes bundles that can be written and read") {
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {.key_mean = 0.5});
  const CalibrationResult result =
      run(folder / "c.h5", {"official", "paper", "centered", "hadamard"});
  CHECK(result.tokens == 500);
  CHECK(result.held_out_tokens == 250);
  REQUIRE(result.recipes.size() == 4);
  for (const RecipeResult& recipe : result.recipes) {
    write_bundle(recipe.bundle, folder / "b.h5");
    const Bundle bundle = read_bundle(folder / "b.h5");
    CHECK(bundle.info.recipe == recipe.bundle.info.recipe);
    CHECK(bundle.info.tokens == 500);
    CHECK(bundle.info.sequence_length == 300);
    REQUIRE(bundle.layers.size() == 2);
    CHECK(bundle.layers.at(3).k_rotation.shape == Shape{1, 16, 16});
    CHECK(bundle.layers.at(3).k_mean.empty() == (recipe.bundle.info.recipe != "centered"));
    REQUIRE(recipe.layers.size() == 2);
    CHECK(recipe.layers[1].measured);
    CHECK(recipe.layers[1].k.calibrated.per_head.size() == 2);
  }
  // The constant part of the keys is what an INT2 row cannot hold.
  const auto key_error = [&](size_t recipe) {
    return result.recipes[recipe].layers[0].k.calibrated.value;
  };
  CHECK(key_error(2) < 0.5 * key_error(0));
  // The Hadamard recipe measures as Hadamard.
  CHECK(key_error(3) == result.recipes[3].layers[0].k.hadamard.value);
  CHECK_FALSE(result.recipes[3].layers[0].k.beats_hadamard());
  // Means: float of the double mean over positions from 64 on, exactly these tokens.
  const CaptureReader reader(folder / "c.h5");
  const auto k = reader.read(3, "k", 0, 500);
  std::vector<double> mean(32, 0.0);
  for (size_t t = 0; t < 500; ++t)
    if ((t < 300 ? t : t - 300) >= 64)
      for (size_t i = 0; i < 32; ++i) mean[i] += static_cast<double>(k[t * 32 + i]) / (236 + 136);
  CHECK_CLOSE(result.recipes[2].bundle.layers.at(3).k_mean.data(), mean.data(), 32,
              {.absolute = 1e-6});
}

TEST_CASE("the result does not depend on threads, on the order of recipes or on held-out tokens") {
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {.bf16 = true});
  set_num_threads(1);
  const CalibrationResult one = run(folder / "c.h5", {"official", "paper"});
  set_num_threads(3);
  const CalibrationResult three = run(folder / "c.h5", {"paper", "official"});
  set_num_threads(0);
  const auto& a = one.recipes[0].bundle.layers.at(0);
  const auto& b = three.recipes[1].bundle.layers.at(0);
  CHECK(a.k_rotation.values == b.k_rotation.values);
  CHECK(a.v_rotation.values == b.v_rotation.values);
  CHECK(a.held_out_json == b.held_out_json);
  CHECK(one.recipes[1].bundle.layers.at(0).v_rotation.values != a.v_rotation.values);
}

TEST_CASE("per-head rotations and other compositions") {
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {});
  const CaptureReader reader(folder / "c.h5");
  const auto source = capture_source(reader);
  CalibrationOptions options;
  RecipeOptions recipe = recipe_options("official");
  recipe.rotation.per_head = true;
  recipe.rotation.composition = Composition::kPlain;
  options.recipes.push_back(recipe);
  options.held_out_fraction = 0.0;
  const CalibrationResult result = calibrate(*source, options, Progress{});
  const BundleLayer& layer = result.recipes[0].bundle.layers.at(0);
  REQUIRE(layer.k_rotation.shape == Shape{2, 16, 16});
  CHECK_FALSE(result.recipes[0].layers[0].measured);
  CHECK(layer.held_out_json == "{}");
  // U diag(l) U^T is the second moment of the group's queries.
  const auto q = reader.read(0, "q", 0, 750);
  GramSum gram(16);
  gram.add(group_rows({4, 2, 16}, q.data(), 1, 0, 750));
  const TensorD expected = gram.mean();
  std::vector<double> back(256, 0.0);
  for (size_t i = 0; i < 16; ++i)
    for (size_t j = 0; j < 16; ++j)
      for (size_t c = 0; c < 16; ++c)
        back[i * 16 + j] += layer.k_eigenvalues.at(1)[c] *
                            static_cast<double>(layer.k_rotation.at(1)[i * 16 + c]) *
                            static_cast<double>(layer.k_rotation.at(1)[j * 16 + c]);
  CHECK_CLOSE(back.data(), expected.data(), 256, {.absolute = 1e-6});
}

TEST_CASE("captured outputs and recomputed outputs give the exact C_S") {
  TemporaryFolder folder;
  const SyntheticCapture spec{.lengths = {64, 40}};
  write_synthetic_capture(folder / "c.h5", spec);
  const CaptureReader reader(folder / "c.h5");
  const auto source = capture_source(reader);
  struct Direct : LayerObserver {
    HeadGeometry geometry;
    std::vector<double> sum = std::vector<double>(256, 0.0);
    void on_layer(const LayerActivations& a) override {
      if (a.layer != 3) return;
      for (size_t t = 0; t < a.num_tokens; ++t)
        for (size_t h = 0; h < 4; ++h) {  // softmax by hand, head h reads KV head h / 2
          const float* q = a.q + (t * 4 + h) * 16;
          std::vector<double> p(t + 1), o(16, 0.0);
          double total = 0.0;
          for (size_t j = 0; j <= t; ++j) {
            double score = 0.0;
            for (size_t d = 0; d < 16; ++d)
              score +=
                  static_cast<double>(q[d]) * static_cast<double>(a.k[(j * 2 + h / 2) * 16 + d]);
            total += p[j] = std::exp(score / 4.0);
          }
          for (size_t j = 0; j <= t; ++j)
            for (size_t d = 0; d < 16; ++d)
              o[d] += p[j] / total * static_cast<double>(a.v[(j * 2 + h / 2) * 16 + d]);
          CHECK_CLOSE(a.o + (t * 4 + h) * 16, o.data(), 16, {.absolute = 1e-5});
          CHECK(static_cast<double>(a.lse[t * 4 + h]) == Approx(std::log(total)).margin(1e-5));
          for (size_t i = 0; i < 16; ++i)
            for (size_t j = 0; j < 16; ++j) sum[i * 16 + j] += o[i] * o[j];
        }
    }
  } direct;
  source->visit({0, 3}, {.outputs = true, .log_sum_exp = true}, direct, Progress{});
  CalibrationOptions options;
  options.recipes.push_back(recipe_options("paper"));
  options.recipes.back().rotation.composition = Composition::kPlain;
  options.held_out_fraction = 0.0;
  const CalibrationResult result = calibrate(*source, options, Progress{});
  const BundleLayer& layer = result.recipes[0].bundle.layers.at(3);
  double trace = 0.0, expected_trace = 0.0;
  for (size_t i = 0; i < 16; ++i) {
    trace += layer.v_eigenvalues.values[i];
    expected_trace += direct.sum[i * 17] / (104.0 * 4.0);
  }
  CHECK(trace == Approx(expected_trace).epsilon(1e-5));
}

TEST_CASE("the held-out part starts at a sequence boundary where there is one") {
  CHECK(held_out_begin({0, 100, 200, 300, 400, 500}, 0.2) == 400);
  CHECK(held_out_begin({0, 100, 200, 300, 400, 500}, 0.3) == 300);
  CHECK(held_out_begin({0, 100, 110}, 0.5) == 100);
  CHECK(held_out_begin({0, 1000}, 0.2) == 800);
  CHECK(held_out_begin({0, 1000}, 0.0) == 1000);
}

TEST_CASE("calibration data that cannot work is refused, weak data is reported") {
  TemporaryFolder folder;
  const std::string path = folder / "c.h5";
  write_synthetic_capture(path, {.lengths = {10, 5}});
  CHECK_THROWS_WITH(run(path, {"official"}), Contains("tokens for head_dim 16"));
  std::filesystem::remove(path);
  write_synthetic_capture(path, {.lengths = {40, 20}});
  const CalibrationResult weak = run(path, {"official"});
  REQUIRE(weak.warnings.size() == 1);
  CHECK_THAT(weak.warnings[0], Contains("only 40 tokens"));
  CHECK_THROWS_WITH(recipe_options("zap"), Contains("official, paper"));
  CHECK_THROWS_WITH(run(path, {"official"}, 2.0), Contains("--held-out"));

  // Two bit-identical KV heads.
  std::filesystem::remove(path);
  {
    CaptureWriter writer(path, synthetic_info({}));
    writer.begin_sequence(std::vector<int32_t>(100, 1));
    const auto q = synthetic_rows(1, 100, 4, 16);
    auto k = synthetic_rows(2, 100, 2, 16);
    for (size_t i = 0; i < k.size(); ++i)
      if (i % 32 >= 16) k[i] = k[i - 16];
    writer.append(2, q.data(), k.data(), k.data(), nullptr);
    writer.end_sequence();
    writer.finish();
  }
  CHECK_THROWS_WITH(run(path, {"official"}),
                    Contains("layer 2, tensor k") && Contains("heads 0 and 1"));

  // Infinity in the file.
  std::filesystem::remove(path);
  write_synthetic_capture(path, {});
  {
    Hdf5File file = Hdf5File::open_write(path);
    std::vector<float> row(32, INFINITY);
    file.write_rows("/layers/3/v", 17, 1, row.data());
    file.close();
  }
  CHECK_THROWS_WITH(run(path, {"official"}), Contains("layer 3, tensor v") && Contains("token 17"));
}

TEST_CASE("gates") {
  CHECK(warm_up_sequences({0, 6, 1006, 2006}) == 1);
  CHECK(warm_up_sequences({0, 500, 1006, 2006}) == 0);
  CHECK(warm_up_sequences({0, 6}) == 0);
  CHECK_THROWS_WITH(check_head_coverage({4, 1, 64}, {8, 2, 64}, "dump"),
                    Contains("dump: 4 query and 1 KV heads, the model has 8 and 2"));
  CHECK_THROWS_WITH(check_head_coverage({8, 2, 32}, {8, 2, 64}, "dump"), Contains("head_dim 32"));
  CHECK_NOTHROW(check_head_coverage({8, 2, 64}, {8, 2, 64}, "dump"));
  std::vector<std::string> warnings;
  check_rank(3, "C_Q", {0.0, 0.0, 1.0}, warnings);
  CHECK(warnings == std::vector<std::string>{"layer 3: C_Q has rank 1 of 3"});
}
