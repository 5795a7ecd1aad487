#include <catch2/catch.hpp>
#include <vector>

#include "base/error.h"
#include "model/generate.h"
#include "model/small_model.h"

using namespace oscar;
using namespace oscar_test;

namespace {

Generated run(const std::vector<int32_t>& prompt, const GenerateOptions& options,
              std::vector<int32_t>* streamed = nullptr, size_t context = 4096) {
  SmallModel small;
  small.weights.config.context_length = context;
  Transformer model = small.transformer();
  KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
  const TokenCallback on_token = [&](int32_t token) {
    if (streamed != nullptr) streamed->push_back(token);
  };
  const Generated result = generate(model, cache, prompt, options, on_token, {});
  // Every generated token was fed back, but for the last one unless a stop token followed it.
  const size_t last = result.finish_reason != "stop" && !result.tokens.empty() ? 1 : 0;
  CHECK(cache.length() == prompt.size() + result.tokens.size() - last);
  return result;
}

}  // namespace

TEST_CASE("generation is the greedy continuation, streamed token by token") {
  const std::vector<int32_t> prompt = random_tokens(20, 1);
  std::vector<int32_t> streamed;
  const Generated result =
      run(prompt, {.max_tokens = 6, .sampling = {.temperature = 0.0}, .stop_ids = {}}, &streamed);
  CHECK(result.finish_reason == "length");
  CHECK(result.prompt_tokens == 20);
  CHECK(result.decode_steps == 5);
  CHECK(result.tokens == streamed);
  REQUIRE(result.tokens.size() == 6);

  // The same tokens from the model without a decode loop.
  SmallModel small;
  Transformer model = small.transformer();
  std::vector<int32_t> tokens = prompt;
  std::vector<float> logits(model.config().vocab_size);
  for (size_t step = 0; step < 6; ++step) {
    KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
    const SequenceChunk chunk{tokens, &cache};
    const std::vector<float> states = model.forward({&chunk, 1});
    model.logits(states.data() + states.size() - model.config().hidden_size, 1, logits.data());
    tokens.push_back(argmax_token(logits.data(), logits.size()));
    CHECK(tokens.back() == result.tokens[step]);
  }
}

TEST_CASE("a stop token ends the text and is not part of it") {
  const std::vector<int32_t> prompt = random_tokens(20, 1);
  GenerateOptions options{.max_tokens = 6, .sampling = {.temperature = 0.0}, .stop_ids = {}};
  const Generated free_run = run(prompt, options);
  options.stop_ids = {free_run.tokens[3]};
  const Generated stopped = run(prompt, options);
  const auto first = std::find(free_run.tokens.begin(), free_run.tokens.end(), free_run.tokens[3]);
  CHECK(stopped.finish_reason == "stop");
  CHECK(stopped.tokens == std::vector<int32_t>(free_run.tokens.begin(), first));
  options.max_tokens = 0;
  CHECK(run(prompt, options).tokens.empty());
}

TEST_CASE("sampled texts repeat with their seed and change with another one") {
  const std::vector<int32_t> prompt = random_tokens(20, 2);
  GenerateOptions options{
      .max_tokens = 12, .sampling = {.temperature = 1.0, .seed = 5}, .stop_ids = {}};
  const std::vector<int32_t> first = run(prompt, options).tokens;
  CHECK(run(prompt, options).tokens == first);
  options.sampling.seed = 6;
  CHECK(run(prompt, options).tokens != first);
}

TEST_CASE("the model's context length bounds prompt and text") {
  const std::vector<int32_t> prompt = random_tokens(20, 2);
  const GenerateOptions options{.max_tokens = 50, .sampling = {.temperature = 0.0}, .stop_ids = {}};
  const Generated result = run(prompt, options, nullptr, 24);
  CHECK(result.finish_reason == "context");
  CHECK(result.tokens.size() == 5);
  CHECK_THROWS_WITH(run(prompt, options, nullptr, 19),
                    Catch::Contains("20") && Catch::Contains("19"));
  CHECK_THROWS_AS(run({}, options), Error);
}

TEST_CASE("an interruption ends generation") {
  SmallModel small;
  Transformer model = small.transformer();
  KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
  std::atomic<bool> interrupted{false};
  Progress progress;
  progress.interrupted = &interrupted;
  size_t seen = 0;
  const TokenCallback on_token = [&](int32_t) { interrupted = ++seen == 3; };
  CHECK_THROWS_AS(generate(model, cache, random_tokens(5, 1),
                           {.max_tokens = 50, .sampling = {.temperature = 0.0}, .stop_ids = {}},
                           on_token, progress),
                  Interrupted);
  CHECK(seen == 3);
}
