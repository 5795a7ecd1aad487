#include "tools/cmd_generate.h"

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "io/bundle_file.h"
#include "io/sha256.h"
#include "model/generate.h"
#include "model/tokenizer.h"
#include "model/unicode_text.h"
#include "model/weights.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/version.h"

namespace oscar {
namespace {

std::string prompt_text(const GenerateCommand& options) {
  OSCAR_CHECK(options.prompt.empty() != options.prompt_file.empty(),
              "generate: expected exactly one of --prompt and --prompt-file");
  if (!options.prompt.empty()) return options.prompt;
  std::ifstream file(options.prompt_file, std::ios::binary);
  OSCAR_CHECK(file.good(), options.prompt_file, ": cannot be read");
  std::string text(std::istreambuf_iterator<char>(file), {});
  OSCAR_CHECK(!file.bad(), options.prompt_file, ": cannot be read");
  OSCAR_CHECK(!text.empty(), options.prompt_file, ": the file is empty");
  return text;
}

std::vector<int32_t> prompt_tokens(const GenerateCommand& options, const std::string& text,
                                   const Tokenizer& tokenizer) {
  const bool templated = options.chat || !options.chat_template.empty() ||
                         (!options.raw && !tokenizer.chat_template().empty());
  std::vector<int32_t> ids;
  if (!templated) {
    OSCAR_CHECK(options.system.empty(), "generate: --system needs a chat template (--chat)");
    if (tokenizer.add_bos() && tokenizer.bos_id() >= 0)
      ids.push_back(static_cast<int32_t>(tokenizer.bos_id()));
    const std::vector<int32_t> rest = tokenizer.encode(text, true);
    ids.insert(ids.end(), rest.begin(), rest.end());
    return ids;
  }
  std::vector<ChatMessage> messages;
  if (!options.system.empty()) messages.push_back({"system", options.system});
  messages.push_back({"user", text});
  return tokenizer.encode(render_chat(tokenizer, messages, true, options.chat_template), true);
}

std::shared_ptr<const KvArm> load_arm(const GenerateCommand& options, const ModelWeights& weights) {
  ArmOptions arm_options;
  arm_options.windows = {options.sink, options.recent,
                         options.mode == "serving" ? WindowMode::kServing : WindowMode::kExact};
  arm_options.group = options.group;
  std::optional<Bundle> bundle;
  if (!options.bundle.empty()) {
    bundle = read_bundle(options.bundle);
    arm_options.bundle_path = options.bundle;
    arm_options.bundle_sha256 = sha256_file(options.bundle);
    arm_options.model_sha256 = model_sha256(weights);
  }
  return std::make_shared<const KvArm>(
      make_arm(options.arm, weights.config, arm_options, bundle ? &*bundle : nullptr));
}

double per_second(size_t count, double seconds) {
  return seconds > 0.0 ? static_cast<double>(count) / seconds : 0.0;
}

nlohmann::ordered_json to_json(const GenerateCommand& options, const Generated& result,
                               const std::string& text, const CacheCounters& cache) {
  return {{"model", options.model},
          {"arm", options.arm},
          {"mode", options.mode},
          {"compute", options.compute},
          {"seed", options.seed},
          {"temperature", options.temperature},
          {"prompt_tokens", result.prompt_tokens},
          {"text", text},
          {"tokens", result.tokens},
          {"finish_reason", result.finish_reason},
          {"prefill_s", result.prefill_s},
          {"prefill_tokens_per_s", per_second(result.prompt_tokens, result.prefill_s)},
          {"decode_tokens_per_s", per_second(result.decode_steps, result.decode_s)},
          {"cache_tokens", cache.tokens},
          {"cache_bytes_packed", cache.bytes_packed_used},
          {"cache_bytes_high_precision", cache.bytes_high_precision_used},
          {"cache_bytes_allocated", cache.bytes_packed + cache.bytes_high_precision},
          {"tokens_int2_written", cache.tokens_int2_written},
          {"tokens_int2_read", cache.tokens_int2_read},
          {"tokens_high_precision", cache.tokens_high_precision},
          {"rows_encoded", cache.encode.rows},
          {"gains_clamped", cache.encode.gain_clamped},
          {"scales_saturated", cache.encode.scale_saturated},
          {"meta_fallbacks", cache.encode.meta_fallbacks},
          {"tool", tool_version()}};
}

void print_summary(const GenerateCommand& options, const Generated& result,
                   const CacheCounters& cache) {
  fmt::print(
      stderr, "prompt {} tokens, {:.1f} tokens/s; {} tokens generated ({}), {:.1f} tokens/s\n",
      result.prompt_tokens, per_second(result.prompt_tokens, result.prefill_s),
      result.tokens.size(), result.finish_reason, per_second(result.decode_steps, result.decode_s));
  const auto kib = [](size_t bytes) { return static_cast<double>(bytes) / 1024.0; };
  fmt::print(stderr,
             "cache ({}): {} tokens, {:.1f} KiB packed + {:.1f} KiB high precision in use, {:.1f} "
             "KiB allocated in pages of {} tokens\n",
             options.arm, cache.tokens, kib(cache.bytes_packed_used),
             kib(cache.bytes_high_precision_used),
             kib(cache.bytes_packed + cache.bytes_high_precision), kPageTokens);
  const std::string events = describe(cache.encode);
  if (!events.empty()) fmt::print(stderr, "encoder: {}\n", events);
}

}  // namespace

Compute parse_compute(const std::string& name) {
  OSCAR_CHECK(name == "fp32" || name == "bf16", "--compute: expected fp32 or bf16, got ", name);
  return name == "fp32" ? Compute::kFp32 : Compute::kBf16;
}

void run_generate(const GenerateCommand& options) {
  set_num_threads(options.threads);
  const Progress progress = console_progress(options.quiet || options.json);
  const Compute compute = parse_compute(options.compute);
  check_compute_supported(compute);
  check_sampling_options({options.temperature, options.top_k, options.top_p, options.seed});
  OSCAR_CHECK(options.mode == "exact" || options.mode == "serving",
              "--mode: expected exact or serving, got ", options.mode);
  OSCAR_CHECK(!(options.chat && options.raw), "generate: --chat and --raw exclude each other");
  const std::string text_of_prompt = prompt_text(options);
  const auto tokenizer = Tokenizer::load(options.model);
  const std::vector<int32_t> prompt = prompt_tokens(options, text_of_prompt, *tokenizer);
  const auto weights = std::make_shared<const ModelWeights>(load_weights(options.model));
  show_warnings(weights->config.warnings, options.quiet);
  const auto arm = load_arm(options, *weights);
  Transformer model(weights, compute);
  KvCache cache(weights->config, arm);
  Utf8Stream stream;
  std::string text;
  const auto emit = [&](const std::string& part) {
    text += part;
    if (options.json || part.empty()) return;
    fmt::print("{}", part);
    std::fflush(stdout);
  };
  const Generated result = generate(
      model, cache, prompt,
      {.max_tokens = options.max_tokens,
       .sampling = {options.temperature, options.top_k, options.top_p, options.seed},
       .stop_ids = tokenizer->stop_ids()},
      [&](int32_t token) { emit(stream.push(tokenizer->decode({token}))); }, progress);
  emit(stream.finish());
  if (options.json) {
    fmt::print("{}\n", to_json(options, result, text, cache.counters()).dump());
    return;
  }
  fmt::print("\n");
  if (!options.quiet) print_summary(options, result, cache.counters());
}

void add_generate(CLI::App& app) {
  auto options = std::make_shared<GenerateCommand>();
  CLI::App* command =
      app.add_subcommand("generate", "continue a prompt with the cache of any arm in the loop");
  command->footer(
      "Example:\n  oscar generate --model model.gguf --bundle bundle.h5 --arm oscar-best "
      "--prompt \"What is a KV cache?\" --max-tokens 128");
  command->add_option("--model", options->model, "GGUF file or Hugging Face folder")->required();
  command->add_option("--prompt", options->prompt, "the user's message, or with --raw plain text");
  command->add_option("--prompt-file", options->prompt_file, "file that holds the prompt");
  command->add_option("--system", options->system, "system message");
  command->add_flag("--chat", options->chat,
                    "use the model's chat template (default where the model has one)");
  command->add_flag("--raw", options->raw, "no chat template");
  command->add_option("--chat-template", options->chat_template,
                      "chat template by name (smollm2, qwen2.5, qwen3, ...)");
  command
      ->add_option("--arm", options->arm,
                   "how the cache is stored: bf16, naive, quarot, hadamard, kivi, oscar-best, ...")
      ->capture_default_str();
  command->add_option("--bundle", options->bundle, "calibration bundle for the oscar arms");
  command->add_option("--sink", options->sink, "first tokens kept in high precision")
      ->check(count_range())
      ->capture_default_str();
  command->add_option("--recent", options->recent, "last tokens kept in high precision")
      ->check(count_range())
      ->capture_default_str();
  command->add_option("--mode", options->mode, "windows: exact or serving")->capture_default_str();
  command->add_option("--group", options->group, "quantization group (0 = head_dim)")
      ->capture_default_str();
  command->add_option("--max-tokens", options->max_tokens, "tokens to generate at most")
      ->check(count_range())
      ->capture_default_str();
  command->add_option("--temperature", options->temperature, "0 = greedy")->capture_default_str();
  command->add_option("--top-k", options->top_k, "candidates kept, 0 = all")->capture_default_str();
  command->add_option("--top-p", options->top_p, "probability mass kept")->capture_default_str();
  command->add_option("--seed", options->seed, "seed of the sampler")->capture_default_str();
  command->add_option("--compute", options->compute, "matrix products: fp32 or bf16")
      ->capture_default_str();
  add_threads_option(*command, options->threads);
  command->add_flag("--json", options->json, "one JSON object on stdout");
  command->add_flag("--quiet", options->quiet, "no progress and no summary on stderr");
  command->callback([options] { run_generate(*options); });
}

}  // namespace oscar
