#include "calib/calibrate.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/token_fingerprint.h"
#include "calib/checkpoint.h"
#include "calib/collector.h"
#include "calib/gates.h"
#include "calib/moments_merge.h"

namespace oscar {
namespace {

void check_options(const CalibrationOptions& options) {
  OSCAR_CHECK(!options.recipes.empty() || !options.moments_out.empty(), "calibration: no recipe");
  OSCAR_CHECK(options.held_out_fraction >= 0.0 && options.held_out_fraction <= 0.9,
              "--held-out: expected a fraction in [0, 0.9], got ", options.held_out_fraction);
  for (const RecipeOptions& recipe : options.recipes) {
    OSCAR_CHECK(recipe.k_clip >= 0.0 && recipe.k_clip <= 1.0, "--clip-k: expected [0, 1], got ",
                recipe.k_clip);
    OSCAR_CHECK(recipe.v_clip >= 0.0 && recipe.v_clip <= 1.0, "--clip-v: expected [0, 1], got ",
                recipe.v_clip);
  }
  OSCAR_CHECK(options.model_kv_heads == 0 || options.recipes.empty(),
              "the heads of one tensor-parallel rank make no bundle: write --moments-out and "
              "calibrate from the files of all ranks");
}

// What the recipes together need from one pass; a moments file holds everything.
struct Needs {
  bool outputs = false, metric_logit = false, metric_output = false, output_energy = false;
  bool proxy = false, contest = false;
  bool metrics() const { return metric_logit || metric_output; }
  // The sums of the forward pass; proxy and contest look at the rows again.
  std::string collected() const {
    return cat("second moments", outputs ? " + attention outputs" : "",
               metric_logit ? " + logit metric" : "", metric_output ? " + output metric" : "");
  }
};
Needs needs_of(const CalibrationOptions& options) {
  if (!options.moments_out.empty()) return {true, true, true, true, true, true};
  Needs needs;
  for (const RecipeOptions& recipe : options.recipes) {
    needs.outputs = needs.outputs || recipe.value_target == ValueTarget::kSst;
    needs.output_energy = needs.output_energy || recipe.key_metric != KeyMetric::kNone;
    needs.metric_logit = needs.metric_logit || recipe.key_metric == KeyMetric::kLogit;
    needs.metric_output = needs.metric_output || recipe.key_metric == KeyMetric::kOutput;
    needs.proxy = needs.proxy || recipe.value_target == ValueTarget::kProxy;
    needs.contest = needs.contest || recipe.needs_contest();
  }
  return needs;
}

// Metrics need keys behind the windows: refused when a recipe wants them, else reported.
void check_lengths(const ActivationSource& source, const CalibrationOptions& options, size_t split,
                   std::vector<std::string>& warnings) {
  const auto& offsets = source.sequence_offsets();
  size_t longest = 0;
  for (size_t s = 0; s + 1 < offsets.size() && offsets[s] < split; ++s)
    longest = std::max(longest, std::min(offsets[s + 1], split) - offsets[s]);
  if (longest > options.sink + options.recent) return;
  const std::string problem =
      cat("attention metrics need calibration sequences longer than sink + recent = ",
          options.sink + options.recent, " tokens, the longest has ", longest, " (--seq-len)");
  for (const RecipeOptions& recipe : options.recipes)
    if (recipe.key_metric == KeyMetric::kLogit || recipe.key_metric == KeyMetric::kOutput)
      fail(problem);
  warnings.push_back(problem);
}

// W_O of the source's heads.
Energies output_energies(const ActivationSource& source, const CalibrationOptions& options,
                         const std::vector<size_t>& layers) {
  const HeadGeometry& geometry = source.geometry();
  Energies energies;
  for (const size_t layer : layers) {
    if (options.weights == nullptr) {
      energies[layer] = identity_energy(geometry.num_heads, geometry.head_dim);
      continue;
    }
    const auto all = output_energy(*options.weights, layer);
    const size_t first = options.first_kv_head * geometry.group_size();
    OSCAR_CHECK(first + geometry.num_heads <= all->size(), "KV heads from ", options.first_kv_head,
                " on: ", first + geometry.num_heads, " query heads wanted, the model has ",
                all->size());
    energies[layer] = std::make_shared<const OutputEnergy>(
        all->begin() + static_cast<std::ptrdiff_t>(first),
        all->begin() + static_cast<std::ptrdiff_t>(first + geometry.num_heads));
  }
  return energies;
}

// Of the model, or as the capture names it; rotary_dim 0 = not known.
RopeConfig rope_of(const ActivationSource& source, const CalibrationOptions& options) {
  return options.weights != nullptr ? options.weights->config.rope : source.provenance().rope;
}

// Of all positions of the sequences; null when the RoPE is not known.
std::shared_ptr<const RopeTable> rope_table(const RopeConfig& rope, const MomentsInfo& info) {
  if (rope.rotary_dim == 0 || rope.rotary_dim > static_cast<size_t>(info.head_dim)) return nullptr;
  return std::make_shared<const RopeTable>(
      make_rope_table(rope, 0, static_cast<size_t>(info.longest_sequence())));
}

MomentsInfo moments_info(const ActivationSource& source, const CalibrationOptions& options,
                         size_t split) {
  const Provenance& from = source.provenance();
  const HeadGeometry& geometry = source.geometry();
  const auto& offsets = source.sequence_offsets();
  MomentsInfo info;
  info.model_architecture = from.model_architecture;
  info.model_sha256 = from.model_sha256;
  info.tokenizer_sha256 = from.tokenizer_sha256;
  info.text_sha256 = from.text_sha256;
  info.tool_version = from.tool_version;
  info.options_json = options.options_json;
  info.compute = from.compute;
  info.output_projection = options.weights != nullptr ? "model" : "identity";
  info.head_dim = static_cast<int64_t>(geometry.head_dim);
  info.num_layers = static_cast<int64_t>(from.num_layers);
  const size_t kv_heads =
      options.model_kv_heads > 0 ? options.model_kv_heads : geometry.num_kv_heads;
  info.num_kv_heads = static_cast<int64_t>(kv_heads);
  info.num_heads = static_cast<int64_t>(kv_heads * geometry.group_size());
  info.first_kv_head = static_cast<int64_t>(options.first_kv_head);
  info.local_kv_heads = static_cast<int64_t>(geometry.num_kv_heads);
  info.rope_theta = from.rope_theta;
  info.rope_json = rope_to_json(rope_of(source, options));
  info.sink = static_cast<int64_t>(options.sink);
  info.recent = static_cast<int64_t>(options.recent);
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    MomentsSequence sequence = s < from.origins.size() ? from.origins[s] : MomentsSequence{};
    sequence.tokens = static_cast<int64_t>(offsets[s + 1] - offsets[s]);
    sequence.calibration_tokens =
        static_cast<int64_t>(std::clamp(split, offsets[s], offsets[s + 1]) - offsets[s]);
    info.sequences.push_back(sequence);
    info.token_fingerprints =
        merged_fingerprints(info.token_fingerprints, token_fingerprints(source.tokens(s)));
  }
  info.sequences_complete = static_cast<int64_t>(info.sequences.size());
  return info;
}

BundleInfo bundle_info(const MomentsInfo& moments, const std::string& recipe) {
  BundleInfo info;
  info.recipe = recipe;
  info.model_architecture = moments.model_architecture;
  info.model_sha256 = moments.model_sha256;
  info.tokenizer_sha256 = moments.tokenizer_sha256;
  info.text_sha256 = moments.text_sha256;
  info.tool_version = moments.tool_version;
  info.options_json = moments.options_json;
  info.head_dim = info.value_head_dim = moments.head_dim;
  info.num_layers = moments.num_layers;
  info.num_heads = moments.num_heads;
  info.num_kv_heads = moments.num_kv_heads;
  info.rope_theta = moments.rope_theta;
  info.tokens = moments.calibration_tokens();
  info.sequence_length = moments.longest_sequence();
  info.token_fingerprints = moments.token_fingerprints;
  return info;
}

// Layers one after another into bundles and, where asked for, into a moments file.
class Fitter {
 public:
  Fitter(const MomentsInfo& info, const CalibrationOptions& options, size_t num_layers,
         const Progress& progress, CalibrationResult& result)
      : options_(options), num_layers_(num_layers), progress_(progress), result_(result) {
    result_.tokens = static_cast<size_t>(info.calibration_tokens());
    result_.held_out_tokens = static_cast<size_t>(info.held_out_tokens());
    energy_known_ = info.output_projection == "model";
    fit_options_.group = options.group;
    fit_options_.contest.sink = static_cast<size_t>(info.sink);
    fit_options_.contest.recent = static_cast<size_t>(info.recent);
    for (const RecipeOptions& recipe : options.recipes)
      result_.recipes.push_back({{bundle_info(info, recipe.name), {}}, {}});
    if (!options.moments_out.empty())
      writer_ = std::make_unique<MomentsWriter>(options.moments_out, info);
  }

