#include <catch2/catch.hpp>
#include <set>

#include "base/error.h"
#include "eval/recall_tasks.h"
#include "tests/eval/task_fixture.h"

namespace oscar {
namespace {

using oscar_test::CopyingScorer;
using oscar_test::StubbornScorer;

RecallOptions small_options() {
  RecallOptions options;
  options.length = 2000;
  options.contexts = 3;
  options.passage_words = 20;
  options.seed = 5;
  options.widest.sink = 64;
  options.widest.recent = 256;
  return options;
}

}  // namespace

TEST_CASE("frequent words are lower-case words by frequency, then name") {
  const std::string text =
      "Then Emma and Harriet went there; there, then again, AGAIN! don't mis-take caf\xC3\xA9s "
      "word1 abc incomprehensibility there";
  CHECK(frequent_words(text, 10) == std::vector<std::string>{"there", "again", "then", "went"});
  CHECK(frequent_words(text, 1) == std::vector<std::string>{"there"});
  CHECK(frequent_words("", 10).empty());
}

TEST_CASE("prompts share their longest common prefix") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const std::vector<PromptText> prompts = {{"abc one:", 1, 3, {" x"}}, {"abc only", 0, 3, {"yz"}}};
  const TaskContext context = make_context(*tokenizer, prompts);
  CHECK(tokenizer->decode(context.prefix) == "abc on");
  CHECK(tokenizer->decode(context.questions[0].tail) == "e:");
  CHECK(tokenizer->decode(context.questions[1].tail) == "ly");
  CHECK(tokenizer->decode(context.questions[1].continuations[0]) == "yz");
  CHECK(context.questions[0].fact_begin == 1);
  CHECK(context.questions[0].fact_end == 3);
  CHECK(context.questions[0].prompt_tokens == 8);
  // Something is always left to ask.
  const TaskContext single = make_context(*tokenizer, {prompts[0]});
  CHECK(single.prefix.size() == 7);
  CHECK(single.questions[0].tail.size() == 1);
  const TaskContext equal = make_context(*tokenizer, {prompts[0], prompts[0]});
  CHECK(equal.prefix.size() == 7);
}

TEST_CASE("token spans cover every token that overlaps the bytes") {
  const auto tokenizer = oscar_test::byte_tokenizer();  // " t" and "er" are one token
  const TokenSpan span = token_span(*tokenizer, "a term", 3, 4);
  CHECK(span.begin == 2);  // "er" from its second byte on
  CHECK(span.end == 3);
  CHECK(span.prompt_tokens == 4);
  CHECK(token_span(*tokenizer, "a term", 2, 5).begin == 1);
  CHECK(token_span(*tokenizer, "a term", 2, 5).end == 3);
  WindowSpec windows;
  windows.sink = 10;
  windows.recent = 20;
  CHECK(in_quantized(windows, 10, 15, 43));
  CHECK_FALSE(in_quantized(windows, 9, 15, 43));
  CHECK_FALSE(in_quantized(windows, 10, 16, 43));
}

TEST_CASE("the widest windows are those of the quantized arms") {
  auto narrow = std::make_shared<KvArm>(), wide = std::make_shared<KvArm>(),
       reference = std::make_shared<KvArm>();
  narrow->quantized = wide->quantized = true;
  narrow->windows = {.sink = 96, .recent = 16};
  wide->windows = {.sink = 64, .recent = 300};
  reference->windows = {.sink = 1000, .recent = 1000};
  const WindowSpec widest = widest_windows({reference, narrow, wide});
  CHECK(widest.sink == 96);
  CHECK(widest.recent == 300);
}

TEST_CASE("recall places passages in the quantized region and fills the length") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const std::string text = oscar_test::made_up_text(4000);
  const auto words = task_words(text);
  for (const bool random_words : {true, false}) {
    for (const size_t passages : {1, 3}) {
      RecallOptions options = small_options();
      options.random_words = random_words;
      options.passages = passages;
      std::set<size_t> places;
      for (size_t context_idx = 0; context_idx < 10; ++context_idx) {
        const RecallContext context = make_recall(*tokenizer, text, words, options, context_idx);
        REQUIRE(context.prompts.questions.size() == passages);
        for (size_t i = 0; i < passages; ++i) {
          const TaskQuestion& question = context.prompts.questions[i];
          const std::string& passage = context.passages[i];
          CHECK(std::count(passage.begin(), passage.end(), ' ') == 19);
          std::vector<int32_t> ids = context.prompts.prefix;
          ids.insert(ids.end(), question.tail.begin(), question.tail.end());
          const auto at = [&](size_t k) { return ids.begin() + static_cast<std::ptrdiff_t>(k); };
          // The space before the passage may share a token with its first letter.
          CHECK(tokenizer->decode({at(question.fact_begin), at(question.fact_end)})
                    .ends_with(passage));
          CHECK(question.fact_begin >= options.widest.sink);
          CHECK(question.fact_end + options.widest.recent + 8 <= question.prompt_tokens);
          CHECK(tokenizer->decode(question.continuations[0]) == " " + passage);
          const size_t whole = question.prompt_tokens + question.continuations[0].size();
          CHECK(whole <= options.length);
          CHECK(whole + 60 > options.length);
          places.insert(question.fact_begin);
          // The passage is nowhere else in the prompt.
          const size_t first = context.prompt.find(passage);
          CHECK(context.prompt.find(passage, first + 1) == std::string::npos);
        }
      }
      CHECK(places.size() >= 9 * passages);
    }
  }
}

