// Bundles that lost something on their way, and unusual rows, from the file to what a command says.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/random.h"
#include "io/bundle_file.h"
#include "io/hdf5_file.h"
#include "io/results.h"
#include "support/paths.h"
#include "tests/calib/synthetic_capture.h"
#include "tools/cmd_calibrate.h"
#include "tools/cmd_simulate.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Matchers::Contains;

namespace {

constexpr size_t kDim = 16, kHeads = 2;

// A capture, a bundle of it and a command that reads both.
struct Files {
  TemporaryFolder folder;
  SimulateCommand simulate;

  explicit Files(const std::string& recipe = "best") {
    write_synthetic_capture(folder / "c.h5", {.lengths = {400, 400, 400}, .layers = {0, 1, 2, 3}});
    CalibrateCommand command;
    command.capture = folder / "c.h5";
    command.out = folder / "b.h5";
    command.recipes = {recipe};
    command.quiet = true;
    run_calibrate(command);
    simulate.capture = folder / "c.h5";
    simulate.bundle = folder / "b.h5";
    simulate.out = folder / "rows.jsonl";
    simulate.arms = {"oscar-best"};
    simulate.quiet = true;
  }
  // The bundle without the tensor in any layer, to be written anew.
  Hdf5File without(TensorF BundleLayer::*tensor) const {
    Bundle bundle = read_bundle(simulate.bundle);
    for (auto& [id, layer] : bundle.layers) layer.*tensor = {};
    write_bundle(bundle, simulate.bundle);
    return Hdf5File::open_write(simulate.bundle);
  }
  void refused(const std::string& expected) const {
    CHECK_THROWS_WITH(run_simulate(simulate), Contains(expected));
    CHECK_FALSE(std::filesystem::exists(simulate.out));
  }
};

// Ones on the first `count` places of the diagonal of every head.
TensorF diagonal(size_t heads, size_t count) {
  TensorF metric({heads, kDim, kDim}, 0.0F);
  for (size_t h = 0; h < heads; ++h)
    for (size_t i = 0; i < count; ++i) metric.at(h)[i * kDim + i] = 1.0F;
  return metric;
}

}  // namespace

TEST_CASE("a metric that is missing for a head or a layer is refused by name") {
  const Files files;
  SECTION("head") {
    {
      Hdf5File file = files.without(&BundleLayer::k_metric);
      for (const char* layer : {"0", "1", "2", "3"})
        file.write(std::string("/layers/") + layer + "/k_metric",
                   diagonal(*layer == '3' ? 1 : kHeads, kDim));
    }
    files.refused("/layers/3/k_metric: expected shape [2, 16, 16], got [1, 16, 16]");
  }
  SECTION("layer") {
    files.without(&BundleLayer::v_metric).write("/layers/0/v_metric", diagonal(kHeads, kDim));
    files.refused("has no v_metric, which layer 0 has");
  }
}

TEST_CASE(
    "a metric that is not finite, or no metric at all, is refused; a singular one is damped") {
  const Files files;
  const auto overwrite = [&](const TensorF& metric) {
    Hdf5File::open_write(files.simulate.bundle)
        .write_rows("/layers/3/k_metric", 0, kHeads, metric.data());
  };
  TensorF metric = diagonal(kHeads, kDim);
  SECTION("infinite") {
    metric.at(1)[5] = INFINITY;
    overwrite(metric);
    files.refused("/layers/3/k_metric has a non-finite value");
  }
  SECTION("zero") {
    overwrite(diagonal(kHeads, 0));
    files.refused("layer 3, keys, KV head 0: encoder metric: the mean of the diagonal");
  }
  SECTION("indefinite") {
    metric.at(1)[1] = metric.at(1)[kDim] = 2.0F;
    overwrite(metric);
    files.refused("layer 3, keys, KV head 1: encoder metric: not positive semidefinite");
  }
  SECTION("singular") {
    overwrite(diagonal(kHeads, 1));  // one direction counts, 15 do not
    run_simulate(files.simulate);
    const auto rows = read_rows(files.simulate.out);
    CHECK(rows.size() > 4);
    for (const ResultRow& row : rows) CHECK(std::isfinite(row.value));
  }
}

TEST_CASE("a bundle without metrics cannot serve an arm with feedback") {
  Files files("centered");
  files.refused("no attention metric");
  files.simulate.arms = {"oscar-centered:k.metric-gain"};
  files.refused("calibrate with --recipe light, lean or best");
  files.simulate.arms = {"oscar-centered"};
  CHECK_NOTHROW(run_simulate(files.simulate));
}

TEST_CASE("rows of zeros, constant rows and huge means go through calibration and every encoder") {
  const TemporaryFolder folder;
  const SyntheticCapture spec;
  {
    CaptureWriter writer(folder / "c.h5", synthetic_info(spec));
    for (uint64_t s = 0; s < 3; ++s) {
      const size_t length = 400;
      writer.begin_sequence(std::vector<int32_t>(length, 7));
      auto q = synthetic_rows(s, length, spec.num_heads, kDim);
      auto k = synthetic_rows(s + 10, length, kHeads, kDim);
      auto v = synthetic_rows(s + 20, length, kHeads, kDim);
      for (size_t t = 0; t < length; ++t) {
        float* key = k.data() + t * kHeads * kDim;
        float* value = v.data() + t * kHeads * kDim;
        for (size_t d = 0; d < kDim; ++d) key[d] += 1e4F;  // head 0: mean 10^4, spread 1
        if (t % 3 == 0) std::fill_n(key + kDim, kDim, 0.0F);
        if (t % 3 == 1) std::fill_n(value, kDim, 0.0F);
        if (t % 3 == 2) std::fill_n(value + kDim, kDim, -2.5F);
      }
      for (int64_t layer = 0; layer < 4; ++layer)
        writer.append(layer, q.data(), k.data(), v.data(), nullptr);
      writer.end_sequence();
    }
    writer.finish();
  }
  CalibrateCommand command;
  command.capture = folder / "c.h5";
  command.out = folder / "b-{recipe}.h5";
  command.recipes = {"centered", "light", "lean", "best"};
  command.quiet = true;
  run_calibrate(command);
  for (const char* recipe : {"centered", "light", "lean", "best"}) {
    SimulateCommand simulate;
    simulate.capture = command.capture;
    simulate.bundle = folder / (std::string("b-") + recipe + ".h5");
    simulate.out = folder / (std::string(recipe) + ".jsonl");
    simulate.arms = {std::string("oscar-") + recipe, "int8:k.centered"};
    simulate.quiet = true;
    run_simulate(simulate);
    const auto rows = read_rows(simulate.out);
    REQUIRE_FALSE(rows.empty());
    for (const ResultRow& row : rows) {
      INFO(recipe << " " << row.arm << " " << row.cell << " " << row.metric);
      CHECK(std::isfinite(row.value));
      for (const auto& [name, number] : row.numbers) CHECK(std::isfinite(number));
    }
  }
}
