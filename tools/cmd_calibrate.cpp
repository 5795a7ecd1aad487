#include "tools/cmd_calibrate.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "calib/calibrate.h"
#include "calib/gates.h"
#include "calib/text_sequences.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "tools/cmd_generate.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/output_check.h"
#include "tools/version.h"

namespace oscar {
namespace {

constexpr const char* kRecipePlaceholder = "{recipe}";

std::string out_path(const CalibrateCommand& options, const std::string& recipe) {
  std::string path = options.out;
  const size_t at = path.find(kRecipePlaceholder);
  if (at != std::string::npos) path.replace(at, std::string(kRecipePlaceholder).size(), recipe);
  return path;
}

RecipeOptions recipe_of(const CalibrateCommand& options, const std::string& name) {
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
  return recipe;
}

CalibrationOptions calibration_options(const CalibrateCommand& options,
                                       const std::vector<std::string>& recipes) {
  CalibrationOptions result;
  OSCAR_CHECK(!recipes.empty(), "--recipe: expected at least one recipe");
  OSCAR_CHECK(recipes.size() == 1 || options.out.find(kRecipePlaceholder) != std::string::npos,
              "--out: with several recipes the name must contain ", kRecipePlaceholder);
  for (const std::string& name : recipes) result.recipes.push_back(recipe_of(options, name));
  result.held_out_fraction = options.held_out;
  result.held_out_max_tokens = options.held_out_tokens;
  result.group = options.group;
  result.sink = options.sink;
  result.recent = options.recent;
  nlohmann::json json{{"held_out", options.held_out},
                      {"group", options.group},
                      {"sink", options.sink},
                      {"recent", options.recent},
                      {"compute", options.compute}};
  if (options.capture.empty()) {
    json["tokens"] = options.tokens;
    json["seq_len"] = options.lengths;
  } else {
    json["capture"] = std::filesystem::path(options.capture).filename().string();
  }
  result.options_json = json.dump();
  return result;
}

// The source and whatever it refers to.
struct OpenSource {
  std::shared_ptr<const ModelWeights> weights;
  std::unique_ptr<Transformer> model;
  std::unique_ptr<CaptureReader> reader;
  std::unique_ptr<ActivationSource> source;
  std::vector<std::string> warnings, notes;
};

void open_capture(const CalibrateCommand& options, OpenSource& open) {
  open.reader = std::make_unique<CaptureReader>(options.capture);
  std::vector<size_t> offsets;
  for (const int64_t offset : open.reader->sequence_offsets())
    offsets.push_back(static_cast<size_t>(offset));
  const size_t warm_up = warm_up_sequences(offsets);
  if (warm_up > 0)
    open.warnings.push_back(cat(options.capture, ": the first sequence (", offsets[1],
                                " tokens) is a warm-up and is left out"));
  const Compute compute = parse_compute(options.compute);
  check_compute_supported(compute);
  open.source = capture_source(*open.reader, warm_up, compute);
  if (open.weights == nullptr) return;
  const ModelConfig& config = open.weights->config;
  check_head_coverage(open.source->geometry(),
                      {config.num_heads, config.num_kv_heads, config.head_dim}, options.capture);
  OSCAR_CHECK(open.reader->info().model_sha256 == model_sha256(*open.weights), options.capture,
              " was captured from another model (sha256 ",
              open.reader->info().model_sha256.substr(0, 16), "...) than ", options.model,
              " (sha256 ", model_sha256(*open.weights).substr(0, 16), "...)");
}

void open_model(const CalibrateCommand& options, double held_out_fraction, OpenSource& open) {
  const Compute compute = parse_compute(options.compute);
  check_compute_supported(compute);
  const auto tokenizer = Tokenizer::load(options.model);
  TextSequences text = load_text_sequences(
      options.texts, *tokenizer, {.num_tokens = options.tokens, .lengths = options.lengths});
  open.warnings = text.warnings;
  open.model = std::make_unique<Transformer>(open.weights, compute);
  const ModelConfig& config = open.weights->config;
  std::vector<size_t> offsets{0};
  for (const auto& sequence : text.sequences) offsets.push_back(offsets.back() + sequence.size());
  const std::string folder = std::filesystem::path(options.out).parent_path().string();
  open.source = model_source(
      *open.model,
      {config.architecture, model_sha256(*open.weights), tokenizer->sha256(), text.text_sha256,
       tool_version(), config.rope.theta, config.num_layers, config.rope},
      std::move(text.sequences), {compute, folder, held_out_begin(offsets, held_out_fraction)});
}

OpenSource open_source(const CalibrateCommand& options) {
  OSCAR_CHECK(options.capture.empty() != options.texts.empty(),
              "calibrate: expected either --capture or --model with --text");
  OSCAR_CHECK(options.texts.empty() || !options.model.empty(), "calibrate: --text needs --model");
  OpenSource open;
  if (!options.model.empty())
    open.weights = std::make_shared<const ModelWeights>(load_weights(options.model));
  if (options.capture.empty()) check_context(options.lengths, open.weights->config, options.model);
  if (options.capture.empty())
    open_model(options, options.held_out, open);
  else
    open_capture(options, open);
  return open;
}

// Replaces the recipe "auto" by what the budgets allow.
std::vector<std::string> resolve_auto(const CalibrateCommand& options, OpenSource& open) {
  std::vector<std::string> recipes = options.recipes;
  for (std::string& recipe : recipes) {
    if (recipe != "auto") continue;
    const AutoChoice choice = choose_recipe(static_cast<int>(open.source->geometry().head_dim),
                                            options.bits, options.write_cost);
    recipe = choice.recipe;
    open.notes.push_back("auto chose " + choice.why);
  }
  return recipes;
}

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

nlohmann::ordered_json to_json(const RecipeResult& recipe, const std::string& path) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const auto& [id, layer] : recipe.bundle.layers)
    layers.push_back({{"layer", id},
                      {"policy", nlohmann::json::parse(layer.policy_json)},
                      {"held_out", nlohmann::json::parse(layer.held_out_json)}});
  return {{"recipe", recipe.bundle.info.recipe}, {"out", path}, {"layers", layers}};
}

}  // namespace

