#include "eval/kv_lookup.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/random.h"
#include "model/sampler.h"

namespace oscar {
namespace {

constexpr size_t kExamples = 3, kExampleLines = 2;
constexpr size_t kMinLines = kLookupDistractors + 1;
constexpr size_t kAnswerTokens = 8;  // room for the answer
constexpr int kMinDigits = 3, kMaxDigits = 6;

constexpr const char* kHeader =
    "Each name has a number. After the list a name is asked for, and its number is given.\n\n";

std::string line_text(const KvLine& line) { return line.key + ": " + line.value; }

// Distinct keys and values: the lines of the examples, then those of the list.
std::vector<KvLine> draw_lines(const std::vector<std::string>& words, size_t count, int digits,
                               uint64_t seed) {
  Random random(seed);
  OSCAR_CHECK(words.size() * (words.size() - 1) >= 2 * count, "kv-lookup: ", words.size(),
              " words make too few different keys for ", count, " lines");
  auto lowest = static_cast<uint64_t>(std::lround(std::pow(10, digits - 1)));
  std::vector<uint64_t> values(9 * lowest);
  std::iota(values.begin(), values.end(), lowest);
  random.shuffle(values);
  std::set<std::string> used;
  std::vector<KvLine> lines;
  while (lines.size() < count) {
    const std::string& first = words[random.below(words.size())];
    const std::string& second = words[random.below(words.size())];
    if (first == second) continue;
    std::string key = first + " " + second;
    if (!used.insert(key).second) continue;
    lines.push_back({std::move(key), std::to_string(values[lines.size()])});
  }
  return lines;
}

class KvLookupBuilder {
 public:
  KvLookupBuilder(const Tokenizer& tokenizer, const std::vector<std::string>& words,
                  const KvLookupOptions& options, size_t context_idx)
      : tokenizer_(tokenizer), options_(options), context_idx_(context_idx), random_(seed_of(0)) {
    OSCAR_CHECK(options.questions > 0, "kv-lookup: expected at least one question");
    for (int digits = kMinDigits; digits <= kMaxDigits; ++digits) {
      draw(words, digits);
      if (num_lines_ < list_.size()) return;  // the length was filled
    }
  }

  KvLookupContext build() {
    if (num_lines_ < kMinLines) fail_length();
    list_.resize(num_lines_);
    KvLookupContext context;
    std::vector<size_t> places = admissible_lines();
    if (places.empty()) fail_length();
    random_.shuffle(places);
    places.resize(std::min(places.size(), options_.questions));
    std::vector<PromptText> prompts;
    for (const size_t line : places) prompts.push_back(question(line));
    context.prompt = prompts[0].text;
    context.lines = list_;
    context.asked = places;
    context.prompts = make_context(tokenizer_, prompts);
    for (const TaskQuestion& asked : context.prompts.questions) {
      OSCAR_CHECK(
          in_quantized(options_.widest, asked.fact_begin, asked.fact_end, asked.prompt_tokens),
          "kv-lookup: line at tokens ", asked.fact_begin, "..", asked.fact_end, " of ",
          asked.prompt_tokens, " is not in the quantized region");
    }
    return context;
  }

 private:
  // Independent streams of one list.
  uint64_t seed_of(uint64_t stream) const {
    return request_seed(options_.seed, "kv-lookup", std::to_string(context_idx_), stream);
  }

  // Draws lines whose values have so many digits and finds how many of them fit.
  void draw(const std::vector<std::string>& words, int digits) {
    const size_t in_examples = kExamples * kExampleLines;
    // A line takes at least four tokens.
    const size_t numbers = static_cast<size_t>(std::lround(9 * std::pow(10, digits - 1)));
    const size_t count = std::min(numbers, in_examples + options_.length / 4 + kMinLines);
    const std::vector<KvLine> lines =
        draw_lines(words, count, digits, seed_of(static_cast<uint64_t>(digits)));
    const auto split = lines.begin() + static_cast<std::ptrdiff_t>(in_examples);
    examples_.assign(lines.begin(), split);
    list_.assign(split, lines.end());
    const auto tokens = [&](const KvLine& line) {
      return tokenizer_.encode(line.key, false).size();
    };
    longest_ = *std::max_element(list_.begin(), list_.end(), [&](const KvLine& a, const KvLine& b) {
      return tokens(a) < tokens(b);
    });
    shortest_ =
        *std::min_element(list_.begin(), list_.end(),
                          [&](const KvLine& a, const KvLine& b) { return tokens(a) < tokens(b); });
    size_t fits = 0, too_many = list_.size() + 1;
    while (fits + 1 < too_many) {
      const size_t middle = (fits + too_many) / 2;
      (prompt_tokens(middle) + kAnswerTokens <= options_.length ? fits : too_many) = middle;
    }
    num_lines_ = fits;
  }

