#include <algorithm>
#include <catch2/catch.hpp>
#include <set>

#include "base/error.h"
#include "eval/kv_lookup.h"
#include "tests/eval/task_fixture.h"

namespace oscar {
namespace {

using oscar_test::CopyingScorer;
using oscar_test::StubbornScorer;

KvLookupOptions small_options() {
  KvLookupOptions options;
  options.length = 1600;
  options.contexts = 2;
  options.questions = 4;
  options.seed = 3;
  options.widest.sink = 64;
  options.widest.recent = 256;
  return options;
}

std::string decode(const Tokenizer& tokenizer, const TaskContext& context, size_t question,
                   size_t continuation) {
  const TaskQuestion& asked = context.questions[question];
  std::vector<int32_t> ids = context.prefix;
  ids.insert(ids.end(), asked.tail.begin(), asked.tail.end());
  const std::vector<int32_t>& tokens = asked.continuations[continuation];
  ids.insert(ids.end(), tokens.begin(), tokens.end());
  return tokenizer.decode(ids);
}

}  // namespace

TEST_CASE("kv-lookup fills the length with distinct keys and values") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const auto words = task_words(oscar_test::made_up_text(3000));
  const KvLookupOptions options = small_options();
  const KvLookupContext context = make_kv_lookup(*tokenizer, words, options, 0);
  std::set<std::string> keys, values;
  for (const KvLine& line : context.lines) {
    CHECK(keys.insert(line.key).second);
    CHECK(values.insert(line.value).second);
    CHECK(line.value.size() == 3);
    CHECK(line.value[0] != '0');
    CHECK(context.prompt.find(line.key + ": " + line.value + "\n") != std::string::npos);
  }
  REQUIRE(context.asked.size() == 4);
  CHECK(std::set<size_t>(context.asked.begin(), context.asked.end()).size() == 4);
  size_t longest = 0;
  for (size_t i = 0; i < context.asked.size(); ++i) {
    const TaskQuestion& question = context.prompts.questions[i];
    const KvLine& line = context.lines[context.asked[i]];
    longest = std::max(longest, question.prompt_tokens);
    CHECK(question.prompt_tokens == context.prompts.prefix.size() + question.tail.size());
    // The span is the line's, and no window of an arm reaches it.
    std::vector<int32_t> ids = context.prompts.prefix;
    ids.insert(ids.end(), question.tail.begin(), question.tail.end());
    const auto at = [&](size_t k) { return ids.begin() + static_cast<std::ptrdiff_t>(k); };
    CHECK(tokenizer->decode({at(question.fact_begin), at(question.fact_end)}) ==
          line.key + ": " + line.value);
    CHECK(question.fact_begin >= options.widest.sink);
    CHECK(question.fact_end + options.widest.recent + 8 <= question.prompt_tokens);
    // The right value first, then 16 others: the neighbours' among them, all of the list.
    REQUIRE(question.continuations.size() == 1 + kLookupDistractors);
    CHECK(decode(*tokenizer, context.prompts, i, 0)
              .ends_with("Answer:\n" + line.key + ": " + line.value));
    std::set<std::string> others;
    for (size_t other = 1; other < question.continuations.size(); ++other) {
      others.insert(tokenizer->decode(question.continuations[other]).substr(1));
    }
    CHECK(others.size() == kLookupDistractors);
    CHECK(others.count(line.value) == 0);
    for (const std::string& value : others) CHECK(values.count(value) == 1);
    if (context.asked[i] > 0) CHECK(others.count(context.lines[context.asked[i] - 1].value) == 1);
    CHECK(others.count(context.lines[context.asked[i] + 1].value) == 1);
  }
  CHECK(longest <= options.length);
  CHECK(longest + 40 > options.length);  // within a line of the length
}

TEST_CASE("kv-lookup depends on seed and list number alone") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const auto words = task_words(oscar_test::made_up_text(3000));
  KvLookupOptions options = small_options();
  const KvLookupContext first = make_kv_lookup(*tokenizer, words, options, 1);
  const KvLookupContext again = make_kv_lookup(*tokenizer, words, options, 1);
  CHECK(first.prompt == again.prompt);
  CHECK(first.prompts.questions[3].continuations == again.prompts.questions[3].continuations);
  CHECK(make_kv_lookup(*tokenizer, words, options, 2).prompt != first.prompt);
  options.seed = 4;
  CHECK(make_kv_lookup(*tokenizer, words, options, 1).prompt != first.prompt);
}

TEST_CASE("kv-lookup names the shortest usable length, and it is usable") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const auto words = task_words(oscar_test::made_up_text(3000));
  for (const size_t recent : {0, 256, 600}) {
    KvLookupOptions options = small_options();
    options.widest.recent = recent;
    options.length = 300;
    const std::string message =
        oscar_test::message_of([&] { make_kv_lookup(*tokenizer, words, options, 0); });
    INFO(message);
    const size_t shortest = oscar_test::shortest_length_in(message);
    REQUIRE(shortest > 300);
    options.length = shortest;
    CHECK_NOTHROW(make_kv_lookup(*tokenizer, words, options, 0));
    options.length = shortest / 2;
    CHECK_THROWS_AS(make_kv_lookup(*tokenizer, words, options, 0), Error);
  }
}

