#include "tools/cmd_capture.h"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/parallel.h"
#include "calib/capture.h"
#include "calib/text_sequences.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "tools/cmd_generate.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/version.h"

namespace oscar {

void run_capture(const CaptureCommand& options) {
  set_num_threads(options.threads);
  const Progress progress = console_progress(options.quiet || options.json);
  OSCAR_CHECK(options.dtype == "bf16" || options.dtype == "f32",
              "--dtype: expected bf16 or f32, got ", options.dtype);
  const Compute compute = parse_compute(options.compute);
  check_compute_supported(compute);
  OSCAR_CHECK(!std::filesystem::exists(options.out), options.out,
              ": exists already; delete it or choose another --out");
  const auto tokenizer = Tokenizer::load(options.model);
  const TextSequences text = load_text_sequences(
      options.texts, *tokenizer, {.num_tokens = options.tokens, .lengths = options.lengths});
  show_warnings(text.warnings, options.quiet);
  const auto weights = std::make_shared<const ModelWeights>(load_weights(options.model));
  show_warnings(weights->config.warnings, options.quiet);
  check_context(options.lengths, weights->config, options.model);
  CaptureInfo info;
  info.model_architecture = weights->config.architecture;
  info.model_sha256 = model_sha256(*weights);
  info.tokenizer_sha256 = tokenizer->sha256();
  info.text_sha256 = text.text_sha256;
  info.tool_version = tool_version();
  info.options_json = nlohmann::json{
      {"tokens", options.tokens},
      {"seq_len", options.lengths},
      {"compute", options.compute},
      {"layers",
       options.layers}}.dump();
  info.bf16 = options.dtype == "bf16";
  info.has_outputs = options.outputs;
  Transformer model(weights, compute);
  const auto start = std::chrono::steady_clock::now();
  const CaptureResult result =
      capture(model, compute, text.sequences, info, options.layers, options.out, progress);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double mib = static_cast<double>(std::filesystem::file_size(options.out)) / 1048576.0;
  if (options.json) {
    fmt::print("{}\n", nlohmann::json{{"out", options.out},
                                      {"tokens", result.tokens},
                                      {"sequences", result.sequences},
                                      {"sequences_resumed", result.sequences_resumed},
                                      {"seconds", seconds},
                                      {"mib", mib}}
                           .dump());
  } else if (!options.quiet) {
    fmt::print("{}: {} tokens in {} sequences ({} resumed), {:.1f} MiB, {:.1f} s\n", options.out,
               result.tokens, result.sequences, result.sequences_resumed, mib, seconds);
  }
}

void add_capture(CLI::App& app) {
  auto options = std::make_shared<CaptureCommand>();
  CLI::App* command = app.add_subcommand(
      "capture", "write post-RoPE queries, keys and values of a model on a text to an HDF5 file");
  command->footer(
      "Example: oscar capture --model smollm2.gguf --text emma.txt --tokens 20480 --out "
      "capture.h5\n"
      "An interrupted capture continues from its .part file when the same command is repeated.");
  command->add_option("--model", options->model, "GGUF file or Hugging Face folder")->required();
  command->add_option("--text", options->texts, "text file; may be given several times")
      ->required();
  command->add_option("--out", options->out, "capture file to write")->required();
  command->add_option("--tokens", options->tokens, "tokens to capture in all")
      ->check(count_range())
      ->capture_default_str();
  command->add_option("--seq-len", options->lengths, "length of a sequence; several are pooled")
      ->check(count_range())
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "stored type: bf16 or f32")->capture_default_str();
  command->add_flag("--outputs", options->outputs,
                    "store attention outputs too (exact value covariance without recomputing)");
  command->add_option("--layers", options->layers, "layers to store, default all")->delimiter(',');
  command->add_option("--compute", options->compute, "matrix products: fp32 or bf16")
      ->capture_default_str();
  add_threads_option(*command, options->threads);
  command->add_flag("--json", options->json, "one JSON object on stdout");
  command->add_flag("--quiet", options->quiet, "no progress, no summary");
  command->callback([options] { run_capture(*options); });
}

}  // namespace oscar
