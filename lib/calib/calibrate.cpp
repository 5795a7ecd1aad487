#include "calib/calibrate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "calib/gates.h"

namespace oscar {
namespace {

constexpr size_t kDuplicateCheckTokens = 256;

// Collects the statistics of a batch of layers, calibration and held-out tokens apart.
class Collector : public LayerObserver {
 public:
  Collector(const ActivationSource& source, const std::vector<size_t>& layers,
            const StatisticsOptions& options, size_t held_out_from)
      : offsets_(source.sequence_offsets()), split_(held_out_from) {
    StatisticsOptions held_out_options = options;
    held_out_options.outputs = false;
    for (const size_t layer : layers) {
      calibration_.emplace(layer, LayerStatistics(source.geometry(), options));
      held_out_.emplace(layer, LayerStatistics(source.geometry(), held_out_options));
    }
  }

  void on_layer(const LayerActivations& activations) override {
    const size_t begin = offsets_[activations.sequence];
    const size_t end = begin + activations.num_tokens;
    OSCAR_CHECK(activations.first_position == 0 && end == offsets_[activations.sequence + 1],
                "calibration needs whole sequences");
    if (activations.sequence == 0) check_heads(activations);
    const size_t split = std::clamp(split_, begin, end) - begin;
    if (split > 0) calibration_.at(activations.layer).add(activations, 0, split);
    if (split < activations.num_tokens)
      held_out_.at(activations.layer).add(activations, split, activations.num_tokens);
  }

  const LayerStatistics& calibration(size_t layer) const { return calibration_.at(layer); }
  const LayerStatistics& held_out(size_t layer) const { return held_out_.at(layer); }

 private:
  void check_heads(const LayerActivations& activations) const {
    const HeadGeometry& geometry = calibration_.at(activations.layer).geometry();
    const size_t tokens = std::min(activations.num_tokens, kDuplicateCheckTokens);
    check_duplicate_heads(activations.layer, "q", activations.q, tokens, geometry.num_heads,
                          geometry.head_dim);
    check_duplicate_heads(activations.layer, "k", activations.k, tokens, geometry.num_kv_heads,
                          geometry.head_dim);
    check_duplicate_heads(activations.layer, "v", activations.v, tokens, geometry.num_kv_heads,
                          geometry.head_dim);
  }

  const std::vector<size_t>& offsets_;
  size_t split_;
  std::map<size_t, LayerStatistics> calibration_, held_out_;
};

// What all recipes of one layer share, computed on demand.
class LayerFit {
 public:
  LayerFit(const ActivationSource& source, size_t layer, const Collector& collector,
           const CalibrationOptions& options, size_t split)
      : source_(source), layer_(layer), statistics_(collector.calibration(layer)), split_(split) {
    if (split < source.num_tokens()) prepare_held_out(collector.held_out(layer), options);
  }

  BundleLayer fit(const RecipeOptions& recipe, const CalibrationOptions& options,
                  LayerReport& report, std::vector<std::string>& warnings) {
    BundleLayer layer;
    const std::string name = cat("layer ", layer_);
    const FittedRotation k =
        fit_rotation(keys(recipe.key_target), recipe.rotation,
                     cat(name, ", key covariance ", target_name(recipe.key_target)));
    const FittedRotation v =
        fit_rotation(values(recipe.value_target), recipe.rotation,
                     cat(name, ", value covariance ", target_name(recipe.value_target)));
    warn_about_rank(recipe, k, v, warnings);
    layer.k_rotation = k.rotation;
    layer.v_rotation = v.rotation;
    layer.k_eigenvalues = k.eigenvalues;
    layer.v_eigenvalues = v.eigenvalues;
    layer.k_clip = recipe.k_clip;
    layer.v_clip = recipe.v_clip;
    if (recipe.center_keys) layer.k_mean = key_means();
    layer.policy_json = policy(recipe).dump();
    report.layer = layer_;
    if (held_out_) measure(recipe, options, layer, report);
    layer.held_out_json = to_json(report).dump();
    return layer;
  }

 private:
  struct HeldOut {
    HeldOutSample sample;
    std::vector<TensorD> c_q;                  // [Hkv] of [D, D]
    std::vector<std::vector<double>> weights;  // [Hkv] of [num_tokens], mean 1
  };

  void prepare_held_out(const LayerStatistics& statistics, const CalibrationOptions& options) {
    held_out_.emplace();
    const HeadGeometry& geometry = source_.geometry();
    held_out_->sample = sample_held_out(source_.rows(), geometry, layer_, split_,
                                        source_.num_tokens(), options.held_out_max_tokens);
    const size_t count = held_out_->sample.num_tokens;
    held_out_->c_q = key_covariances(statistics, KeyTarget::kQqt);
    for (size_t h = 0; h < geometry.num_kv_heads; ++h) {
      std::vector<double> weights(count);
      proxy_weights(geometry, held_out_->sample.k.data(), count, h, held_out_->c_q[h],
                    weights.data());
      double sum = 0.0;
      for (const double weight : weights) sum += weight;
      for (double& weight : weights) weight *= static_cast<double>(count) / std::max(sum, 1e-12);
      held_out_->weights.push_back(std::move(weights));
    }
  }