TEST_CASE("kv-lookup lists of more than 900 lines have longer values") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const auto words = task_words(oscar_test::made_up_text(3000));
  KvLookupOptions options = small_options();
  options.length = 24000;
  const KvLookupContext context = make_kv_lookup(*tokenizer, words, options, 0);
  CHECK(context.lines.size() > 900);
  CHECK(context.lines[0].value.size() == 4);
  CHECK(context.prompts.questions[0].prompt_tokens + 60 > options.length);
}

TEST_CASE("kv-lookup in a chat asks for one value") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const auto words = task_words(oscar_test::made_up_text(3000));
  KvLookupOptions options = small_options();
  options.style = PromptStyle::kChat;
  options.chat_template = "chatml";
  const KvLookupContext context = make_kv_lookup(*tokenizer, words, options, 0);
  const KvLine& line = context.lines[context.asked[0]];
  CHECK(context.prompt.starts_with("<|im_start|>user\nEach name has a number."));
  CHECK(context.prompt.ends_with("What is the number of \"" + line.key +
                                 "\"? Answer with the number only.<|im_end|>\n"
                                 "<|im_start|>assistant\n"));
  CHECK(tokenizer->decode(context.prompts.questions[0].continuations[0]) == line.value);
}

TEST_CASE("kv-lookup scores a copying model as right and a stubborn one as wrong") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const std::string text = oscar_test::made_up_text(3000);
  const KvLookupOptions options = small_options();
  const auto copying = std::make_shared<CopyingScorer>();
  const auto stubborn = std::make_shared<StubbornScorer>('\n');
  const TaskScores scores =
      run_kv_lookup({{"copying", copying}, {"stubborn", stubborn}}, *tokenizer, text, options, {});
  CHECK(scores.task == "kv-lookup");
  CHECK(scores.context == std::vector<size_t>{0, 0, 0, 0, 1, 1, 1, 1});
  CHECK(scores.mean_prompt_tokens > 1500);
  CHECK(copying->num_prefixes == 2);  // one prefill a list
  CHECK(copying->num_generated == 0);
  CHECK(stubborn->num_generated == 8);
  const ArmTaskScores& good = scores.arms[0];
  CHECK(good.values("accuracy") == std::vector<double>(8, 1.0));
  CHECK(good.values("margin_positive") == std::vector<double>(8, 1.0));
  for (const double margin : good.values("margin")) {
    // At least one digit of every other value is unexpected.
    CHECK(margin > std::log(CopyingScorer::kLikely / 1e-3) - 1e-9);
  }
  for (const double log_prob : good.values("gold_log_prob")) {
    CHECK(log_prob == Approx(4 * std::log(CopyingScorer::kLikely)));  // space and three digits
  }
  CHECK(good.tokens_int2_read == 4);  // 2 a list
  const ArmTaskScores& bad = scores.arms[1];
  CHECK(bad.values("accuracy") == std::vector<double>(8, 0.0));
  CHECK_THROWS_AS(bad.values("absent"), Error);
}

TEST_CASE("an answer is generated only where the scores do not tell it") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  const std::string text = oscar_test::made_up_text(3000);
  const auto sevens = std::make_shared<StubbornScorer>('7');
  // Writes "=123" where the list has " 123".
  class Equals : public CopyingScorer {
    int32_t next(const std::vector<int32_t>& ids) const override {
      if (ids.back() == ':') return '=';
      std::vector<int32_t> as_listed = ids;
      std::replace(as_listed.begin(), as_listed.end(), int32_t{'='}, int32_t{' '});
      return CopyingScorer::next(as_listed);
    }
  };
  const auto equals = std::make_shared<Equals>();
  const TaskScores scores = run_kv_lookup({{"sevens", sevens}, {"equals", equals}}, *tokenizer,
                                          text, small_options(), {});
  CHECK(scores.arms[0].values("accuracy") == std::vector<double>(8, 0.0));
  CHECK(sevens->num_generated < 8);  // a 7 rules out most values at once
  CHECK(scores.arms[1].values("accuracy") == std::vector<double>(8, 1.0));
  CHECK(equals->num_generated == 8);
}

TEST_CASE("an answer that goes on with a digit is wrong") {
  CHECK(first_integer(" 123\n4") == "123");
  CHECK(first_integer("no").empty());
  CHECK(first_integer("a1234.") == "1234");
  // Expects the value's digits, then another digit.
  class Continuing : public CopyingScorer {
    int32_t next(const std::vector<int32_t>& text) const override {
      const int32_t copied = CopyingScorer::next(text);
      return copied == '\n' ? '5' : copied;
    }
  };
  const auto tokenizer = oscar_test::byte_tokenizer();
  const TaskScores scores =
      run_kv_lookup({{"continuing", std::make_shared<Continuing>()}}, *tokenizer,
                    oscar_test::made_up_text(3000), small_options(), {});
  CHECK(scores.arms[0].values("accuracy") == std::vector<double>(8, 0.0));
  CHECK(scores.arms[0].values("margin_positive") == std::vector<double>(8, 1.0));
}

TEST_CASE("a text with too few words is refused") {
  const auto tokenizer = oscar_test::byte_tokenizer();
  CHECK(oscar_test::message_of([&] {
          run_kv_lookup({}, *tokenizer, "only these words", small_options(), {});
        }).find("has 3 different lower-case words") != std::string::npos);
}

}  // namespace oscar
