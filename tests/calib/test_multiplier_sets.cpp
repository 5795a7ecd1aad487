#include "calib/calibrate.h"
#include "support/compare.h"
#include "support/paths.h"
#include "synthetic_capture.h"

using namespace oscar;
using namespace oscar_test;

TEST_CASE("sets of multipliers compete under the chosen rotation") {
  TemporaryFolder folder;
  write_synthetic_capture(folder / "c.h5", {.lengths = {400, 400, 400}, .key_mean = 0.5});
  const CaptureReader reader(folder / "c.h5");
  const auto source = capture_source(reader);
  CalibrationOptions options;
  const std::vector<double> poor{3.0}, wide{0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5};
  options.recipes = {recipe_options("lean"), recipe_options("best"), recipe_options("light")};
  for (RecipeOptions& recipe : options.recipes) recipe.multiplier_sets = {poor, wide};
  options.recipes.push_back(recipe_options("lean"));
  options.recipes.back().multiplier_sets = {poor};
  options.held_out_fraction = 1.0 / 3;
  options.sink = 16;
  options.recent = 32;
  const CalibrationResult result = calibrate(*source, options, Progress{});
  size_t other = 0;
  for (size_t recipe = 0; recipe < 3; ++recipe) {
    const auto& layers = result.recipes[recipe].bundle.layers;
    for (const LayerReport& report : result.recipes[recipe].layers) {
      const BundleLayer& layer = layers.at(static_cast<int64_t>(report.layer));
      for (size_t head = 0; head < 2; ++head) {
        const HeadDecision& decision = report.k_decisions[head];
        REQUIRE(decision.multipliers.size() == 3);
        CHECK(decision.multipliers[1].name == "3");
        CHECK(decision.multipliers[1].error > decision.multipliers[0].error);
        const size_t chosen = decision.chosen_multipliers;
        CHECK(chosen != 1);
        CHECK(decision.error == Approx(decision.multipliers[chosen].error));
        CHECK(decision.error <= decision.multipliers[0].error);
        if (chosen == 0) continue;
        ++other;
        CHECK(decision.multipliers[2].error < 0.99 * decision.multipliers[0].error);
        REQUIRE(layer.k_multipliers.shape == Shape{2, 9});
        CHECK(layer.k_multipliers.at(head)[0] == 0.7F);
        CHECK(layer.k_multipliers.at(head)[8] == 1.5F);
      }
      // Values of `light` are rounded to nearest: nothing to decide.
      CHECK(report.v_decisions[0].multipliers.empty() == (recipe == 2));
    }
    write_bundle(result.recipes[recipe].bundle, folder / "b.h5");
  }
  CHECK(other > 0);
  CHECK(result.recipes[3].bundle.layers.at(0).k_multipliers.empty());
}
