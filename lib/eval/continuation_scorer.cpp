#include "eval/continuation_scorer.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/parallel.h"
#include "eval/logit_sums.h"
#include "model/sampler.h"

namespace oscar {
namespace {

constexpr size_t kLogitRows = 64;  // rows of one product with the output matrix

// log of the sum of exp over the row.
double log_sum_exp(const float* logits, size_t vocab) {
  static const LogitSumsFunction sums = logit_sums_function();
  const double largest = static_cast<double>(*std::max_element(logits, logits + vocab));
  LogitRow row;
  row.teacher = logits;
  row.teacher_max = largest;
  row.vocab = vocab;
  double total = sums(row, nullptr);
  if (!std::isfinite(total)) {  // infinite logits: term by term
    OSCAR_CHECK(std::isfinite(largest), "logits are not finite (largest ", largest, ")");
    total = 0;
    for (size_t i = 0; i < vocab; ++i) {
      OSCAR_CHECK(!std::isnan(logits[i]), "logit of token ", i, " is NaN");
      total += std::exp(static_cast<double>(logits[i]) - largest);
    }
  }
  return largest + std::log(total);
}

// Rows of logits of hidden states [rows, hidden], a block at a time, to visit(row, logits).
void visit_logits(Transformer& transformer, const float* hidden, size_t rows,
                  const std::function<void(size_t row, const float* logits)>& visit) {
  const size_t vocab = transformer.config().vocab_size;
  const size_t width = transformer.config().hidden_size;
  std::vector<float> logits(std::min(rows, kLogitRows) * vocab);
  for (size_t first = 0; first < rows; first += kLogitRows) {
    const size_t count = std::min(kLogitRows, rows - first);
    transformer.logits(hidden + first * width, count, logits.data());
    parallel_for(count, [&](size_t i) { visit(first + i, logits.data() + i * vocab); });
  }
}

}  // namespace

double log_prob_of(const float* logits, size_t vocab, int32_t id) {
  OSCAR_CHECK(id >= 0 && static_cast<size_t>(id) < vocab, "token ", id,
              " is outside the vocabulary of ", vocab);
  return static_cast<double>(logits[id]) - log_sum_exp(logits, vocab);
}

TransformerScorer::TransformerScorer(Transformer& transformer, std::shared_ptr<const KvArm> arm,
                                     size_t max_call_tokens)
    : transformer_(transformer), arm_(std::move(arm)), max_call_tokens_(max_call_tokens) {
  OSCAR_CHECK(max_call_tokens_ > 0, "tokens of one forward call: expected at least 1");
}

TransformerScorer::~TransformerScorer() = default;

std::vector<float> TransformerScorer::append(KvCache& cache, std::span<const int32_t> tokens,
                                             size_t rows) {
  // A serving prefill is one chunk by definition; exact windows may be cut anywhere.
  const bool whole = arm_->windows.mode == WindowMode::kServing;
  const size_t step = whole ? std::max<size_t>(tokens.size(), 1) : max_call_tokens_;
  const size_t width = transformer_.config().hidden_size;
  const size_t first_row = tokens.size() - std::min(rows, tokens.size());
  std::vector<float> wanted;
  for (size_t first = 0; first < tokens.size(); first += step) {
    const SequenceChunk chunk{tokens.subspan(first, std::min(step, tokens.size() - first)), &cache};
    const std::vector<float> hidden = transformer_.forward({&chunk, 1});
    const size_t skip = first_row > first ? std::min(first_row - first, chunk.tokens.size()) : 0;
    wanted.insert(wanted.end(), hidden.begin() + static_cast<std::ptrdiff_t>(skip * width),
                  hidden.end());
  }
  return wanted;
}

void TransformerScorer::set_prefix(std::span<const int32_t> prefix) {
  prefix_ = std::make_unique<KvCache>(transformer_.config(), arm_);
  append(*prefix_, prefix, 0);
  const CacheCounters counters = prefix_->counters();
  use_.tokens_int2_written = static_cast<double>(counters.tokens_int2_written);
  use_.tokens_int2_read = static_cast<double>(counters.tokens_int2_read);
  use_.tokens_high_precision = static_cast<double>(counters.tokens_high_precision);
}

KvCache TransformerScorer::answer_cache(std::span<const int32_t> tokens, size_t rows,
                                        std::vector<float>& hidden) {
  OSCAR_CHECK(prefix_ != nullptr, "continuations are scored before a prefix was set");
  KvCache cache = prefix_->fork();
  if (arm_->windows.mode == WindowMode::kServing) cache.set_append_as_decode(true);
  hidden = append(cache, tokens, rows);
  count(cache, static_cast<double>(prefix_->counters().tokens_int2_read));
  return cache;
}

void TransformerScorer::count(const KvCache& fork, double read_before) {
  use_.tokens_int2_read += static_cast<double>(fork.counters().tokens_int2_read) - read_before;
}

std::vector<std::vector<TokenScore>> TransformerScorer::score(
    std::span<const int32_t> tail, const std::vector<std::vector<int32_t>>& continuations) {
  OSCAR_CHECK(!tail.empty(), "the prompt after the shared prefix is empty");
  if (continuations.empty()) return {};
  // What all continuations begin with is run once, together with the tail.
  size_t common = continuations[0].size();
  for (const std::vector<int32_t>& tokens : continuations) {
    const auto [left, right] =
        std::mismatch(tokens.begin(), tokens.end(), continuations[0].begin(),
                      continuations[0].begin() + static_cast<std::ptrdiff_t>(common));
    common = static_cast<size_t>(left - tokens.begin());
  }
  std::vector<int32_t> base_tokens(tail.begin(), tail.end());
  base_tokens.insert(base_tokens.end(), continuations[0].begin(),
                     continuations[0].begin() + static_cast<std::ptrdiff_t>(common));
  std::vector<float> base_hidden;
  const KvCache base = answer_cache(base_tokens, common + 1, base_hidden);
  const double read_before = static_cast<double>(base.counters().tokens_int2_read);

  const size_t vocab = transformer_.config().vocab_size;
  std::vector<std::vector<TokenScore>> scores(continuations.size());
  for (size_t i = 0; i < scores.size(); ++i) scores[i].resize(continuations[i].size() + (i == 0));
  // The row after `position` tokens of a continuation.
  const auto fill = [&](size_t continuation, size_t position, const float* logits) {
    if (position >= scores[continuation].size()) return;
    const std::vector<int32_t>& tokens = continuations[continuation];
    TokenScore& score = scores[continuation][position];
    score.top1 = argmax_token(logits, vocab);
    score.log_prob =
        log_prob_of(logits, vocab, position < tokens.size() ? tokens[position] : score.top1);
  };
  visit_logits(transformer_, base_hidden.data(), common + 1, [&](size_t row, const float* logits) {
    for (size_t i = 0; i < continuations.size(); ++i) fill(i, row, logits);
  });

  // The rest in batches of forks, so that the weights are read once for many continuations.
  std::vector<KvCache> forks;
  std::vector<SequenceChunk> chunks;
  std::vector<std::pair<size_t, size_t>> rows;  // continuation, position
  forks.reserve(continuations.size());
  const auto run = [&] {
    if (chunks.empty()) return;
    const std::vector<float> hidden = transformer_.forward(chunks);
    visit_logits(transformer_, hidden.data(), rows.size(), [&](size_t row, const float* logits) {
      fill(rows[row].first, rows[row].second, logits);
    });
    for (const KvCache& fork : forks) count(fork, read_before);
    forks.clear();
    chunks.clear();
    rows.clear();
  };
  for (size_t i = 0; i < continuations.size(); ++i) {
    // The last token is run only where the row after it is wanted.
    const size_t end = scores[i].size() - 1;
    if (continuations[i].empty() || end <= common) continue;
    if (!chunks.empty() && rows.size() + end - common > max_call_tokens_) run();
    const auto tokens = std::span<const int32_t>(continuations[i]).subspan(common, end - common);
    chunks.push_back({tokens, &forks.emplace_back(base.fork())});
    for (size_t position = common + 1; position <= end; ++position) rows.emplace_back(i, position);
  }
  run();
  return scores;
}

std::vector<int32_t> TransformerScorer::generate(
    std::span<const int32_t> tail, size_t max_tokens,
    const std::function<bool(std::span<const int32_t>)>& stop) {
  OSCAR_CHECK(!tail.empty(), "the prompt after the shared prefix is empty");
  std::vector<float> hidden;
  KvCache cache = answer_cache(tail, 1, hidden);
  const double read_before = static_cast<double>(cache.counters().tokens_int2_read);
  const size_t vocab = transformer_.config().vocab_size;
  std::vector<int32_t> answer;
  while (answer.size() < max_tokens) {
    int32_t next = -1;
    visit_logits(transformer_, hidden.data(), 1,
                 [&](size_t, const float* logits) { next = argmax_token(logits, vocab); });
    answer.push_back(next);
    if (stop && stop(answer)) break;
    if (answer.size() < max_tokens) hidden = append(cache, {&answer.back(), 1}, 1);
  }
  count(cache, read_before);
  return answer;
}

}  // namespace oscar