TEST_CASE("recall depends on seed and context number alone") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const std::string text = oscar_test::made_up_text(4000);
  const auto words = task_words(text);
  const RecallOptions options = small_options();
  const std::string prompt = make_recall(*tokenizer, text, words, options, 1).prompt;
  CHECK(make_recall(*tokenizer, text, words, options, 1).prompt == prompt);
  CHECK(make_recall(*tokenizer, text, words, options, 2).prompt != prompt);
}

TEST_CASE("recall names the shortest usable length, and it is usable") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const std::string text = oscar_test::made_up_text(4000);
  const auto words = task_words(text);
  for (const size_t passages : {1, 4}) {
    RecallOptions options = small_options();
    options.passages = passages;
    options.length = 300;
    const std::string message =
        oscar_test::message_of([&] { make_recall(*tokenizer, text, words, options, 0); });
    INFO(message);
    const size_t shortest = oscar_test::shortest_length_in(message);
    REQUIRE(shortest > 300);
    for (size_t context_idx = 0; context_idx < 10; ++context_idx) {
      options.length = shortest;
      CHECK_NOTHROW(make_recall(*tokenizer, text, words, options, context_idx));
      options.length = shortest - 80;
      CHECK_THROWS_AS(make_recall(*tokenizer, text, words, options, context_idx), Error);
    }
  }
  RecallOptions options = small_options();
  options.length = 100000;
  CHECK(oscar_test::message_of([&] {
          make_recall(*tokenizer, text, words, options, 0);
        }).find("too few to fill 100000") != std::string::npos);
}

TEST_CASE("recall scores a copying model as perfect and a stubborn one as lost") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const std::string text = oscar_test::made_up_text(4000);
  const auto copying = std::make_shared<CopyingScorer>();
  const auto stubborn = std::make_shared<StubbornScorer>(' ');
  const TaskScores scores = run_recall({{"copying", copying}, {"stubborn", stubborn}}, *tokenizer,
                                       text, small_options(), {});
  CHECK(scores.context == std::vector<size_t>{0, 1, 2});
  const ArmTaskScores& good = scores.arms[0];
  CHECK(good.values("top1_agreement") == std::vector<double>(3, 1.0));
  CHECK(good.values("exact_match") == std::vector<double>(3, 1.0));
  CHECK(good.values("exact_prefix_share") == std::vector<double>(3, 1.0));
  for (const double value : good.values("mean_log_prob")) {
    CHECK(value == Approx(std::log(CopyingScorer::kLikely)));
  }
  const ArmTaskScores& bad = scores.arms[1];
  for (size_t i = 0; i < 3; ++i) {
    // The first token, a space, is what it expects; then it errs at once.
    CHECK(bad.values("exact_prefix_tokens")[i] <= 1);
    CHECK(bad.values("exact_match")[i] == 0);
    CHECK(bad.values("top1_agreement")[i] < 0.3);
    CHECK(bad.values("top1_agreement")[i] > 0.05);  // spaces between words
  }
}

TEST_CASE("a recall that errs once has a prefix up to there") {
  class ErrsAtTenth : public CopyingScorer {
   public:
    std::vector<std::vector<TokenScore>> score(
        std::span<const int32_t> tail,
        const std::vector<std::vector<int32_t>>& continuations) override {
      auto scores = CopyingScorer::score(tail, continuations);
      scores[0][9].top1 = 0;
      return scores;
    }
  };
  const auto tokenizer = oscar_test::byte_tokenizer();
  const std::string text = oscar_test::made_up_text(4000);
  RecallOptions options = small_options();
  options.contexts = 1;
  const RecallContext context = make_recall(*tokenizer, text, task_words(text), options, 0);
  ErrsAtTenth scorer;
  ArmTaskScores scores;
  score_recall(context, scorer, scores);
  const auto count = static_cast<double>(context.prompts.questions[0].continuations[0].size());
  CHECK(scores.values("exact_prefix_tokens")[0] == 9);
  CHECK(scores.values("exact_match")[0] == 0);
  CHECK(scores.values("top1_agreement")[0] == Approx((count - 2) / (count - 1)));
}

}  // namespace oscar