  // Everything up to the question, for the first `count` lines; starts (may be null) gets where
  // each line begins.
  std::string body(size_t count, std::vector<size_t>* starts) const {
    std::string text = kHeader;
    for (size_t example = 0; example < kExamples; ++example) {
      const KvLine* lines = examples_.data() + example * kExampleLines;
      text += "List:\n";
      for (size_t i = 0; i < kExampleLines; ++i) text += line_text(lines[i]) + "\n";
      text += "Answer:\n" + line_text(lines[example % kExampleLines]) + "\n\n";
    }
    text += "List:\n";
    for (size_t i = 0; i < count; ++i) {
      if (starts != nullptr) starts->push_back(text.size());
      text += line_text(list_[i]) + "\n";
    }
    return text;
  }

  std::string prompt_of(const std::string& list_text, const std::string& key) const {
    if (options_.style == PromptStyle::kCompletion) return list_text + "Answer:\n" + key + ":";
    return chat_prompt(
        tokenizer_,
        list_text + "\nWhat is the number of \"" + key + "\"? Answer with the number only.",
        options_.chat_template);
  }

  size_t prompt_tokens(size_t count) const {
    return encode_prompt(tokenizer_, prompt_of(body(count, nullptr), longest_.key)).size();
  }

  // Lines that are quantized when the question comes, also for the shortest question.
  std::vector<size_t> admissible_lines() const {
    std::vector<size_t> starts, lines;
    const std::string list_text = body(list_.size(), &starts);
    const std::string prompt = prompt_of(list_text, shortest_.key);
    const size_t shift = find_body(prompt, list_text);
    std::vector<std::pair<size_t, size_t>> ranges;
    for (size_t i = 0; i < list_.size(); ++i) {
      const size_t begin = shift + starts[i];
      ranges.emplace_back(begin, begin + line_text(list_[i]).size());
    }
    const std::vector<TokenSpan> spans = token_spans(tokenizer_, prompt, ranges);
    for (size_t i = 0; i < spans.size(); ++i) {
      const TokenSpan& span = spans[i];
      if (in_quantized(options_.widest, span.begin, span.end, span.prompt_tokens)) {
        lines.push_back(i);
      }
    }
    return lines;
  }

  static size_t find_body(const std::string& prompt, const std::string& list_text) {
    const size_t shift = prompt.find(list_text);
    OSCAR_CHECK(shift != std::string::npos, "kv-lookup: the chat template changes the message");
    return shift;
  }

  PromptText question(size_t line) {
    std::vector<size_t> starts;
    const std::string list_text = body(list_.size(), &starts);
    PromptText prompt;
    prompt.text = prompt_of(list_text, list_[line].key);
    prompt.fact_begin = find_body(prompt.text, list_text) + starts[line];
    prompt.fact_end = prompt.fact_begin + line_text(list_[line]).size();
    const std::string gap = options_.style == PromptStyle::kCompletion ? " " : "";
    prompt.continuations.push_back(gap + list_[line].value);
    // The neighbours first, then others.
    std::vector<size_t> near, far;
    for (size_t i = 0; i < list_.size(); ++i) {
      if (i == line) continue;
      (i + 1 == line || i == line + 1 ? near : far).push_back(i);
    }
    random_.shuffle(far);
    near.insert(near.end(), far.begin(), far.end());
    for (size_t i = 0; i < kLookupDistractors; ++i) {
      prompt.continuations.push_back(gap + list_[near[i]].value);
    }
    return prompt;
  }

  [[noreturn]] void fail_length() const {
    const size_t head = prompt_tokens(0);  // the question included
    size_t longest_line = 0;
    for (const KvLine& line : list_) {
      longest_line =
          std::max(longest_line, tokenizer_.encode(line_text(line) + "\n", false).size());
    }
    const WindowSpec& widest = options_.widest;
    const size_t enough_lines = head + kMinLines * longest_line;
    const size_t outside_windows =
        std::max(head, widest.sink) + 2 * longest_line + widest.recent + kFlushTokens;
    fail("kv-lookup: a length of ", options_.length, " tokens leaves no line between windows ",
         widest.sink, "/", widest.recent, " in a list of at least ", kMinLines,
         " lines; the shortest usable length is ",
         std::max(enough_lines, outside_windows) + kAnswerTokens);
  }