  const ContestOptions& windows() const { return fit_options_.contest; }

  // stored: what the moments file gets.
  void add(size_t layer, const LayerMoments& moments, const MomentsLayer* stored) {
    progress_.step({"calibrate", done_++, num_layers_, "layers"});
    if (writer_ != nullptr) writer_->write(static_cast<int64_t>(layer), *stored);
    if (options_.recipes.empty()) return;
    LayerFit fit({layer, &moments, energy_known_}, fit_options_);
    for (size_t r = 0; r < options_.recipes.size(); ++r) {
      LayerReport report;
      BundleLayer fitted = fit.fit(options_.recipes[r], report, result_.warnings);
      result_.recipes[r].bundle.layers.emplace(static_cast<int64_t>(layer), std::move(fitted));
      result_.recipes[r].layers.push_back(std::move(report));
    }
  }

  void finish() {
    if (writer_ != nullptr) writer_->finish();
    progress_.step({"calibrate", num_layers_, num_layers_, "layers"});
  }

 private:
  const CalibrationOptions& options_;
  size_t num_layers_, done_ = 0;
  const Progress& progress_;
  CalibrationResult& result_;
  bool energy_known_ = false;
  LayerFitOptions fit_options_;
  std::unique_ptr<MomentsWriter> writer_;
};

// What needs a second look at the rows: the weights of the proxy, the samples of the held-out part.
void look_again(const ActivationSource& source, const CalibrationOptions& options,
                const Needs& needs, const ContestOptions& windows, size_t layer, size_t split,
                LayerMoments& moments) {
  const ActivationRows& rows = source.rows();
  if (needs.proxy) moments.proxy = proxy_sums(moments.calibration, rows, layer, split);
  if (split >= source.num_tokens()) return;
  moments.held_out = sample_held_out(rows, source.geometry(), layer, split, source.num_tokens(),
                                     options.held_out_max_tokens);
  if (needs.contest)
    moments.contest =
        contest_data(rows, source.geometry(), layer, source.sequence_offsets(), split, windows);
}

void store_rows(const ActivationSource& source, size_t layer, size_t split, MomentsLayer& stored) {
  const HeadGeometry& geometry = source.geometry();
  for (const auto& [name, tensor] :
       {std::pair{"rows_k", CaptureTensor::kK}, std::pair{"rows_v", CaptureTensor::kV}}) {
    TensorF rows({split, geometry.num_kv_heads, geometry.head_dim});
    source.rows().read(layer, tensor, 0, split, rows.data());
    stored.rows.emplace(name, std::move(rows));
  }
}

// The forward pass (or the reading of the capture), saved from time to time where that is possible.
void visit(ActivationSource& source, const std::vector<size_t>& layers, VisitNeeds needs,
           const MomentsInfo& info, Checkpoint& checkpoint, const ContestOptions& windows,
           Collector& collector, const Progress& progress, CalibrationResult& result) {
  if (source.resumable()) {
    checkpoint.resume(info, collector, windows, needs);
    result.sequences_resumed = needs.first_sequence;
    needs.after_sequence = [&](size_t done) {
      checkpoint.sequence_done(info, collector, done, source);
    };
  }
  try {
    source.visit(layers, needs, collector, progress);
  } catch (const Interrupted&) {  // between sequences: the sums are whole
    if (source.resumable()) checkpoint.save_now(info, collector, source);
    throw;
  }
}

// The rows of the tokens behind merged sums, as tokens [0, n) of one layer.
class StoredRows : public ActivationRows {
 public:
  explicit StoredRows(const MomentsLayer& moments) : moments_(moments) {}
  void read(size_t, CaptureTensor tensor, size_t begin, size_t end,
            float* destination) const override {
    const TensorF& rows = moments_.rows.at(tensor == CaptureTensor::kK ? "rows_k" : "rows_v");
    std::copy(rows.at(begin), rows.at(begin) + (end - begin) * (rows.size() / rows.extent(0)),
              destination);
  }

