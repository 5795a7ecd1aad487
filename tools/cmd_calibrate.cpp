#include "tools/cmd_calibrate.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
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
#include "tools/calibrate_outputs.h"
#include "tools/calibrate_recipe.h"
#include "tools/calibrate_report.h"
#include "tools/cmd_generate.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/version.h"

namespace oscar {
namespace {

CalibrationOptions calibration_options(const CalibrateCommand& options,
                                       const std::vector<std::string>& recipes) {
  CalibrationOptions result;
  check_outputs(options, recipes);  // again: "auto" has a name now
  for (const std::string& name : recipes) result.recipes.push_back(chosen_recipe(options, name));
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
  result.moments_out = options.moments_out;
  result.moments_rows = options.moments_rows;
  result.checkpoint_seconds = options.checkpoint_seconds;
  if (options.capture.empty()) {
    json["tokens"] = options.tokens;
    if (options.skip_tokens > 0) json["skip_tokens"] = options.skip_tokens;
    json["seq_len"] = options.lengths;
  } else {
    json["capture"] = std::filesystem::path(options.capture).filename().string();
  }
  result.options_json = json.dump();
  return result;
}

// "r/R" of --tp-rank.
struct TensorParallelRank {
  size_t rank = 0, ranks = 1;
};
TensorParallelRank parse_rank(const std::string& text) {
  TensorParallelRank result;
  if (text.empty()) return result;
  unsigned long long rank = 0, ranks = 0;
  char rest = 0;
  OSCAR_CHECK(std::sscanf(text.c_str(), "%llu/%llu%c", &rank, &ranks, &rest) == 2 && ranks > 0 &&
                  rank < ranks && text[0] != '-',
              "--tp-rank: expected RANK/RANKS with RANK from 0, for example 0/4, got ", text);
  return {static_cast<size_t>(rank), static_cast<size_t>(ranks)};
}

// The source and whatever it refers to.
struct OpenSource {
  std::shared_ptr<const ModelWeights> weights;
  std::unique_ptr<Transformer> model;
  std::unique_ptr<CaptureReader> reader;
  std::unique_ptr<ActivationSource> source;
  std::vector<std::string> warnings;
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
  const size_t ranks = parse_rank(options.tp_rank).ranks;
  const HeadGeometry& found = open.source->geometry();
  check_head_coverage({found.num_heads * ranks, found.num_kv_heads * ranks, found.head_dim},
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
  TextSequences text = load_text_sequences(options.texts, *tokenizer,
                                           {.num_tokens = options.tokens,
                                            .lengths = options.lengths,
                                            .skip_tokens = options.skip_tokens});
  open.warnings = text.warnings;
  open.model = std::make_unique<Transformer>(open.weights, compute);
  const ModelConfig& config = open.weights->config;
  std::vector<size_t> offsets{0};
  for (const auto& sequence : text.sequences) offsets.push_back(offsets.back() + sequence.size());
  const std::string folder = std::filesystem::path(options.out).parent_path().string();
  open.source =
      model_source(*open.model,
                   {config.architecture, model_sha256(*open.weights), tokenizer->sha256(),
                    text.text_sha256, tool_version(), config.rope.theta, config.num_layers,
                    config.rope, options.compute, std::move(text.origins)},
                   std::move(text.sequences),
                   {compute, folder, held_out_begin(offsets, held_out_fraction),
                    checkpoint_path(options) + "-rows"});
}

OpenSource open_source(const CalibrateCommand& options) {
  OSCAR_CHECK(options.capture.empty() != options.texts.empty(),
              "calibrate: expected either --capture or --model with --text");
  OSCAR_CHECK(options.texts.empty() || !options.model.empty(), "calibrate: --text needs --model");
  OSCAR_CHECK(options.tp_rank.empty() || !options.capture.empty(),
              "--tp-rank: describes a --capture, a model run has all heads");
  OpenSource open;
  if (!options.model.empty())
    open.weights = std::make_shared<const ModelWeights>(load_weights(options.model));
  if (options.capture.empty()) check_context(options.lengths, open.weights->config, options.model);
  if (options.capture.empty())
    open_model(options, options.held_out, open);
  else
    open_capture(options, open);
  if (open.weights != nullptr) {
    const std::vector<std::string>& of_model = open.weights->config.warnings;
    open.warnings.insert(open.warnings.begin(), of_model.begin(), of_model.end());
  }
  return open;
}

// Replaces the recipe "auto" by what the budgets allow.
std::vector<std::string> resolve_auto(const CalibrateCommand& options, size_t head_dim,
                                      std::vector<std::string>& notes) {
  std::vector<std::string> recipes = wanted_recipes(options);
  for (std::string& recipe : recipes) {
    if (recipe != "auto") continue;
    const AutoChoice choice =
        choose_recipe(static_cast<int>(head_dim), options.bits, options.write_cost);
    recipe = choice.recipe;
    notes.push_back("auto chose " + choice.why);
  }
  return recipes;
}

CalibrationResult from_moments_files(const CalibrateCommand& options, const Progress& progress,
                                     std::vector<std::string>& notes) {
  OSCAR_CHECK(options.capture.empty() && options.texts.empty() && options.model.empty(),
              "calibrate: --moments takes the place of --capture, --model and --text");
  const MomentsInfo info = MomentsReader(options.moments.at(0)).info();
  OSCAR_CHECK(info.sink == static_cast<int64_t>(options.sink) &&
                  info.recent == static_cast<int64_t>(options.recent),
              options.moments[0], ": was collected with --sink ", info.sink, " --recent ",
              info.recent, ", not ", options.sink, " and ", options.recent);
  const auto recipes = resolve_auto(options, static_cast<size_t>(info.head_dim), notes);
  return calibrate_moments(options.moments, calibration_options(options, recipes), progress);
}

CalibrationResult from_activations(const CalibrateCommand& options, const Progress& progress,
                                   std::vector<std::string>& notes) {
  OpenSource open = open_source(options);
  const auto recipes = resolve_auto(options, open.source->geometry().head_dim, notes);
  CalibrationOptions calibration = calibration_options(options, recipes);
  calibration.weights = open.weights;
  if (open.source->resumable()) calibration.checkpoint_path = checkpoint_path(options);
  const TensorParallelRank rank = parse_rank(options.tp_rank);
  if (rank.ranks > 1) {
    const size_t heads = open.source->geometry().num_kv_heads;
    calibration.first_kv_head = rank.rank * heads;
    calibration.model_kv_heads = rank.ranks * heads;
  }
  CalibrationResult result = calibrate(*open.source, calibration, progress);
  result.warnings.insert(result.warnings.begin(), open.warnings.begin(), open.warnings.end());
  if (result.sequences_resumed > 0)
    notes.push_back(cat("continued after ", result.sequences_resumed, " of ",
                        open.source->num_sequences(), " sequences"));
  return result;
}

}  // namespace

void run_calibrate(const CalibrateCommand& options) {
  set_num_threads(options.threads);
  check_given(options);
  check_outputs(options, wanted_recipes(options));
  OSCAR_CHECK(options.checkpoint_seconds >= 0.0, "--checkpoint-seconds: expected 0 or more, got ",
              options.checkpoint_seconds);
  OSCAR_CHECK(!options.moments_rows || !options.moments_out.empty(),
              "--moments-rows: needs --moments-out");
  const Progress progress = console_progress(options.quiet || options.json);
  std::vector<std::string> notes;
  CalibrationResult result = options.moments.empty() ? from_activations(options, progress, notes)
                                                     : from_moments_files(options, progress, notes);
  for (const RecipeResult& recipe : result.recipes)
    write_bundle(recipe.bundle, out_path(options, recipe.bundle.info.recipe));
  if (options.json) {
    nlohmann::ordered_json bundles = nlohmann::ordered_json::array();
    for (const RecipeResult& recipe : result.recipes)
      bundles.push_back(nlohmann::ordered_json::parse(
          calibration_json(recipe, out_path(options, recipe.bundle.info.recipe))));
    fmt::print("{}\n", nlohmann::ordered_json{{"tokens", result.tokens},
                                              {"held_out_tokens", result.held_out_tokens},
                                              {"warnings", result.warnings},
                                              {"notes", notes},
                                              {"moments", options.moments_out},
                                              {"bundles", bundles}}
                           .dump());
    return;
  }
  if (options.quiet) return;
  show_warnings(result.warnings, false);
  for (const std::string& note : notes) fmt::print("{}\n", note);
  if (!options.moments_out.empty())
    fmt::print("{}: statistics of {} tokens, {} held out\n", options.moments_out, result.tokens,
               result.held_out_tokens);
  for (const RecipeResult& recipe : result.recipes) {
    print_calibration(recipe, out_path(options, recipe.bundle.info.recipe));
  }
}

void add_calibrate(CLI::App& app) {
  auto options = std::make_shared<CalibrateCommand>();
  CLI::App* command = app.add_subcommand(
      "calibrate", "derive rotations from a capture, or straight from a model and a text");
  command->footer(
      "Examples: oscar calibrate --model smollm2.gguf --text emma.txt --out bundle.h5\n"
      "          oscar calibrate --capture capture.h5 --recipe official,paper --out b-{recipe}.h5\n"
      "          oscar calibrate --model smollm2.gguf --text a.txt --moments-out a.h5   (and "
      "b.h5)\n"
      "          oscar calibrate --moments a.h5 --moments b.h5 --out bundle.h5\n"
      "A calibration from a model and a text that was interrupted continues when the same command\n"
      "is repeated.");
  command->add_option("--capture", options->capture, "capture file");
  command->add_option("--model", options->model, "GGUF file or Hugging Face folder");
  command->add_option("--text", options->texts, "text file; may be given several times");
  command->add_option("--out", options->out, "bundle to write ({recipe} is replaced)");
  command->add_option("--moments-out", options->moments_out,
                      "write the streamed statistics, to be merged or fitted later");
  command->add_option("--moments", options->moments,
                      "statistics of a shard (other tokens, or other heads); several are put "
                      "together");
  command->add_flag("--moments-rows", options->moments_rows,
                    "keep keys and values of all tokens in the statistics, so that the published "
                    "value weights of a merge are exact");
  command->add_option("--tp-rank", options->tp_rank,
                      "RANK/RANKS: the capture holds the heads of one tensor-parallel rank");
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
      ->add_option("--skip-tokens", options->skip_tokens,
                   "tokens left out at the start of every text, for shards of one text")
      ->check(count_range())
      ->capture_default_str();
  command
      ->add_option("--checkpoint-seconds", options->checkpoint_seconds,
                   "how often a run from a model is saved, so that it can be continued")
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
  command
      ->add_option("--multipliers", options->multiplier_sets,
                   "light, lean, best: sets of factors of the start range that compete, per head, "
                   "with those of the arm, for example 0.85/1.15/1.5,0.9/1/1.1")
      ->delimiter(',');
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
  command->callback([options, command] {
    for (const CLI::Option* option : command->get_options())
      if (option->count() > 0) options->given.insert(option->get_name());
    run_calibrate(*options);
  });
}

}  // namespace oscar
