// Continuations scored on forks against the same tokens run from scratch, with the demo model.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "base/float16.h"
#include "eval/continuation_scorer.h"
#include "eval/kv_lookup.h"
#include "model/sampler.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "tests/support/paths.h"

namespace oscar {
namespace {

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// The same scores from a cache of their own. The prefix is run in the same calls: where these are
// cut decides how float sums round, and a rounded sum can flip an INT2 code.
std::vector<TokenScore> from_scratch(Transformer& model, const std::shared_ptr<const KvArm>& arm,
                                     const std::vector<int32_t>& prefix, size_t call_tokens,
                                     std::vector<int32_t> tail,
                                     const std::vector<int32_t>& continuation) {
  KvCache cache(model.config(), arm);
  const bool serving = arm->windows.mode == WindowMode::kServing;
  if (serving) call_tokens = prefix.size();  // one prefill chunk, then decode steps
  for (size_t begin = 0; begin < prefix.size(); begin += call_tokens) {
    const std::span<const int32_t> rest = std::span<const int32_t>(prefix).subspan(begin);
    const SequenceChunk chunk{rest.first(std::min(call_tokens, rest.size())), &cache};
    model.forward({&chunk, 1});
  }
  if (serving) cache.set_append_as_decode(true);
  const size_t first = tail.size() - 1;
  tail.insert(tail.end(), continuation.begin(), continuation.end());
  const SequenceChunk chunk{tail, &cache};
  const std::vector<float> hidden = model.forward({&chunk, 1});
  const size_t vocab = model.config().vocab_size;
  std::vector<float> logits((continuation.size() + 1) * vocab);
  model.logits(hidden.data() + first * model.config().hidden_size, continuation.size() + 1,
               logits.data());
  std::vector<TokenScore> scores;
  for (size_t i = 0; i < continuation.size(); ++i) {
    const float* row = logits.data() + i * vocab;
    double sum = 0;
    for (size_t j = 0; j < vocab; ++j) sum += std::exp(static_cast<double>(row[j]));
    scores.push_back(
        {static_cast<double>(row[continuation[i]]) - std::log(sum), argmax_token(row, vocab)});
  }
  const float* row = logits.data() + continuation.size() * vocab;
  scores.push_back({0, argmax_token(row, vocab)});
  return scores;
}

}  // namespace

TEST_CASE("log-probabilities of a row") {
  const std::vector<float> logits = {1.0F, 2.0F, -INFINITY, 2.0F};
  const double sum = std::exp(1.0) + 2 * std::exp(2.0);
  CHECK(log_prob_of(logits.data(), 4, 0) == Approx(1.0 - std::log(sum)).epsilon(1e-12));
  CHECK(log_prob_of(logits.data(), 4, 3) == Approx(2.0 - std::log(sum)).epsilon(1e-12));
  CHECK(log_prob_of(logits.data(), 4, 2) == -INFINITY);
  CHECK_THROWS_AS(log_prob_of(logits.data(), 4, 4), Error);
  const std::vector<float> bad = {1.0F, NAN};
  CHECK_THROWS_AS(log_prob_of(bad.data(), 2, 0), Error);
  const std::vector<float> infinite = {1.0F, INFINITY};
  CHECK_THROWS_AS(log_prob_of(infinite.data(), 2, 0), Error);
}

TEST_CASE("forks give the scores of a run from scratch, for every arm", "[model]") {
  const auto path = oscar_test::demo_model();
  const auto novel = oscar_test::demo_text("emma");
  SKIP_UNLESS(path && novel, "no demo model or text");
  const auto tokenizer = Tokenizer::load(path->string());
  Transformer model(std::make_shared<const ModelWeights>(load_weights(path->string())),
                    Compute::kFp32);
  const std::string text = read_text(*novel).substr(2000, 700);
  const std::vector<int32_t> ids = tokenizer->encode(text, false);
  const auto cut = [&](size_t begin, size_t end) {
    return std::vector<int32_t>(ids.begin() + static_cast<std::ptrdiff_t>(begin),
                                ids.begin() + static_cast<std::ptrdiff_t>(end));
  };
  REQUIRE(ids.size() > 140);
  const std::vector<int32_t> prefix = cut(0, 110), tail = cut(110, 115);
  // Two that share their beginning, one that is the beginning itself, one apart, one empty.
  std::vector<std::vector<int32_t>> continuations = {
      cut(115, 121), cut(115, 119), cut(115, 117), cut(20, 25), {}};
  constexpr size_t kCallTokens = 48;  // several calls for the prefix
  ArmOptions options;
  options.windows = {.sink = 8, .recent = 24};
  for (const char* name : {"bf16", "hadamard", "hadamard:serving"}) {
    const auto arm =
        std::make_shared<const KvArm>(make_arm(name, model.config(), options, nullptr));
    TransformerScorer scorer(model, arm, kCallTokens);
    scorer.set_prefix(prefix);
    std::vector<std::vector<TokenScore>> all_expected;
    for (const auto& continuation : continuations) {
      all_expected.push_back(from_scratch(model, arm, prefix, kCallTokens, tail, continuation));
    }
    const auto check = [&](const std::vector<std::vector<TokenScore>>& scores, size_t count) {
      REQUIRE(scores.size() == count);
      for (size_t i = 0; i < count; ++i) {
        const std::vector<TokenScore>& expected = all_expected[i];
        REQUIRE(scores[i].size() == continuations[i].size() + (i == 0 ? 1 : 0));
        for (size_t j = 0; j < scores[i].size(); ++j) {
          INFO(name << ", continuation " << i << ", token " << j);
          CHECK(scores[i][j].top1 == expected[j].top1);
          if (j == continuations[i].size()) continue;
          // Few and many tokens at a time are summed in different order, so that K and V of the new
          // tokens may round to the next bf16, in every layer anew.
          CHECK(scores[i][j].log_prob == Approx(expected[j].log_prob).margin(8 * kBf16Epsilon));
        }
      }
    };
    const auto scores = scorer.score(tail, continuations);
    check(scores, continuations.size());
    // Without the last two all begin alike.
    check(scorer.score(tail, {continuations[0], continuations[1], continuations[2]}), 3);
    const CacheUse use = scorer.cache_use();
    CHECK((use.tokens_int2_read > 0) == arm->quantized);
    CHECK((use.tokens_int2_written > 0) == arm->quantized);

    // The greedy answer follows a continuation as long as the most likely tokens do, and scoring
    // left no trace in the prefix.
    const std::vector<int32_t> answer = scorer.generate(tail, 6, nullptr);
    CHECK(answer.size() == 6);
    const auto follow = scorer.score(tail, {answer});
    for (size_t j = 0; j < answer.size(); ++j) CHECK(follow[0][j].top1 == answer[j]);
    const auto again = scorer.score(tail, continuations);
    CHECK(again[0][3].log_prob == scores[0][3].log_prob);
    const auto stopped = scorer.generate(
        tail, 6, [](std::span<const int32_t> tokens) { return tokens.size() == 2; });
    CHECK(stopped == std::vector<int32_t>(answer.begin(), answer.begin() + 2));
  }
}

TEST_CASE("the demo model looks up values", "[model]") {
  const auto path = oscar_test::demo_model();
  const auto novel = oscar_test::demo_text("emma");
  SKIP_UNLESS(path && novel, "no demo model or text");
  const auto tokenizer = Tokenizer::load(path->string());
  Transformer model(std::make_shared<const ModelWeights>(load_weights(path->string())),
                    Compute::kFp32);
  ArmOptions arm_options;
  arm_options.windows = {.sink = 16, .recent = 64};
  std::vector<std::shared_ptr<const KvArm>> arms;
  for (const char* name : {"bf16", "naive"}) {
    arms.push_back(
        std::make_shared<const KvArm>(make_arm(name, model.config(), arm_options, nullptr)));
  }
  KvLookupOptions options;
  options.length = 1024;
  options.contexts = 1;
  options.questions = 8;
  options.widest = arm_options.windows;
  const std::string text = read_text(*novel);
  const TaskScores lookup =
      run_kv_lookup(task_arms(model, arms), *tokenizer, text, options, Progress{});
  REQUIRE(lookup.context.size() == 8);
  const auto mean = [](const std::vector<double>& values) {
    double sum = 0;
    for (const double value : values) sum += value;
    return sum / static_cast<double>(values.size());
  };
  // Above chance (1 of 17), and plain INT2 without windows loses it.
  CHECK(mean(lookup.arms[0].values("margin_positive")) >= 0.5);
  CHECK(mean(lookup.arms[0].values("margin")) > mean(lookup.arms[1].values("margin")));
}

}  // namespace oscar