  const Tokenizer& tokenizer_;
  const KvLookupOptions& options_;
  size_t context_idx_;
  Random random_;
  std::vector<KvLine> examples_, list_;
  KvLine longest_, shortest_;  // by tokens of the key
  size_t num_lines_ = 0;
};

double sum_log_prob(const std::vector<TokenScore>& tokens, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += tokens[i].log_prob;
  return sum;
}

// Whether the greedy answer's first integer is the value, as far as the teacher-forced tokens tell:
// the answer follows the right value up to the first token that is not the most likely one. Empty
// when only the answer itself can tell.
std::optional<bool> known_answer(const Tokenizer& tokenizer, const std::vector<int32_t>& gold,
                                 const std::vector<TokenScore>& tokens, const std::string& value) {
  size_t same = 0;
  while (same < gold.size() && tokens[same].top1 == gold[same]) ++same;
  std::vector<int32_t> ids(gold.begin(), gold.begin() + static_cast<std::ptrdiff_t>(same));
  ids.push_back(tokens[same].top1);
  const std::string answer = tokenizer.decode(ids);
  const std::string integer = first_integer(answer);
  if (!integer.empty() && !value.starts_with(integer)) return false;
  if (!integer.empty() && !answer.ends_with(integer)) return integer == value;
  return std::nullopt;
}

}  // namespace

std::string first_integer(std::string_view text) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto begin = std::find_if(text.begin(), text.end(), is_digit);
  return std::string(begin, std::find_if_not(begin, text.end(), is_digit));
}

KvLookupContext make_kv_lookup(const Tokenizer& tokenizer, const std::vector<std::string>& words,
                               const KvLookupOptions& options, size_t context_idx) {
  return KvLookupBuilder(tokenizer, words, options, context_idx).build();
}

void score_kv_lookup(const KvLookupContext& context, const Tokenizer& tokenizer,
                     ContinuationScorer& scorer, ArmTaskScores& scores) {
  scorer.set_prefix(context.prompts.prefix);
  for (size_t i = 0; i < context.asked.size(); ++i) {
    const TaskQuestion& question = context.prompts.questions[i];
    const std::string& value = context.lines[context.asked[i]].value;
    const auto tokens = scorer.score(question.tail, question.continuations);
    const std::vector<int32_t>& gold = question.continuations[0];
    const double gold_log_prob = sum_log_prob(tokens[0], gold.size());
    double best_other = -std::numeric_limits<double>::infinity();
    for (size_t other = 1; other < tokens.size(); ++other) {
      best_other =
          std::max(best_other, sum_log_prob(tokens[other], question.continuations[other].size()));
    }
    const std::optional<bool> known = known_answer(tokenizer, gold, tokens[0], value);
    bool right = known.value_or(false);
    if (!known) {
      const auto complete = [&](std::span<const int32_t> ids) {
        const std::string text = tokenizer.decode({ids.begin(), ids.end()});
        const std::string integer = first_integer(text);
        return !integer.empty() && !text.ends_with(integer);
      };
      const std::vector<int32_t> answer = scorer.generate(question.tail, kAnswerTokens, complete);
      right = first_integer(tokenizer.decode(answer)) == value;
    }
    const double margin = gold_log_prob - best_other;
    scores.values("accuracy").push_back(right ? 1 : 0);
    scores.values("margin").push_back(margin);
    scores.values("margin_positive").push_back(margin > 0 ? 1 : 0);
    scores.values("gold_log_prob").push_back(gold_log_prob);
  }
}

TaskScores run_kv_lookup(const std::vector<TaskArm>& arms, const Tokenizer& tokenizer,
                         std::string_view text, const KvLookupOptions& options,
                         const Progress& progress) {
  const std::vector<std::string> words = task_words(text);
  KvLookupContext context;
  TaskRunner runner;
  runner.task = "kv-lookup";
  runner.contexts = options.contexts;
  runner.make = [&](size_t context_idx) {
    context = make_kv_lookup(tokenizer, words, options, context_idx);
    return context.prompts;
  };
  runner.score = [&](size_t, ContinuationScorer& scorer, ArmTaskScores& arm) {
    score_kv_lookup(context, tokenizer, scorer, arm);
  };
  return run_task(runner, arms, progress);
}

}  // namespace oscar