void run_calibrate(const CalibrateCommand& options) {
  set_num_threads(options.threads);
  std::vector<std::string> inputs = options.texts;
  inputs.insert(inputs.end(), {options.capture, options.model});
  for (const std::string& recipe : options.recipes) check_output(out_path(options, recipe), inputs);
  const Progress progress = console_progress(options.quiet || options.json);
  OpenSource open = open_source(options);
  const std::vector<std::string> recipes = resolve_auto(options, open);
  CalibrationOptions calibration = calibration_options(options, recipes);
  calibration.weights = open.weights;
  CalibrationResult result = calibrate(*open.source, calibration, progress);
  result.warnings.insert(result.warnings.begin(), open.warnings.begin(), open.warnings.end());
  for (const RecipeResult& recipe : result.recipes)
    write_bundle(recipe.bundle, out_path(options, recipe.bundle.info.recipe));
  if (options.json) {
    nlohmann::ordered_json bundles = nlohmann::ordered_json::array();
    for (const RecipeResult& recipe : result.recipes)
      bundles.push_back(to_json(recipe, out_path(options, recipe.bundle.info.recipe)));
    fmt::print("{}\n", nlohmann::ordered_json{{"tokens", result.tokens},
                                              {"held_out_tokens", result.held_out_tokens},
                                              {"warnings", result.warnings},
                                              {"notes", open.notes},
                                              {"bundles", bundles}}
                           .dump());
    return;
  }
  if (options.quiet) return;
  for (const std::string& warning : result.warnings) fmt::print(stderr, "warning: {}\n", warning);
  for (const std::string& note : open.notes) fmt::print("{}\n", note);
  for (const RecipeResult& recipe : result.recipes) {
    print_table(recipe, out_path(options, recipe.bundle.info.recipe));
    print_contest(recipe);
  }
}

