#include "eval/task_prompt.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"

namespace oscar {
namespace {

constexpr size_t kMinWordLength = 4, kMaxWordLength = 9;

bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
// Anything that makes a run of letters no plain word: other letters (also bytes of non-ASCII
// characters), digits, apostrophes, hyphens.
bool joins_word(char c) {
  return is_lower(c) || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '\'' || c == '-' ||
         c == '_' || static_cast<unsigned char>(c) >= 0x80;
}

size_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  const size_t limit = std::min(a.size(), b.size());
  size_t length = 0;
  while (length < limit && a[length] == b[length]) ++length;
  return length;
}

// Ids of `continuation` as the tokenizer writes them after the prompt; on its own where the two
// cannot be told apart by tokens.
std::vector<int32_t> continuation_ids(const Tokenizer& tokenizer, const std::string& prompt,
                                      const std::vector<int32_t>& prompt_ids,
                                      const std::string& continuation) {
  std::vector<int32_t> ids = encode_prompt(tokenizer, prompt + continuation);
  if (ids.size() > prompt_ids.size() && common_prefix(ids, prompt_ids) == prompt_ids.size()) {
    ids.erase(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(prompt_ids.size()));
    return ids;
  }
  return tokenizer.encode(continuation, false);
}

}  // namespace

std::vector<std::string> frequent_words(std::string_view text, size_t count) {
  std::unordered_map<std::string, size_t> occurrences;
  for (size_t begin = 0; begin < text.size();) {
    if (!joins_word(text[begin])) {
      ++begin;
      continue;
    }
    size_t end = begin;
    bool plain = true;
    for (; end < text.size() && joins_word(text[end]); ++end) plain = plain && is_lower(text[end]);
    const size_t length = end - begin;
    if (plain && length >= kMinWordLength && length <= kMaxWordLength) {
      ++occurrences[std::string(text.substr(begin, length))];
    }
    begin = end;
  }
  std::vector<std::pair<std::string, size_t>> ranked(occurrences.begin(), occurrences.end());
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  std::vector<std::string> words;
  for (size_t i = 0; i < std::min(count, ranked.size()); ++i) words.push_back(ranked[i].first);
  return words;
}

WindowSpec widest_windows(const std::vector<std::shared_ptr<const KvArm>>& arms) {
  WindowSpec widest;
  widest.sink = widest.recent = 0;
  for (const auto& arm : arms) {
    if (!arm->quantized) continue;
    widest.sink = std::max(widest.sink, arm->windows.sink);
    widest.recent = std::max(widest.recent, arm->windows.recent);
  }
  return widest;
}

std::string chat_prompt(const Tokenizer& tokenizer, const std::string& message,
                        const std::string& template_name) {
  ChatOptions options;
  options.template_name = template_name;
  options.thinking = false;
  return render_chat(tokenizer, {{"user", message}}, options);
}

std::vector<TokenSpan> token_spans(const Tokenizer& tokenizer, std::string_view text,
                                   const std::vector<std::pair<size_t, size_t>>& ranges) {
  std::vector<int32_t> ids;
  const auto tokens = tokenizer.offsets(text, true, &ids);
  const size_t bos = encode_prompt(tokenizer, text).size() - ids.size();
  std::vector<TokenSpan> spans;
  size_t first = 0;
  for (const auto& [begin, end] : ranges) {
    while (first < tokens.size() && tokens[first].second <= begin) ++first;
    size_t last = first;
    while (last < tokens.size() && tokens[last].first < end) ++last;
    spans.push_back({first + bos, last + bos, ids.size() + bos});
  }
  return spans;
}

TokenSpan token_span(const Tokenizer& tokenizer, std::string_view text, size_t begin, size_t end) {
  return token_spans(tokenizer, text, {{begin, end}})[0];
}

bool in_quantized(const WindowSpec& widest, size_t fact_begin, size_t fact_end,
                  size_t prompt_tokens) {
  return fact_begin >= widest.sink && fact_end + widest.recent + kFlushTokens <= prompt_tokens;
}

TaskContext make_context(const Tokenizer& tokenizer, const std::vector<PromptText>& prompts) {
  TaskContext context;
  std::vector<std::vector<int32_t>> ids;
  for (const PromptText& prompt : prompts) ids.push_back(encode_prompt(tokenizer, prompt.text));
  size_t shared = ids.empty() ? 0 : ids[0].size();
  for (const std::vector<int32_t>& prompt : ids) {
    OSCAR_CHECK(!prompt.empty(), "a prompt has no tokens");
    shared = std::min({shared, common_prefix(ids[0], prompt), prompt.size() - 1});
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    TaskQuestion question;
    const auto split = ids[i].begin() + static_cast<std::ptrdiff_t>(shared);
    question.tail.assign(split, ids[i].end());
    for (const std::string& text : prompts[i].continuations) {
      question.continuations.push_back(continuation_ids(tokenizer, prompts[i].text, ids[i], text));
    }
    const TokenSpan span =
        token_span(tokenizer, prompts[i].text, prompts[i].fact_begin, prompts[i].fact_end);
    question.fact_begin = span.begin;
    question.fact_end = span.end;
    question.prompt_tokens = ids[i].size();
    context.questions.push_back(std::move(question));
  }
  if (!ids.empty()) {
    context.prefix.assign(ids[0].begin(), ids[0].begin() + static_cast<std::ptrdiff_t>(shared));
  }
  return context;
}

const std::vector<double>& ArmTaskScores::values(const std::string& metric) const {
  for (const auto& [name, numbers] : metrics) {
    if (name == metric) return numbers;
  }
  fail("arm ", arm, " has no metric ", metric);
}

std::vector<double>& ArmTaskScores::values(const std::string& metric) {
  for (auto& [name, numbers] : metrics) {
    if (name == metric) return numbers;
  }
  return metrics.emplace_back(metric, std::vector<double>()).second;
}

}  // namespace oscar