 private:
  const MomentsLayer& moments_;
};

// Recipes whose values are weighted by the proxy cannot be merged exactly from sums alone.
void note_approximation(const MergedMoments& merged, const CalibrationOptions& options,
                        CalibrationResult& result) {
  result.warnings = merged.warnings();
  if (!merged.proxy_is_approximate()) return;
  std::string names;
  for (size_t r = 0; r < options.recipes.size(); ++r) {
    if (options.recipes[r].value_target != ValueTarget::kProxy) continue;
    result.recipes[r].bundle.info.approximate = true;
    names += (names.empty() ? "" : ", ") + options.recipes[r].name;
  }
  if (!names.empty())
    result.warnings.push_back(
        cat("value rotations of ", names,
            " are approximate: the published weights need the queries of all shards when keys and "
            "values are seen; exact with shards written with --moments-rows, or --target-v sst"));
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

CalibrationResult calibrate(ActivationSource& source, const CalibrationOptions& options,
                            const Progress& progress) {
  check_options(options);
  CalibrationResult result;
  const size_t split = held_out_begin(source.sequence_offsets(), options.held_out_fraction);
  check_token_count(split, source.geometry().head_dim, result.warnings);
  const Needs needs = needs_of(options);
  if (needs.metrics()) check_lengths(source, options, split, result.warnings);
  if (needs.output_energy && options.weights == nullptr)
    result.warnings.push_back(
        "the model's weights are not at hand (--model): W_O is taken as the identity");
  const auto batches = source.layer_batches();
  size_t num_layers = 0;
  for (const auto& batch : batches) num_layers += batch.size();
  const MomentsInfo info = moments_info(source, options, split);
  const auto rope = rope_table(rope_of(source, options), info);
  Fitter fitter(info, options, num_layers, progress, result);
  Checkpoint checkpoint(options.checkpoint_path, options.checkpoint_seconds, needs.collected());
  for (const std::vector<size_t>& batch : batches) {
    const Energies energies =
        needs.output_energy ? output_energies(source, options, batch) : Energies{};
    Collector collector(
        source, batch, {.outputs = needs.outputs, .mean_from_position = options.sink, .rope = rope},
        {.sink = options.sink,
         .recent = options.recent,
         .logit = needs.metric_logit,
         .output = needs.metric_output,
         .bf16_products = source.compute() == Compute::kBf16},
        energies, split);
    visit(source, batch,
          {.outputs = needs.outputs || needs.metric_output, .log_sum_exp = needs.metrics()}, info,
          checkpoint, fitter.windows(), collector, progress, result);
    for (const size_t layer : batch) {
      LayerMoments& moments = collector.layer(layer);
      look_again(source, options, needs, fitter.windows(), layer, split, moments);
      MomentsLayer stored;
      if (!options.moments_out.empty()) {
        stored = to_moments(moments);
        if (options.moments_rows) store_rows(source, layer, split, stored);
      }
      fitter.add(layer, moments, &stored);
      moments = LayerMoments{};
    }
  }
  fitter.finish();
  source.discard_rows();
  checkpoint.remove();
  return result;
}

CalibrationResult calibrate_moments(const std::vector<std::string>& paths,
                                    const CalibrationOptions& options, const Progress& progress) {
  check_options(options);
  const MergedMoments merged(paths);
  CalibrationResult result;
  Fitter fitter(merged.info(), options, merged.layers().size(), progress, result);
  note_approximation(merged, options, result);
  check_token_count(result.tokens, static_cast<size_t>(merged.info().head_dim), result.warnings);
  const HeadGeometry geometry{static_cast<size_t>(merged.info().num_heads),
                              static_cast<size_t>(merged.info().num_kv_heads),
                              static_cast<size_t>(merged.info().head_dim)};
  const auto rope = rope_table(
      rope_from_json(merged.info().rope_json, paths[0] + ", attribute rope"), merged.info());
  for (const int64_t layer : merged.layers()) {
    MomentsLayer stored = merged.layer(layer);
    LayerMoments moments = from_moments(stored, geometry, fitter.windows(), rope);
    if (stored.rows.count("rows_k") > 0 && !merged.proxy_is_approximate()) {
      moments.proxy = proxy_sums(moments.calibration, StoredRows(stored),
                                 static_cast<size_t>(layer), stored.rows.at("rows_k").extent(0));
      const MomentsLayer again = to_moments(moments);
      stored.sums["proxy"] = again.sums.at("proxy");
      stored.weight_sums = again.weight_sums;
    }
    if (!options.moments_rows) {
      stored.rows.erase("rows_k");
      stored.rows.erase("rows_v");
    }
    fitter.add(static_cast<size_t>(layer), moments, &stored);
  }
  fitter.finish();
  return result;
}

}  // namespace oscar
