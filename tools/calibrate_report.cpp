#include "tools/calibrate_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace oscar {
namespace {

// Mean over heads of the chosen form and of the recipe `centered`.
struct DecisionSummary {
  double chosen = 0.0, centered = 0.0;
  size_t exchanged = 0, with_mean = 0;
};
DecisionSummary summarise(const std::vector<HeadDecision>& decisions) {
  DecisionSummary summary;
  for (const HeadDecision& decision : decisions) {
    const ContestEntry& entry = decision.entries[decision.chosen];
    summary.chosen += decision.error / static_cast<double>(decisions.size());
    summary.centered += decision.centered_error / static_cast<double>(decisions.size());
    const bool with_mean = entry.name.ends_with("+mean");
    summary.with_mean += with_mean ? 1 : 0;
    const std::string& base = decision.entries[0].name;
    summary.exchanged += entry.name != base && entry.name != base + "+mean" ? 1 : 0;
  }
  return summary;
}

void print_contest(const RecipeResult& recipe) {
  if (recipe.layers.empty() || recipe.layers[0].k_decisions.empty()) return;
  fmt::print(
      "held-out attention-output error, bias included (keys or values alone)\n"
      "layer | K: chosen  centered  ratio  exchanged | V: chosen  centered  ratio  exchanged  "
      "V centered (heads)\n");
  double k_ratio = 0.0, v_ratio = 0.0;
  size_t k_worse = 0, v_worse = 0, worse = 0;
  for (const LayerReport& layer : recipe.layers) {
    const LayerComparison of_k = minus_centered(layer.k_decisions);
    const LayerComparison of_v = minus_centered(layer.v_decisions);
    k_worse += of_k.worse() ? 1 : 0;
    v_worse += of_v.worse() ? 1 : 0;
    worse += sum(of_k, of_v).worse() ? 1 : 0;
    const DecisionSummary k = summarise(layer.k_decisions), v = summarise(layer.v_decisions);
    const auto ratio = [](const DecisionSummary& s) {
      return s.centered > 0.0 ? s.chosen / s.centered : 0.0;
    };
    k_ratio += ratio(k) / static_cast<double>(recipe.layers.size());
    v_ratio += ratio(v) / static_cast<double>(recipe.layers.size());
    fmt::print("{:5} | {:9.5f}  {:8.5f}  {:5.2f}  {:9} | {:9.5f}  {:8.5f}  {:5.2f}  {:9}  {:9}{}\n",
               layer.layer, k.chosen, k.centered, ratio(k), k.exchanged, v.chosen, v.centered,
               ratio(v), v.exchanged, v.with_mean,
               sum(of_k, of_v).worse() ? "  worse than centered" : "");
  }
  fmt::print(
      "mean ratio to the recipe centered: K {:.3f}, V {:.3f}; worse by more than its error: K in "
      "{}, "
      "V in {}, both together in {} of {} layers\n",
      k_ratio, v_ratio, k_worse, v_worse, worse, recipe.layers.size());
}

void print_table(const RecipeResult& recipe, const std::string& path) {
  fmt::print("{} ({}): {} layers, {} tokens\n", path, recipe.bundle.info.recipe,
             recipe.bundle.layers.size(), recipe.bundle.info.tokens);
  if (recipe.layers.empty() || !recipe.layers[0].measured) return;
  fmt::print(
      "held-out relative error (K in the metric of the queries, V by attention weight)\n"
      "layer | K: calibrated  Hadamard  identity | V: calibrated  Hadamard  identity\n");
  size_t k_lost = 0, v_lost = 0;
  for (const LayerReport& layer : recipe.layers) {
    const bool flagged_k = !layer.k.beats_hadamard(), flagged_v = !layer.v.beats_hadamard();
    k_lost += flagged_k ? 1 : 0;
    v_lost += flagged_v ? 1 : 0;
    std::string flags;
    if (flagged_k) flags += "  K does not beat Hadamard";
    if (flagged_v) flags += std::string(flagged_k ? "," : " ") + " V does not beat Hadamard";
    fmt::print("{:5} | {:13.4f}  {:8.4f}  {:8.4f} | {:13.4f}  {:8.4f}  {:8.4f}{}\n", layer.layer,
               layer.k.calibrated.value, layer.k.hadamard.value, layer.k.identity.value,
               layer.v.calibrated.value, layer.v.hadamard.value, layer.v.identity.value, flags);
  }
  fmt::print("does not beat Hadamard on held-out tokens: K in {} and V in {} of {} layers\n",
             k_lost, v_lost, recipe.layers.size());
}

}  // namespace

std::string calibration_json(const RecipeResult& recipe, const std::string& path) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const auto& [id, layer] : recipe.bundle.layers)
    layers.push_back({{"layer", id},
                      {"policy", nlohmann::json::parse(layer.policy_json)},
                      {"held_out", nlohmann::json::parse(layer.held_out_json)}});
  return nlohmann::ordered_json{
      {"recipe", recipe.bundle.info.recipe}, {"out", path}, {"layers", layers}}
      .dump();
}

void print_calibration(const RecipeResult& recipe, const std::string& path) {
  print_table(recipe, path);
  print_contest(recipe);
}

}  // namespace oscar
