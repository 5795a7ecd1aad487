#include "calib/layer_fit.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "calib/gates.h"

namespace oscar {
namespace {

using nlohmann::json;

json to_json(const SideReport& side) {
  return {{"calibrated", side.calibrated.value},
          {"calibrated_per_head", side.calibrated.per_head},
          {"hadamard", side.hadamard.value},
          {"hadamard_per_head", side.hadamard.per_head},
          {"identity", side.identity.value},
          {"minus_hadamard", side.minus_hadamard.value},
          {"minus_hadamard_se", side.minus_hadamard.standard_error}};
}

json to_json(const std::vector<ContestEntry>& candidates) {
  json entries = json::array();
  for (const ContestEntry& entry : candidates)
    entries.push_back({{"form", entry.name},
                       {"error", entry.error},
                       {"minus_first", entry.minus_first},
                       {"se", entry.se}});
  return entries;
}

json to_json(const std::vector<HeadDecision>& decisions) {
  json heads = json::array();
  for (const HeadDecision& decision : decisions) {
    heads.push_back({{"chosen", decision.entries[decision.chosen].name},
                     {"candidates", to_json(decision.entries)},
                     {"error", decision.error},
                     {"centered_recipe", decision.centered_error},
                     {"minus_centered_recipe", decision.centered_difference},
                     {"minus_centered_recipe_se", decision.centered_se}});
    if (!decision.multipliers.empty()) {
      heads.back()["multipliers"] = decision.multipliers[decision.chosen_multipliers].name;
      heads.back()["multiplier_candidates"] = to_json(decision.multipliers);
    }
    if (decision.position_error >= 0.0) heads.back()["by_position"] = decision.position_error;
  }
  return heads;
}

json to_json(const LayerReport& report) {
  json result = json::object();
  if (report.measured) result = {{"k", to_json(report.k)}, {"v", to_json(report.v)}};
  const auto comparison = [](const LayerComparison& layer) -> json {
    return {
        {"difference", layer.difference}, {"se", layer.standard_error}, {"worse", layer.worse()}};
  };
  if (!report.k_decisions.empty()) {
    const LayerComparison k = minus_centered(report.k_decisions);
    const LayerComparison v = minus_centered(report.v_decisions);
    result["attention_output"] = {{"k", to_json(report.k_decisions)},
                                  {"v", to_json(report.v_decisions)},
                                  {"k_minus_centered_recipe", comparison(k)},
                                  {"v_minus_centered_recipe", comparison(v)},
                                  {"minus_centered_recipe", comparison(sum(k, v))}};
  }
  return result;
}

const char* metric_name(KeyMetric metric) {
  switch (metric) {
    case KeyMetric::kNone:
      return "none";
    case KeyMetric::kLogit:
      return "M_A";
    case KeyMetric::kOutput:
      return "M_O";
    case KeyMetric::kQueries:
      return "C_Q";
  }
  return "?";
}

json policy(const RecipeOptions& recipe, const LayerReport& report, bool energy_known) {
  json result{
      {"recipe", recipe.name},
      {"rotation",
       recipe.rotation.hadamard ? "hadamard" : composition_name(recipe.rotation.composition)},
      {"per_head", recipe.rotation.per_head},
      {"key_target", target_name(recipe.key_target)},
      {"value_target", target_name(recipe.value_target)},
      {"center_keys", recipe.center_keys}};
  if (recipe.key_metric != KeyMetric::kNone) {
    result["key_metric"] = metric_name(recipe.key_metric);
    result["output_projection"] = energy_known ? "model" : "identity (weights not given)";
  }
  const auto choices = [](const std::vector<HeadDecision>& decisions) {
    json names = json::array();
    for (const HeadDecision& decision : decisions)
      names.push_back(decision.entries[decision.chosen].name);
    return names;
  };
  if (!report.k_decisions.empty()) {
    result["k_forms"] = choices(report.k_decisions);
    result["v_forms"] = choices(report.v_decisions);
    result["contest_encoder"] = "lean";
    result["sign_patterns"] = recipe.sign_patterns;
  }
  return result;
}

// A metric as stored: float32 with mean diagonal 1, because only its shape matters.
bool store_metric(const TensorD& metric, float* out) {
  const size_t dim = metric.extent(0);
  double trace = 0.0;
  for (size_t i = 0; i < dim; ++i) trace += metric.values[i * dim + i];
  if (!(trace > 0.0)) return false;
  const double factor = static_cast<double>(dim) / trace;
  for (size_t i = 0; i < metric.size(); ++i) out[i] = static_cast<float>(metric.values[i] * factor);
  return true;
}

}  // namespace

TensorF mean_rows(const LayerStatistics& statistics, RowSum HeadStatistics::*kind) {
  const HeadGeometry& geometry = statistics.geometry();
  TensorF means({geometry.num_kv_heads, geometry.head_dim});
  for (size_t h = 0; h < geometry.num_kv_heads; ++h) {
    const std::vector<double> mean = (statistics.head(h).*kind).mean();
    std::transform(mean.begin(), mean.end(), means.at(h),
                   [](double value) { return static_cast<float>(value); });
  }
  return means;
}

LayerFit::LayerFit(const LayerInputs& inputs, const LayerFitOptions& options)
    : inputs_(inputs), options_(options), geometry_(inputs.moments->calibration.geometry()) {
  const LayerMoments& moments = *inputs.moments;
  if (moments.held_out && moments.held_out->num_tokens > 0) prepare_held_out();
}

void LayerFit::prepare_held_out() {
  held_out_.emplace();
  const HeldOutSample& sample = *inputs_.moments->held_out;
  const size_t count = sample.num_tokens;
  for (const GramSum& queries : inputs_.moments->held_out_queries)
    held_out_->c_q.push_back(queries.mean());
  for (size_t h = 0; h < geometry_.num_kv_heads; ++h) {
    std::vector<double> weights(count);
    proxy_weights(geometry_, sample.k.data(), count, h, held_out_->c_q[h], weights.data());
    double sum = 0.0;
    for (const double weight : weights) sum += weight;
    for (double& weight : weights) weight *= static_cast<double>(count) / std::max(sum, 1e-12);
    held_out_->weights.push_back(std::move(weights));
  }
}

void LayerFit::require(bool collected, const char* what) const {
  OSCAR_CHECK(collected, "layer ", inputs_.layer, ": the statistics hold no ", what,
              ", which the recipe needs");
}

const std::vector<TensorD>& LayerFit::keys(KeyTarget target) {
  auto& cached = keys_[target];
  const LayerStatistics& statistics = inputs_.moments->calibration;
  if (!cached.empty()) return cached;
  const bool queries = target == KeyTarget::kQqt;
  require((queries ? statistics.head(0).queries : statistics.head(0).keys).count() > 0.0,
          queries ? "second moments of the queries" : "second moments of the keys");
  cached = key_covariances(statistics, target);
  return cached;
}

const std::vector<TensorD>& LayerFit::values(ValueTarget target) {
  auto& cached = values_[target];
  if (!cached.empty()) return cached;
  const LayerMoments& moments = *inputs_.moments;
  switch (target) {
    case ValueTarget::kSst:
      require(moments.calibration.head(0).outputs.count() > 0.0,
              "second moments of the attention outputs (target sst)");
      break;
    case ValueTarget::kProxy:
      require(!moments.proxy.empty(), "weighted second moments of the values (target proxy)");
      break;
    case ValueTarget::kVtv:
      require(moments.calibration.head(0).values.count() > 0.0, "second moments of the values");
      break;
  }
  cached = value_covariances(moments.calibration, target, moments.proxy);
  return cached;
}

BundleLayer LayerFit::fit(const RecipeOptions& recipe, LayerReport& report,
                          std::vector<std::string>& warnings) {
  BundleLayer layer;
  const std::string name = cat("layer ", inputs_.layer);
  const FittedRotation k =
      fit_rotation(keys(recipe.key_target), recipe.rotation,
                   cat(name, ", key covariance ", target_name(recipe.key_target)));
  const FittedRotation v =
      fit_rotation(values(recipe.value_target), recipe.rotation,
                   cat(name, ", value covariance ", target_name(recipe.value_target)));
  layer.k_rotation = k.rotation;
  layer.v_rotation = v.rotation;
  layer.k_eigenvalues = k.eigenvalues;
  layer.v_eigenvalues = v.eigenvalues;
  layer.k_clip = recipe.k_clip;
  layer.v_clip = recipe.v_clip;
  if (!recipe.rotation.hadamard) warn_about_rank(recipe, layer, warnings);
  const LayerStatistics& statistics = inputs_.moments->calibration;
  if (recipe.center_keys || recipe.value_centering != ValueCentering::kNever)
    require(statistics.head(0).key_mean.count() > 0.0, "means (positions behind the sink)");
  if (recipe.center_keys) layer.k_mean = mean_rows(statistics, &HeadStatistics::key_mean);
  if (recipe.center_keys && statistics.has_position_means())
    fit_position_center(statistics, layer.k_position_mean, layer.k_position_offset);
  if (recipe.value_centering == ValueCentering::kAlways)
    layer.v_mean = mean_rows(statistics, &HeadStatistics::value_mean);
  report.layer = inputs_.layer;
  if (held_out_) measure(recipe, layer, report);
  if (recipe.key_metric != KeyMetric::kNone) add_metrics(recipe, layer, warnings);
  if (recipe.needs_contest() && held_out_) decide(recipe, layer, report, warnings);
  layer.policy_json = policy(recipe, report, inputs_.energy_known).dump();
  layer.held_out_json = to_json(report).dump();
  return layer;
}

TensorD LayerFit::key_metric(KeyMetric kind, size_t head) const {
  if (kind == KeyMetric::kQueries) return inputs_.moments->calibration.head(head).queries.mean();
  const LayerMetrics& metrics = inputs_.moments->metrics;
  const bool output = kind == KeyMetric::kOutput;
  const std::vector<GramSum>& sums = output ? metrics.output_sums() : metrics.logit_sums();
  OSCAR_CHECK(head < sums.size() && sums[head].count() > 0.0, "layer ", inputs_.layer, ", KV head ",
              head, ": the statistics hold no metric ", metric_name(kind),
              ", which the recipe needs (sequences longer than sink + recent?)");
  return sums[head].mean();
}

void LayerFit::add_metrics(const RecipeOptions& recipe, BundleLayer& layer,
                           std::vector<std::string>& warnings) const {
  const size_t heads = geometry_.num_kv_heads, dim = geometry_.head_dim;
  layer.k_metric = TensorF({heads, dim, dim});
  layer.v_metric = TensorF({heads, dim, dim});
  require(inputs_.moments->energy != nullptr, "output projections (M_V)");
  const std::vector<TensorD> v_metrics = value_metrics(*inputs_.moments->energy, heads);
  const auto store = [&](const TensorD& metric, const char* kind, size_t head, float* out) {
    if (store_metric(metric, out)) return;
    for (size_t i = 0; i < dim; ++i) out[i * dim + i] = 1.0F;
    warnings.push_back(cat("layer ", inputs_.layer, ", KV head ", head, ": the ", kind,
                           " metric is zero; the identity is stored"));
  };
  for (size_t h = 0; h < heads; ++h) {
    store(key_metric(recipe.key_metric, h), "key", h, layer.k_metric.at(h));
    store(v_metrics[h], "value", h, layer.v_metric.at(h));
  }
}

void LayerFit::decide(const RecipeOptions& recipe, BundleLayer& layer, LayerReport& report,
                      std::vector<std::string>& warnings) {
  const LayerMoments& moments = *inputs_.moments;
  if (!moments.contest || moments.contest->num_tokens == 0) {
    warnings.push_back(cat("layer ", inputs_.layer, ": no held-out sequence is longer than sink + ",
                           "recent = ", options_.contest.sink + options_.contest.recent,
                           " tokens; shared rotations, values not centered"));
    return;
  }
  const DecisionInputs inputs{&*moments.contest,
                              moments.energy.get(),
                              &recipe,
                              rotation_candidates(recipe),
                              mean_rows(moments.calibration, &HeadStatistics::value_mean),
                              moments.calibration.rope()};
  decide_by_contest(inputs, layer, report);
  const LayerComparison both =
      sum(minus_centered(report.k_decisions), minus_centered(report.v_decisions));
  if (both.worse())
    warnings.push_back(cat("layer ", inputs_.layer, ", recipe ", recipe.name,
                           ": held-out attention-output error is above that of `centered` by ",
                           both.difference, " +- ", both.standard_error));
}

// Rotations beside the layer's own: one a head, Hadamard, and all of them with other signs.
std::vector<RotationCandidate> LayerFit::rotation_candidates(const RecipeOptions& recipe) {
  std::vector<RotationCandidate> candidates;
  if (!recipe.decide_rotation || recipe.rotation.hadamard) return candidates;
  const std::string where = cat("layer ", inputs_.layer);
  const auto add = [&](const std::string& name, RotationOptions options, int pattern) {
    options.sign_pattern = static_cast<uint64_t>(pattern);
    candidates.push_back({pattern == 0 ? name : cat(name, "~", pattern),
                          fit_rotation(keys(recipe.key_target), options, where).rotation,
                          fit_rotation(values(recipe.value_target), options, where).rotation});
  };
  RotationOptions per_head = recipe.rotation, hadamard = recipe.rotation;
  per_head.per_head = true;
  hadamard.hadamard = true;
  hadamard.per_head = false;
  for (int pattern = 0; pattern <= recipe.sign_patterns; ++pattern) {
    if (!recipe.rotation.per_head) {
      if (pattern > 0) add("shared", recipe.rotation, pattern);
      add("per-head", per_head, pattern);
    } else if (pattern > 0) {
      add("per-head", per_head, pattern);
    }
    add("hadamard", hadamard, pattern);
  }
  return candidates;
}

void LayerFit::warn_about_rank(const RecipeOptions& recipe, const BundleLayer& layer,
                               std::vector<std::string>& warnings) const {
  const size_t dim = geometry_.head_dim;
  const auto check = [&](const TensorD& eigenvalues, const char* kind) {
    for (size_t h = 0; h < eigenvalues.extent(0); ++h) {
      const std::string head = recipe.rotation.per_head ? cat(" of head ", h) : "";
      check_rank(inputs_.layer, cat(recipe.name, " ", kind, " covariance", head),
                 {eigenvalues.at(h), eigenvalues.at(h) + dim}, warnings);
    }
  };
  check(layer.k_eigenvalues, "key");
  check(layer.v_eigenvalues, "value");
}

SideReport LayerFit::measure_side(const std::vector<float>& x, const TensorF& rotation,
                                  const TensorF& mean, double clip, HadamardForm form,
                                  const ErrorWeights& weights, bool centered_energy) const {
  const size_t count = inputs_.moments->held_out->num_tokens, dim = geometry_.head_dim;
  TensorF hadamard({1, dim, dim});
  hadamard.values = to_float(hadamard_matrix(dim, form));
  CodecSpec codec;
  codec.group = options_.group;
  codec.clip_ratio = clip;
  const auto errors = [&](const TensorF* candidate) {
    return storage_error(x, count, geometry_, {candidate, &mean, codec}, weights);
  };
  const std::vector<double> energy = row_energy(x, count, geometry_, centered_energy, weights);
  const TensorD calibrated = errors(&rotation), plain = errors(&hadamard);
  SideReport report;
  report.calibrated = relative_error(calibrated, energy);
  report.hadamard = relative_error(plain, energy);
  report.identity = relative_error(errors(nullptr), energy);
  report.minus_hadamard = paired_difference(calibrated, plain, energy);
  return report;
}

void LayerFit::measure(const RecipeOptions& recipe, const BundleLayer& layer,
                       LayerReport& report) const {
  report.measured = true;
  report.k = measure_side(inputs_.moments->held_out->k, layer.k_rotation, layer.k_mean,
                          recipe.k_clip, recipe.rotation.form, {.matrices = &held_out_->c_q}, true);
  report.v =
      measure_side(inputs_.moments->held_out->v, layer.v_rotation, layer.v_mean, recipe.v_clip,
                   recipe.rotation.form, {.tokens = &held_out_->weights}, false);
}

}  // namespace oscar
