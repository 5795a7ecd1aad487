// Scores continuations of a shared prompt prefix under one cache arm: the prefix is run once, every
// question and every continuation works on a fork of its cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "model/kv_arm.h"
#include "model/kv_cache.h"
#include "model/transformer.h"

namespace oscar {

// One teacher-forced token: its log-probability (nats) after everything before it, and the most
// likely token there (lowest id on ties).
struct TokenScore {
  double log_prob = 0;
  int32_t top1 = -1;
};

struct CacheUse {
  double tokens_int2_written = 0;  // per layer
  double tokens_int2_read = 0;     // per layer, summed over the queries
  double tokens_high_precision = 0;
};

// What the tasks need of a model; tests put a table in its place.
class ContinuationScorer {
 public:
  virtual ~ContinuationScorer() = default;
  // Starts a prompt; forgets the previous one. prefix may be empty.
  virtual void set_prefix(std::span<const int32_t> prefix) = 0;
  // The prompt is prefix + tail (tail not empty). Returns one TokenScore for each token of each
  // continuation; the first continuation has one more, for the most likely token after it (with
  // that token's own log-probability).
  virtual std::vector<std::vector<TokenScore>> score(
      std::span<const int32_t> tail, const std::vector<std::vector<int32_t>>& continuations) = 0;
  // Greedy answer to prefix + tail, at most max_tokens; ends early when stop(tokens so far) is
  // true.
  virtual std::vector<int32_t> generate(
      std::span<const int32_t> tail, size_t max_tokens,
      const std::function<bool(std::span<const int32_t>)>& stop) = 0;
  // Of the current prefix and everything scored on it.
  virtual CacheUse cache_use() const = 0;
};

// Exact windows: results do not depend on how the work is cut. Serving windows: the prefix is one
// prefill chunk; tails and continuations count as decode steps.
class TransformerScorer final : public ContinuationScorer {
 public:
  // The transformer must outlive the scorer. max_call_tokens: of one forward call.
  TransformerScorer(Transformer& transformer, std::shared_ptr<const KvArm> arm,
                    size_t max_call_tokens = 2048);
  ~TransformerScorer() override;
  void set_prefix(std::span<const int32_t> prefix) override;
  std::vector<std::vector<TokenScore>> score(
      std::span<const int32_t> tail,
      const std::vector<std::vector<int32_t>>& continuations) override;
  std::vector<int32_t> generate(std::span<const int32_t> tail, size_t max_tokens,
                                const std::function<bool(std::span<const int32_t>)>& stop) override;
  CacheUse cache_use() const override { return use_; }

 private:
  // Appends tokens to a cache; returns the hidden states of the last `rows` of them.
  std::vector<float> append(KvCache& cache, std::span<const int32_t> tokens, size_t rows);
  // A fork of the prefix with the tokens appended; hidden gets the states of the last `rows`.
  KvCache answer_cache(std::span<const int32_t> tokens, size_t rows, std::vector<float>& hidden);
  void count(const KvCache& fork, double read_before);

  Transformer& transformer_;
  std::shared_ptr<const KvArm> arm_;
  size_t max_call_tokens_;
  std::unique_ptr<KvCache> prefix_;
  CacheUse use_;
};

// log softmax(logits)[id] of one row [vocab], in double. Throws Error on NaN, +inf, a row that is
// -inf everywhere, or an id outside the vocabulary.
double log_prob_of(const float* logits, size_t vocab, int32_t id);

}  // namespace oscar