  const std::vector<TensorD>& keys(KeyTarget target) {
    auto& cached = keys_[target];
    if (cached.empty()) cached = key_covariances(statistics_, target);
    return cached;
  }

  const std::vector<TensorD>& values(ValueTarget target) {
    auto& cached = values_[target];
    if (cached.empty())
      cached = value_covariances(statistics_, target, source_.rows(), layer_, split_);
    return cached;
  }

  TensorF key_means() const {
    const HeadGeometry& geometry = source_.geometry();
    TensorF means({geometry.num_kv_heads, geometry.head_dim});
    for (size_t h = 0; h < geometry.num_kv_heads; ++h) {
      const std::vector<double> mean = statistics_.head(h).key_mean.mean();
      std::transform(mean.begin(), mean.end(), means.at(h),
                     [](double value) { return static_cast<float>(value); });
    }
    return means;
  }

  void warn_about_rank(const RecipeOptions& recipe, const FittedRotation& k,
                       const FittedRotation& v, std::vector<std::string>& warnings) const {
    if (recipe.rotation.hadamard) return;
    const size_t dim = source_.geometry().head_dim;
    for (size_t h = 0; h < k.eigenvalues.extent(0); ++h) {
      const std::string head = recipe.rotation.per_head ? cat(" of head ", h) : "";
      check_rank(layer_, cat(recipe.name, " key covariance", head),
                 {k.eigenvalues.at(h), k.eigenvalues.at(h) + dim}, warnings);
      check_rank(layer_, cat(recipe.name, " value covariance", head),
                 {v.eigenvalues.at(h), v.eigenvalues.at(h) + dim}, warnings);
    }
  }

  SideReport measure_side(const std::vector<float>& x, const TensorF& rotation, const TensorF& mean,
                          double clip, int group, bool form_block, const ErrorWeights& weights,
                          bool centered_energy) const {
    const HeadGeometry& geometry = source_.geometry();
    const size_t count = held_out_->sample.num_tokens, dim = geometry.head_dim;
    TensorF hadamard({1, dim, dim});
    hadamard.values =
        to_float(hadamard_matrix(dim, form_block ? HadamardForm::kBlock : HadamardForm::kFull));
    CodecSpec codec;
    codec.group = group;
    codec.clip_ratio = clip;
    const auto errors = [&](const TensorF* candidate) {
      return storage_error(x, count, geometry, {candidate, &mean, codec}, weights);
    };
    const std::vector<double> energy = row_energy(x, count, geometry, centered_energy, weights);
    const TensorD calibrated = errors(&rotation), plain = errors(&hadamard);
    SideReport report;
    report.calibrated = relative_error(calibrated, energy);
    report.hadamard = relative_error(plain, energy);
    report.identity = relative_error(errors(nullptr), energy);
    report.minus_hadamard = paired_difference(calibrated, plain, energy);
    return report;
  }

  void measure(const RecipeOptions& recipe, const CalibrationOptions& options,
               const BundleLayer& layer, LayerReport& report) const {
    const bool block = recipe.rotation.form == HadamardForm::kBlock;
    report.measured = true;
    report.k = measure_side(held_out_->sample.k, layer.k_rotation, layer.k_mean, recipe.k_clip,
                            options.group, block, {.matrices = &held_out_->c_q}, true);
    report.v = measure_side(held_out_->sample.v, layer.v_rotation, layer.v_mean, recipe.v_clip,
                            options.group, block, {.tokens = &held_out_->weights}, false);
  }

  static nlohmann::json policy(const RecipeOptions& recipe) {
    return {{"recipe", recipe.name},
            {"rotation",
             recipe.rotation.hadamard ? "hadamard" : composition_name(recipe.rotation.composition)},
            {"per_head", recipe.rotation.per_head},
            {"key_target", target_name(recipe.key_target)},
            {"value_target", target_name(recipe.value_target)},
            {"center_keys", recipe.center_keys}};
  }

  static nlohmann::json to_json(const SideReport& side) {
    return {{"calibrated", side.calibrated.value},
            {"calibrated_per_head", side.calibrated.per_head},
            {"hadamard", side.hadamard.value},
            {"hadamard_per_head", side.hadamard.per_head},
            {"identity", side.identity.value},
            {"minus_hadamard", side.minus_hadamard.value},
            {"minus_hadamard_se", side.minus_hadamard.standard_error}};
  }
  static nlohmann::json to_json(const LayerReport& report) {
    if (!report.measured) return nlohmann::json::object();
    return {{"k", to_json(report.k)}, {"v", to_json(report.v)}};
  }

