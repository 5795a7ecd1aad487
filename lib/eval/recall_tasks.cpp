#include "eval/recall_tasks.h"

#include <algorithm>

#include "base/error.h"
#include "base/random.h"
#include "model/sampler.h"

namespace oscar {
namespace {

// Filler words given up, at most, where tokens at the seams take more room than foreseen.
constexpr size_t kMaxSeamWords = 16;
// Room for a filler word on either side of the passages.
constexpr size_t kSeamTokens = 24;

// Words of the text as ranges of bytes (runs without white space).
std::vector<std::pair<size_t, size_t>> word_ranges(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n\v\f";
  std::vector<std::pair<size_t, size_t>> ranges;
  for (size_t begin = text.find_first_not_of(kSpaces); begin != text.npos;) {
    const size_t end = std::min(text.find_first_of(kSpaces, begin), text.size());
    ranges.emplace_back(begin, end);
    begin = text.find_first_not_of(kSpaces, end);
  }
  return ranges;
}

// Smallest i in [0, count) with holds(i), where holds is false up to some i and true from there on;
// count when it never holds.
template <class Holds>
size_t first_true(size_t count, const Holds& holds) {
  size_t low = 0, high = count;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (holds(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Everything of a context but the number of filler words and the places.
class RecallBuilder {
 public:
  RecallBuilder(const Tokenizer& tokenizer, std::string_view text,
                const std::vector<std::string>& words, const RecallOptions& options,
                size_t context_idx)
      : tokenizer_(tokenizer),
        text_(text),
        options_(options),
        random_(request_seed(options.seed, "recall", std::to_string(context_idx), 0)),
        ranges_(word_ranges(text)) {
    OSCAR_CHECK(options.passages > 0 && options.passage_words > 1,
                "recall: expected at least one passage of at least two words");
    std::vector<std::string> labels = words;
    random_.shuffle(labels);
    OSCAR_CHECK(labels.size() >= options.passages, "recall: ", options.passages,
                " passages need as many words, the text has ", labels.size());
    labels_.assign(labels.begin(), labels.begin() + static_cast<std::ptrdiff_t>(options.passages));
    draw_filler_and_passages(words);
  }

  RecallContext build() {
    size_t longest_answer = 0;
    for (const std::string& passage : passages_) {
      longest_answer = std::max(longest_answer, tokenizer_.encode(" " + passage, false).size());
    }
    const size_t reserve = longest_answer + 1;
    const size_t fits = most_filler(reserve);
    for (size_t filler = fits; filler + kMaxSeamWords > fits; --filler) {
      const std::vector<size_t> places = draw_places(filler);
      if (places.empty()) break;
      RecallContext context = finish(filler, places);
      // Tokens at the seams depend on the places; a word less makes room.
      if (is_usable(context, reserve)) return context;
      if (filler == 0) break;
    }
    fail_length(shortest_length(reserve));
  }

 private:
  void draw_filler_and_passages(const std::vector<std::string>& words) {
    // A word is at least a token, so that as many words as tokens always fill the length; passages
    // of the text are the words before the filler.
    const size_t passage_words =
        options_.random_words ? 0 : options_.passages * options_.passage_words;
    OSCAR_CHECK(ranges_.size() > passage_words + 16, "recall: the text has ", ranges_.size(),
                " words, expected more than ", passage_words + 16);
    max_filler_ = std::min(options_.length, ranges_.size() - passage_words);
    const size_t used = max_filler_ + passage_words;
    const size_t start = random_.below(ranges_.size() - used + 1);
    first_filler_ = start + passage_words;
    for (size_t i = 0; i < options_.passages; ++i) {
      std::string passage;
      for (size_t word = 0; word < options_.passage_words; ++word) {
        if (word > 0) passage += ' ';
        if (options_.random_words) {
          passage += words[random_.below(words.size())];
        } else {
          const auto& [begin, end] = ranges_[start + i * options_.passage_words + word];
          passage += text_.substr(begin, end - begin);
        }
      }
      passages_.push_back(std::move(passage));
    }
  }

  // Most filler words that fit.
  size_t most_filler(size_t reserve) const {
    const size_t too_many = first_true(max_filler_ + 1, [&](size_t filler) {
      return longest_prompt(filler) + reserve > options_.length;
    });
    OSCAR_CHECK(too_many <= max_filler_ || max_filler_ == options_.length, "recall: the text has ",
                ranges_.size(), " words, too few to fill ", options_.length, " tokens");
    return too_many == 0 ? 0 : too_many - 1;
  }

  // Every passage is quantized when the first is behind the sink and the last before the recent
  // window; between these two bounds all places are equally likely. Empty when there is none.
  std::vector<size_t> draw_places(size_t filler_words) {
    const size_t begin = first_true(filler_words + 1,
                                    [&](size_t place) { return behind_sink(filler_words, place); });
    const size_t end = first_true(
        filler_words + 1, [&](size_t place) { return !before_recent(filler_words, place); });
    std::vector<size_t> places;
    if (begin >= end) return places;
    for (size_t i = 0; i < options_.passages; ++i) {
      places.push_back(begin + random_.below(end - begin));
    }
    std::sort(places.begin(), places.end());
    return places;
  }

  bool is_usable(const RecallContext& context, size_t reserve) const {
    return std::all_of(context.prompts.questions.begin(), context.prompts.questions.end(),
                       [&](const TaskQuestion& question) {
                         return question.prompt_tokens + reserve <= options_.length &&
                                in_quantized(options_.widest, question.fact_begin,
                                             question.fact_end, question.prompt_tokens);
                       });
  }

  // Filler words [from, to), as they stand in the text.
  std::string_view filler(size_t from, size_t to) const {
    if (from == to) return {};
    const size_t begin = ranges_[first_filler_ + from].first;
    return text_.substr(begin, ranges_[first_filler_ + to - 1].second - begin);
  }

  // The prompts of all questions; places: filler words before each passage, ascending.
  std::vector<PromptText> prompts(size_t filler_words, const std::vector<size_t>& places) const {
    std::string body;
    std::vector<size_t> passage_at;
    size_t from = 0;
    for (size_t i = 0; i < passages_.size(); ++i) {
      body += filler(from, places[i]);
      body += cat("\n\nPassage ", labels_[i], ": ");
      passage_at.push_back(body.size());
      body += passages_[i] + "\n\n";
      from = places[i];
    }
    body += filler(from, filler_words);
    std::vector<PromptText> all;
    for (size_t i = 0; i < passages_.size(); ++i) {
      const bool chat = options_.style == PromptStyle::kChat;
      const std::string text =
          body + (chat ? cat("\n\nRepeat passage ", labels_[i], " word for word.")
                       : cat("\n\nRepeat a passage word for word.\n\nPassage ", labels_[i], ":"));
      PromptText prompt;
      prompt.text = chat ? chat_prompt(tokenizer_, text, options_.chat_template) : text;
      const size_t shift = prompt.text.find(body);
      OSCAR_CHECK(shift != std::string::npos, "recall: the chat template changes the message");
      prompt.fact_begin = shift + passage_at[i];
      prompt.fact_end = prompt.fact_begin + passages_[i].size();
      prompt.continuations = {chat ? passages_[i] : " " + passages_[i]};
      all.push_back(std::move(prompt));
    }
    return all;
  }

  // All passages after `place` filler words.
  std::vector<PromptText> prompts_at(size_t filler_words, size_t place) const {
    return prompts(filler_words, std::vector<size_t>(options_.passages, place));
  }
  TokenSpan span_of(const PromptText& prompt) const {
    return token_span(tokenizer_, prompt.text, prompt.fact_begin, prompt.fact_end);
  }
  bool behind_sink(size_t filler_words, size_t place) const {
    return span_of(prompts_at(filler_words, place).front()).begin >= options_.widest.sink;
  }
  bool before_recent(size_t filler_words, size_t place) const {
    const TokenSpan span = span_of(prompts_at(filler_words, place).back());
    return span.end + options_.widest.recent + kFlushTokens <= span.prompt_tokens;
  }

  size_t longest_prompt(size_t filler_words) const {
    size_t longest = 0;
    for (const PromptText& prompt : prompts_at(filler_words, 0)) {
      longest = std::max(longest, encode_prompt(tokenizer_, prompt.text).size());
    }
    return longest;
  }

  RecallContext finish(size_t filler_words, const std::vector<size_t>& places) const {
    const std::vector<PromptText> all = prompts(filler_words, places);
    RecallContext context;
    context.prompt = all[0].text;
    context.passages = passages_;
    context.prompts = make_context(tokenizer_, all);
    return context;
  }

  // The passages side by side between the windows.
  size_t shortest_length(size_t reserve) const {
    const TokenSpan last = span_of(prompts_at(0, 0).back());
    const size_t question = last.prompt_tokens - last.end;
    return options_.widest.sink + last.end +
           std::max(question, options_.widest.recent + kFlushTokens) + reserve + kSeamTokens;
  }
  [[noreturn]] void fail_length(size_t shortest) const {
    fail("recall: no place for ", options_.passages, " passage(s) of ", options_.passage_words,
         " words between windows ", options_.widest.sink, "/", options_.widest.recent,
         " in a length of ", options_.length, " tokens; the shortest usable length is ", shortest);
  }

  const Tokenizer& tokenizer_;
  std::string_view text_;
  const RecallOptions& options_;
  Random random_;
  std::vector<std::pair<size_t, size_t>> ranges_;
  std::vector<std::string> labels_, passages_;
  size_t first_filler_ = 0, max_filler_ = 0;
};

}  // namespace

RecallContext make_recall(const Tokenizer& tokenizer, std::string_view text,
                          const std::vector<std::string>& words, const RecallOptions& options,
                          size_t context_idx) {
  return RecallBuilder(tokenizer, text, words, options, context_idx).build();
}

void score_recall(const RecallContext& context, ContinuationScorer& scorer, ArmTaskScores& scores) {
  scorer.set_prefix(context.prompts.prefix);
  for (const TaskQuestion& question : context.prompts.questions) {
    const std::vector<int32_t>& passage = question.continuations[0];
    OSCAR_CHECK(passage.size() > 1, "recall: a passage of ", passage.size(), " tokens");
    const std::vector<TokenScore> tokens =
        scorer.score(question.tail, question.continuations).at(0);
    double agreement = 0, log_prob = 0;
    size_t prefix = passage.size();
    for (size_t i = 0; i < passage.size(); ++i) {
      const bool same = tokens[i].top1 == passage[i];
      if (!same) prefix = std::min(prefix, i);
      if (i == 0) continue;
      agreement += same ? 1 : 0;
      log_prob += tokens[i].log_prob;
    }
    const auto count = static_cast<double>(passage.size());
    scores.values("top1_agreement").push_back(agreement / (count - 1));
    scores.values("mean_log_prob").push_back(log_prob / (count - 1));
    scores.values("exact_prefix_tokens").push_back(static_cast<double>(prefix));
    scores.values("exact_prefix_share").push_back(static_cast<double>(prefix) / count);
    scores.values("exact_match").push_back(prefix == passage.size() ? 1 : 0);
  }
}

std::vector<TaskArm> task_arms(Transformer& transformer,
                               const std::vector<std::shared_ptr<const KvArm>>& arms) {
  std::vector<TaskArm> task;
  for (const auto& arm : arms) {
    task.push_back({arm->name, std::make_shared<TransformerScorer>(transformer, arm)});
  }
  return task;
}

std::vector<std::string> task_words(std::string_view text) {
  std::vector<std::string> words = frequent_words(text, kTaskWords);
  OSCAR_CHECK(words.size() >= kMinTaskWords, "recall tasks: the text has ", words.size(),
              " different lower-case words of 4 to 9 letters, expected at least ", kMinTaskWords);
  return words;
}

TaskScores run_task(const TaskRunner& runner, const std::vector<TaskArm>& arms,
                    const Progress& progress) {
  TaskScores scores;
  scores.task = runner.task;
  for (const TaskArm& arm : arms) scores.arms.emplace_back().arm = arm.name;
  double prompt_tokens = 0;
  for (size_t context_idx = 0; context_idx < runner.contexts; ++context_idx) {
    const TaskContext context = runner.make(context_idx);
    for (const TaskQuestion& question : context.questions) {
      scores.context.push_back(context_idx);
      prompt_tokens += static_cast<double>(question.prompt_tokens);
    }
    for (size_t i = 0; i < arms.size(); ++i) {
      progress.step(
          {runner.task, context_idx * arms.size() + i, runner.contexts * arms.size(), "prompts"});
      runner.score(context_idx, *arms[i].scorer, scores.arms[i]);
      const CacheUse use = arms[i].scorer->cache_use();
      scores.arms[i].tokens_int2_written += use.tokens_int2_written;
      scores.arms[i].tokens_int2_read += use.tokens_int2_read;
      scores.arms[i].tokens_high_precision += use.tokens_high_precision;
    }
  }
  const size_t total = runner.contexts * arms.size();
  progress.step({runner.task, total, total, "prompts"});
  if (!scores.context.empty()) {
    scores.mean_prompt_tokens = prompt_tokens / static_cast<double>(scores.context.size());
  }
  return scores;
}

TaskScores run_recall(const std::vector<TaskArm>& arms, const Tokenizer& tokenizer,
                      std::string_view text, const RecallOptions& options,
                      const Progress& progress) {
  const std::vector<std::string> words = task_words(text);
  RecallContext context;
  TaskRunner runner;
  runner.task = "recall";
  runner.contexts = options.contexts;
  runner.make = [&](size_t context_idx) {
    context = make_recall(tokenizer, text, words, options, context_idx);
    return context.prompts;
  };
  runner.score = [&](size_t, ContinuationScorer& scorer, ArmTaskScores& arm) {
    score_recall(context, scorer, arm);
  };
  return run_task(runner, arms, progress);
}

}  // namespace oscar
