#include "tools/calibrate_recipe.h"

#include <cmath>

#include "base/error.h"

namespace oscar {

RecipeOptions chosen_recipe(const CalibrateCommand& options, const std::string& name) {
  RecipeOptions recipe = recipe_options(name);
  if (!options.key_target.empty()) recipe.key_target = parse_key_target(options.key_target);
  if (!options.value_target.empty()) recipe.value_target = parse_value_target(options.value_target);
  if (!options.composition.empty())
    recipe.rotation.composition = parse_composition(options.composition);
  if (options.block_hadamard) recipe.rotation.form = HadamardForm::kBlock;
  OSCAR_CHECK(!std::isnan(options.clip_k) && !std::isnan(options.clip_v),
              "--clip-k, --clip-v: expected 0 .. 1, got not a number");
  if (options.clip_k >= 0.0) recipe.k_clip = options.clip_k;
  if (options.clip_v >= 0.0) recipe.v_clip = options.clip_v;
  recipe.rotation.per_head = recipe.rotation.per_head || options.per_head;
  recipe.center_keys = recipe.center_keys || options.center;
  if (!options.key_metric.empty() && recipe.key_metric != KeyMetric::kNone)
    recipe.key_metric = parse_key_metric(options.key_metric);
  if (!options.center_values.empty() && recipe.value_metric)
    recipe.value_centering = parse_value_centering(options.center_values);
  if (options.keep_rotation) recipe.decide_rotation = false;
  if (options.sign_patterns >= 0) recipe.sign_patterns = options.sign_patterns;
  if (recipe.key_metric != KeyMetric::kNone)
    for (const std::string& text : options.multiplier_sets) {
      const auto set = parse_multipliers(text);
      OSCAR_CHECK(set.has_value(),
                  "--multipliers: expected factors from 0.1 to 10 joined by slashes, for example "
                  "0.9/1/1.1, got \"",
                  text, "\"");
      recipe.multiplier_sets.push_back(*set);
    }
  return recipe;
}

}  // namespace oscar
