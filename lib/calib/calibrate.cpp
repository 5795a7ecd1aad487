#include "calib/calibrate.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "calib/gates.h"

namespace oscar {
namespace {

constexpr size_t kDuplicateCheckTokens = 256;

// Collects the statistics of a batch of layers, calibration and held-out tokens apart.
class Collector : public LayerObserver {
 public:
  Collector(const ActivationSource& source, const std::vector<size_t>& layers,
            const StatisticsOptions& options, const MetricOptions& metric_options,
            const std::map<size_t, std::shared_ptr<const OutputEnergy>>& energies,
            size_t held_out_from)
      : offsets_(source.sequence_offsets()), split_(held_out_from) {
    const bool with_metrics = metric_options.logit || metric_options.output;
    StatisticsOptions held_out_options = options;
    held_out_options.outputs = false;
    held_out_options.rope = nullptr;
    for (const size_t layer : layers) {
      calibration_.emplace(layer, LayerStatistics(source.geometry(), options));
      held_out_.emplace(layer, LayerStatistics(source.geometry(), held_out_options));
      if (with_metrics)
        metrics_.emplace(layer,
                         LayerMetrics(source.geometry(), metric_options, energies.at(layer)));
    }
  }

  void on_layer(const LayerActivations& activations) override {
    const size_t begin = offsets_[activations.sequence];
    const size_t end = begin + activations.num_tokens;
    OSCAR_CHECK(activations.first_position == 0 && end == offsets_[activations.sequence + 1],
                "calibration needs whole sequences");
    if (activations.sequence == 0) check_heads(activations);
    const size_t split = std::clamp(split_, begin, end) - begin;
    if (split > 0) {
      calibration_.at(activations.layer).add(activations, 0, split);
      const auto metrics = metrics_.find(activations.layer);
      if (metrics != metrics_.end()) metrics->second.add(activations, 0, split);
    }
    if (split < activations.num_tokens)
      held_out_.at(activations.layer).add(activations, split, activations.num_tokens);
  }