void add_calibrate(CLI::App& app) {
  auto options = std::make_shared<CalibrateCommand>();
  CLI::App* command = app.add_subcommand(
      "calibrate", "derive rotations from a capture, or straight from a model and a text");
  command->footer(
      "Examples: oscar calibrate --model smollm2.gguf --text emma.txt --out bundle.h5\n"
      "          oscar calibrate --capture capture.h5 --recipe official,paper --out b-{recipe}.h5");
  command->add_option("--capture", options->capture, "capture file");
  command->add_option("--model", options->model, "GGUF file or Hugging Face folder");
  command->add_option("--text", options->texts, "text file; may be given several times");
  command->add_option("--out", options->out, "bundle to write ({recipe} is replaced)")->required();
  command
      ->add_option("--recipe", options->recipes,
                   "best, lean, light, centered, official, paper, hadamard or auto; several "
                   "separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--bits", options->bits,
                   "recipe auto: stored bits an element at most (windows not counted)")
      ->capture_default_str();
  command
      ->add_option("--write-cost", options->write_cost,
                   "recipe auto: encoder cost at most, as a fraction of a forward pass")
      ->capture_default_str();
  command->add_option("--tokens", options->tokens, "tokens of the text, in all")
      ->check(count_range())
      ->capture_default_str();
  command
      ->add_option("--seq-len", options->lengths,
                   "length of a sequence, best the one served; several are pooled")
      ->check(count_range())
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--target-k", options->key_target, "key covariance: qqt or ktk");
  command->add_option("--target-v", options->value_target,
                      "value covariance: sst (exact), proxy (published weights) or vtv");
  command->add_option("--composition", options->composition,
                      "r_h_pbr, plain, pbr, br, br_h128, r_h, h_pbr, h_r_pbr or h_pbr_r");
  command->add_flag("--per-head", options->per_head, "one rotation per KV head");
  command
      ->add_option(
          "--sign-patterns", options->sign_patterns,
          "light, lean, best: also try every rotation with so many patterns of random signs "
          "(default: as the recipe says, 2)")
      ->check(CLI::Range(0, 64));
  command->add_flag("--keep-rotation", options->keep_rotation,
                    "lean, best: no exchange of rotations by held-out error");
  command->add_flag("--center", options->center, "subtract the mean key of each head");
  command->add_option("--center-v", options->center_values,
                      "lean, best: values centered never, always, or as held-out data decide");
  command->add_option("--metric-k", options->key_metric,
                      "light, lean, best: metric of key errors, logit (M_A), output (M_O) or "
                      "queries (C_Q)");
  command->add_flag("--block-hadamard", options->block_hadamard,
                    "allow Hadamard blocks where head_dim is not a power of two");
  command->add_option("--clip-k", options->clip_k, "clip ratio of keys, 0 = off");
  command->add_option("--clip-v", options->clip_v, "clip ratio of values, 0 = off");
  command->add_option("--held-out", options->held_out, "fraction of the tokens to measure on")
      ->capture_default_str();
  command
      ->add_option("--held-out-tokens", options->held_out_tokens,
                   "held-out tokens measured per layer, at most")
      ->capture_default_str();
  command->add_option("--group", options->group, "quantization group measured (0 = head_dim)")
      ->capture_default_str();
  command->add_option("--sink", options->sink, "first tokens kept in high precision")
      ->check(count_range())
      ->capture_default_str();
  command->add_option("--recent", options->recent, "last tokens kept in high precision")
      ->check(count_range())
      ->capture_default_str();
  command->add_option("--compute", options->compute, "matrix products: fp32 or bf16")
      ->capture_default_str();
  add_threads_option(*command, options->threads);
  command->add_flag("--json", options->json, "one JSON object on stdout");
  command->add_flag("--quiet", options->quiet, "no progress, no table");
  command->callback([options] { run_calibrate(*options); });
}

}  // namespace oscar
