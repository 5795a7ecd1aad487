// Shards of a text on the demo model, from `calibrate --moments-out` to the merged bundle.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "io/bundle_file.h"
#include "support/compare.h"
#include "support/paths.h"
#include "tools/cmd_calibrate.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Matchers::Contains;

namespace {

constexpr size_t kSequence = 256;

CalibrateCommand base_command() {
  CalibrateCommand command;
  command.recipes = {"official", "paper", "lean"};
  command.sink = 16;
  command.recent = 32;
  command.sign_patterns = 0;
  command.held_out = 0.0;
  command.quiet = true;
  return command;
}

// Sequences [first, first + count) of the text.
CalibrateCommand shard(size_t first, size_t count, double held_out) {
  CalibrateCommand command = base_command();
  command.model = demo_model()->string();
  command.texts = {demo_text("emma")->string()};
  command.lengths = {kSequence};
  command.skip_tokens = first * kSequence;
  command.tokens = count * kSequence;
  command.held_out = held_out;
  return command;
}

std::string write_moments(CalibrateCommand command, const std::string& path) {
  command.moments_out = path;
  run_calibrate(command);
  return path;
}

void check_near(const TensorF& actual, const TensorF& expected, double tolerance) {
  REQUIRE(actual.shape == expected.shape);
  CHECK_CLOSE(actual.data(), expected.data(), expected.size(), {.absolute = tolerance});
}

}  // namespace

TEST_CASE("shards of moments make the bundle of one run, what does not fit is refused", "[model]") {
  SKIP_UNLESS(demo_model() && demo_text("emma"), "the demo model is not in the cache folder");
  const TemporaryFolder folder;
  const auto bundle = [&](const std::string& stem, const std::string& recipe) {
    return read_bundle(folder / (stem + "-" + recipe + ".h5"));
  };
  CalibrateCommand whole = shard(0, 4, 0.25);
  whole.out = folder / "whole-{recipe}.h5";
  run_calibrate(whole);
  const std::string a = write_moments(shard(0, 2, 0.0), folder / "a.h5");
  const std::string b = write_moments(shard(2, 2, 0.5), folder / "b.h5");

  CalibrateCommand merge = base_command();
  merge.moments = {a, b};
  merge.out = folder / "merged-{recipe}.h5";
  run_calibrate(merge);
  for (const std::string& recipe : merge.recipes) {
    INFO(recipe);
    const Bundle one = bundle("whole", recipe), merged = bundle("merged", recipe);
    CHECK(merged.info.tokens == 3 * kSequence);
    CHECK(merged.info.token_fingerprints == one.info.token_fingerprints);
    // Only the published weights of the values need the queries of all shards at once.
    CHECK(merged.info.approximate == (recipe != "paper"));
    REQUIRE(merged.layers.size() == 30);
    for (const auto& [id, layer] : one.layers) {
      INFO("layer " << id);
      const BundleLayer& found = merged.layers.at(id);
      CHECK(found.k_eigenvalues.shape == layer.k_eigenvalues.shape);
      CHECK_CLOSE(found.k_eigenvalues.data(), layer.k_eigenvalues.data(),
                  layer.k_eigenvalues.size(),
                  {.absolute = 1e-9 * layer.k_eigenvalues.values.back()});
      if (recipe == "paper")
        CHECK_CLOSE(found.v_eigenvalues.data(), layer.v_eigenvalues.data(),
                    layer.v_eigenvalues.size(),
                    {.absolute = 1e-9 * layer.v_eigenvalues.values.back()});
      if (recipe != "lean") continue;
      check_near(found.k_mean, layer.k_mean, 1e-5);      // float32 storage
      check_near(found.k_metric, layer.k_metric, 1e-5);  // mean diagonal 1
    }
  }

  const auto refuse = [&](const std::vector<std::string>& moments, const std::string& expected,
                          size_t recent = 32) {
    CalibrateCommand command = base_command();
    command.moments = moments;
    command.recent = recent;
    command.out = folder / "none-{recipe}.h5";
    CHECK_THROWS_WITH(run_calibrate(command), Contains(expected));
    CHECK_FALSE(std::filesystem::exists(folder / "none-paper.h5"));
  };
  const std::string overlapping = write_moments(shard(1, 2, 0.0), folder / "overlapping.h5");
  refuse({a, overlapping}, "overlapping.h5");
  refuse({a, a}, "a.h5");
  refuse({a, b}, "--sink 16 --recent 32, not 16 and 64", 64);
  CalibrateCommand other = shard(2, 2, 0.0);
  other.recent = 64;
  refuse({a, write_moments(other, folder / "windows.h5")}, "windows.h5");
}