  const LayerStatistics& calibration(size_t layer) const { return calibration_.at(layer); }
  const LayerStatistics& held_out(size_t layer) const { return held_out_.at(layer); }
  const LayerMetrics* metrics(size_t layer) const {
    const auto found = metrics_.find(layer);
    return found == metrics_.end() ? nullptr : &found->second;
  }

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
  std::map<size_t, LayerMetrics> metrics_;
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

namespace {

// What the recipes together need from one pass.
struct Needs {
  bool outputs = false, metric_logit = false, metric_output = false, output_energy = false;
  bool metrics() const { return metric_logit || metric_output; }
};
Needs needs_of(const std::vector<RecipeOptions>& recipes) {
  Needs needs;
  for (const RecipeOptions& recipe : recipes) {
    needs.outputs = needs.outputs || recipe.value_target == ValueTarget::kSst;
    needs.output_energy = needs.output_energy || recipe.key_metric != KeyMetric::kNone;
    needs.metric_logit = needs.metric_logit || recipe.key_metric == KeyMetric::kLogit;
    needs.metric_output = needs.metric_output || recipe.key_metric == KeyMetric::kOutput;
  }
  return needs;
}

void check_lengths(const ActivationSource& source, const CalibrationOptions& options,
                   size_t split) {
  const auto& offsets = source.sequence_offsets();
  size_t longest = 0;
  for (size_t s = 0; s + 1 < offsets.size() && offsets[s] < split; ++s)
    longest = std::max(longest, std::min(offsets[s + 1], split) - offsets[s]);
  OSCAR_CHECK(longest > options.sink + options.recent,
              "attention metrics need calibration sequences longer than sink + recent = ",
              options.sink + options.recent, " tokens, the longest has ", longest, " (--seq-len)");
}

using Energies = std::map<size_t, std::shared_ptr<const OutputEnergy>>;

Energies output_energies(const ActivationSource& source, const CalibrationOptions& options,
                         const std::vector<size_t>& layers) {
  const HeadGeometry& geometry = source.geometry();
  Energies energies;
  for (const size_t layer : layers)
    energies[layer] = options.weights != nullptr
                          ? output_energy(*options.weights, layer)
                          : identity_energy(geometry.num_heads, geometry.head_dim);
  return energies;
}

}  // namespace

namespace {

// Of all positions of the sequences; null when neither the model nor the capture names its RoPE.
std::shared_ptr<const RopeTable> rope_table(const ActivationSource& source,
                                            const CalibrationOptions& options) {
  const RopeConfig& rope =
      options.weights != nullptr ? options.weights->config.rope : source.provenance().rope;
  if (rope.rotary_dim == 0 || rope.rotary_dim > source.geometry().head_dim) return nullptr;
  const auto& offsets = source.sequence_offsets();
  size_t longest = 0;
  for (size_t s = 0; s + 1 < offsets.size(); ++s)
    longest = std::max(longest, offsets[s + 1] - offsets[s]);
  return std::make_shared<const RopeTable>(make_rope_table(rope, 0, longest));
}

}  // namespace

CalibrationResult calibrate(ActivationSource& source, const CalibrationOptions& options,
                            const Progress& progress) {
  check_options(options);
  CalibrationResult result;
  const size_t split = held_out_begin(source.sequence_offsets(), options.held_out_fraction);
  result.tokens = split;
  result.held_out_tokens = source.num_tokens() - split;
  check_token_count(split, source.geometry().head_dim, result.warnings);
  const Needs needs = needs_of(options.recipes);
  if (needs.metrics()) check_lengths(source, options, split);
  if (needs.output_energy && options.weights == nullptr)
    result.warnings.push_back(
        "the model's weights are not at hand (--model): W_O is taken as the identity");
  for (const RecipeOptions& recipe : options.recipes)
    result.recipes.push_back({{bundle_info(source, recipe, options, split), {}}, {}});
  LayerFitOptions fit_options;
  fit_options.held_out_max_tokens = options.held_out_max_tokens;
  fit_options.group = options.group;
  fit_options.contest.sink = options.sink;
  fit_options.contest.recent = options.recent;
  const std::shared_ptr<const RopeTable> rope = rope_table(source, options);
  const auto batches = source.layer_batches();
  size_t num_layers = 0, done = 0;
  for (const auto& batch : batches) num_layers += batch.size();
  for (const std::vector<size_t>& batch : batches) {
    const Energies energies =
        needs.output_energy ? output_energies(source, options, batch) : Energies{};
    Collector collector(
        source, batch, {.outputs = needs.outputs, .mean_from_position = options.sink, .rope = rope},
        {.sink = options.sink,
         .recent = options.recent,
         .logit = needs.metric_logit,
         .output = needs.metric_output},
        energies, split);
    source.visit(batch,
                 {.outputs = needs.outputs || needs.metric_output, .log_sum_exp = needs.metrics()},
                 collector, progress);
    for (const size_t layer : batch) {
      progress.step({"calibrate", done++, num_layers, "layers"});
      const auto energy = energies.find(layer);
      LayerFit fit(
          {&source, layer, split, &collector.calibration(layer), &collector.held_out(layer),
           collector.metrics(layer), energy == energies.end() ? nullptr : energy->second,
           options.weights != nullptr},
          fit_options);
      for (size_t r = 0; r < options.recipes.size(); ++r) {
        LayerReport report;
        BundleLayer fitted = fit.fit(options.recipes[r], report, result.warnings);
        result.recipes[r].bundle.layers.emplace(static_cast<int64_t>(layer), std::move(fitted));
        result.recipes[r].layers.push_back(std::move(report));
      }
    }
  }
  progress.step({"calibrate", num_layers, num_layers, "layers"});
  return result;
}

}  // namespace oscar
