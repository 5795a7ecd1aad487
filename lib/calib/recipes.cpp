#include "calib/recipes.h"

#include <functional>
#include <utility>

#include "base/error.h"

namespace oscar {
namespace {

void center(RecipeOptions& recipe) { recipe.center_keys = true; }

void light(RecipeOptions& recipe) {
  center(recipe);
  recipe.key_metric = KeyMetric::kLogit;
  recipe.decide_rotation = true;
  recipe.sign_patterns = 2;
}

void lean(RecipeOptions& recipe) {
  light(recipe);
  recipe.value_metric = true;
  recipe.value_centering = ValueCentering::kDecide;
}

void best(RecipeOptions& recipe) {
  lean(recipe);
  recipe.key_metric = KeyMetric::kOutput;
  recipe.log8 = true;
}

struct Named {
  const char* name;
  std::function<void(RecipeOptions&)> apply;
};

const std::vector<Named>& named() {
  static const std::vector<Named> recipes = {
      {"official", [](RecipeOptions&) {}},
      {"paper", [](RecipeOptions& r) { r.value_target = ValueTarget::kSst; }},
      {"centered", center},
      {"hadamard", [](RecipeOptions& r) { r.rotation.hadamard = true; }},
      {"light", light},
      {"lean", lean},
      {"best", best}};
  return recipes;
}

}  // namespace

RecipeOptions recipe_options(const std::string& name) {
  std::string known;
  for (const Named& recipe : named()) {
    if (recipe.name == name) {
      RecipeOptions options;
      options.name = name;
      recipe.apply(options);
      return options;
    }
    known += std::string(known.empty() ? "" : ", ") + recipe.name;
  }
  fail("unknown recipe \"", name, "\", expected one of: ", known);
}

KeyMetric parse_key_metric(const std::string& name) {
  if (name == "logit") return KeyMetric::kLogit;
  if (name == "output") return KeyMetric::kOutput;
  if (name == "queries") return KeyMetric::kQueries;
  fail("unknown key metric \"", name, "\", expected logit, output or queries");
}

ValueCentering parse_value_centering(const std::string& name) {
  if (name == "never") return ValueCentering::kNever;
  if (name == "decide") return ValueCentering::kDecide;
  if (name == "always") return ValueCentering::kAlways;
  fail("unknown value centering \"", name, "\", expected never, decide or always");
}

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (const Named& recipe : named()) names.emplace_back(recipe.name);
  return names;
}

CodecSpec contest_codec(const RecipeOptions& recipe, bool keys, int head_dim) {
  CodecSpec spec;
  spec.head_dim = head_dim;
  const bool with_metric = keys ? recipe.key_metric != KeyMetric::kNone : recipe.value_metric;
  if (with_metric) {
    spec.encoder = Encoder::kFeedback;
    spec.gain = GainRule::kMetric;
  } else {
    spec.clip_ratio = keys ? recipe.k_clip : recipe.v_clip;
    if (recipe.key_metric != KeyMetric::kNone) spec.gain = GainRule::kPlain;
  }
  return spec;
}

CodecSpec arm_codec(const RecipeOptions& recipe, bool keys, int head_dim) {
  CodecSpec spec = contest_codec(recipe, keys, head_dim);
  if (spec.encoder == Encoder::kFeedback && recipe.log8) spec.feedback = best_feedback();
  return spec;
}

AutoChoice choose_recipe(int head_dim, double max_bits, double max_write_cost) {
  CodecSpec spec;
  spec.head_dim = head_dim;
  const double fp16_bits = nominal_bits(spec);
  spec.meta = MetaFormat::kLog8;
  spec.log8_scale_max = 1.0F;
  const double log8_bits = nominal_bits(spec);
  OSCAR_CHECK(max_bits >= log8_bits, "--bits: the smallest format has ", log8_bits,
              " bits an element at head_dim ", head_dim, ", got a budget of ", max_bits);
  // Measured share of a bf16 forward pass of a small model (where it is largest),
  // results/encoder.md.
  constexpr double kBestCost = 0.12, kLeanCost = 0.05;
  const std::string budget =
      cat("budgets of ", max_bits, " bits and ", max_write_cost,
          " of a forward pass for writing; head_dim ", head_dim, " takes ", fp16_bits,
          " bits with fp16 and ", log8_bits, " with log-8 metadata");
  if (max_write_cost >= kBestCost)
    return {"best", cat("best: ", budget, "; its encoder needs up to ", kBestCost)};
  if (max_write_cost >= kLeanCost && max_bits >= fp16_bits)
    return {"lean", cat("lean: ", budget, "; best needs up to ", kBestCost, ", lean ", kLeanCost)};
  if (max_write_cost >= kLeanCost)
    return {"best", cat("best, with the lean encoder (arm oscar-lean:meta=log8): ", budget,
                        "; only log-8 metadata fits the bits")};
  OSCAR_CHECK(max_bits >= fp16_bits, "--bits ", max_bits, " and --write-cost ", max_write_cost,
              ": log-8 metadata (", log8_bits, " bits) needs an encoder that costs ", kLeanCost);
  return {"centered", cat("centered: ", budget, "; no feedback encoder fits the write budget")};
}

}  // namespace oscar