  const ActivationSource& source_;
  size_t layer_;
  const LayerStatistics& statistics_;
  size_t split_;
  std::optional<HeldOut> held_out_;
  std::map<KeyTarget, std::vector<TensorD>> keys_;
  std::map<ValueTarget, std::vector<TensorD>> values_;
};

BundleInfo bundle_info(const ActivationSource& source, const RecipeOptions& recipe,
                       const CalibrationOptions& options, size_t tokens) {
  const Provenance& from = source.provenance();
  const HeadGeometry& geometry = source.geometry();
  const auto& offsets = source.sequence_offsets();
  BundleInfo info;
  info.recipe = recipe.name;
  info.model_architecture = from.model_architecture;
  info.model_sha256 = from.model_sha256;
  info.tokenizer_sha256 = from.tokenizer_sha256;
  info.text_sha256 = from.text_sha256;
  info.tool_version = from.tool_version;
  info.options_json = options.options_json;
  info.head_dim = info.value_head_dim = static_cast<int64_t>(geometry.head_dim);
  info.num_layers = static_cast<int64_t>(from.num_layers);
  info.num_heads = static_cast<int64_t>(geometry.num_heads);
  info.num_kv_heads = static_cast<int64_t>(geometry.num_kv_heads);
  info.rope_theta = from.rope_theta;
  info.tokens = static_cast<int64_t>(tokens);
  for (size_t s = 1; s < offsets.size(); ++s)
    info.sequence_length =
        std::max(info.sequence_length, static_cast<int64_t>(offsets[s] - offsets[s - 1]));
  return info;
}

void check_options(const CalibrationOptions& options) {
  OSCAR_CHECK(!options.recipes.empty(), "calibration: no recipe");
  OSCAR_CHECK(options.held_out_fraction >= 0.0 && options.held_out_fraction <= 0.9,
              "--held-out: expected a fraction in [0, 0.9], got ", options.held_out_fraction);
  for (const RecipeOptions& recipe : options.recipes) {
    OSCAR_CHECK(recipe.k_clip >= 0.0 && recipe.k_clip <= 1.0, "--clip-k: expected [0, 1], got ",
                recipe.k_clip);
    OSCAR_CHECK(recipe.v_clip >= 0.0 && recipe.v_clip <= 1.0, "--clip-v: expected [0, 1], got ",
                recipe.v_clip);
  }
}

}  // namespace

RecipeOptions recipe_options(const std::string& name) {
  RecipeOptions recipe;
  recipe.name = name;
  if (name == "official") return recipe;
  if (name == "paper") {
    recipe.value_target = ValueTarget::kSst;
    return recipe;
  }
  if (name == "centered") {
    recipe.center_keys = true;
    return recipe;
  }
  if (name == "hadamard") {
    recipe.rotation.hadamard = true;
    return recipe;
  }
  std::string known;
  for (const std::string& other : recipe_names()) known += (known.empty() ? "" : ", ") + other;
  fail("unknown recipe \"", name, "\", expected one of: ", known);
}

std::vector<std::string> recipe_names() { return {"official", "paper", "centered", "hadamard"}; }

size_t held_out_begin(const std::vector<size_t>& sequence_offsets, double fraction) {
  const size_t tokens = sequence_offsets.back();
  if (fraction <= 0.0) return tokens;
  const auto wanted =
      tokens - static_cast<size_t>(std::llround(fraction * static_cast<double>(tokens)));
  if (sequence_offsets.size() == 2) return std::clamp<size_t>(wanted, 1, tokens);
  size_t best = sequence_offsets[1];
  for (size_t s = 1; s + 1 < sequence_offsets.size(); ++s) {
    const auto distance = [&](size_t at) { return at > wanted ? at - wanted : wanted - at; };
    if (distance(sequence_offsets[s]) < distance(best)) best = sequence_offsets[s];
  }
  return best;
}

CalibrationResult calibrate(ActivationSource& source, const CalibrationOptions& options,
                            const Progress& progress) {
  check_options(options);
  CalibrationResult result;
  const size_t split = held_out_begin(source.sequence_offsets(), options.held_out_fraction);
  result.tokens = split;
  result.held_out_tokens = source.num_tokens() - split;
  check_token_count(split, source.geometry().head_dim, result.warnings);
  bool outputs = false;
  for (const RecipeOptions& recipe : options.recipes) {
    outputs = outputs || recipe.value_target == ValueTarget::kSst;
    result.recipes.push_back({{bundle_info(source, recipe, options, split), {}}, {}});
  }
  const auto batches = source.layer_batches();
  size_t num_layers = 0, done = 0;
  for (const auto& batch : batches) num_layers += batch.size();
  for (const std::vector<size_t>& batch : batches) {
    Collector collector(source, batch, {.outputs = outputs, .mean_from_position = options.sink},
                        split);
    source.visit(batch, outputs, collector, progress);
    for (const size_t layer : batch) {
      progress.step({"calibrate", done++, num_layers, "layers"});
      LayerFit fit(source, layer, collector, options, split);
      for (size_t r = 0; r < options.recipes.size(); ++r) {
        LayerReport report;
        BundleLayer fitted = fit.fit(options.recipes[r], options, report, result.warnings);
        result.recipes[r].bundle.layers.emplace(static_cast<int64_t>(layer), std::move(fitted));
        result.recipes[r].layers.push_back(std::move(report));
      }
    }
  }
  progress.step({"calibrate", num_layers, num_layers, "layers"});
  return result;
}

}  // namespace oscar
