// What one row of logits says about an arm: loss of the target, divergence from the reference, and
// agreement of the most likely tokens (evaluation.md 2.2 and 2.4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace oscar {

inline constexpr size_t kTopAgreement = 5;
inline constexpr size_t kTopBuckets = 50;  // the teacher's ids that KL50 keeps apart

struct RowScores {
  double nll = 0;          // nats; +inf when the target has probability 0
  double probability = 0;  // of the target
  double kl = 0;           // KL(reference || arm), full vocabulary, nats; may be +inf
  double kl_top = 0;       // the same over the teacher's top 50 and one bucket for the rest
  bool same_top1 = true;
  int top5_overlap = static_cast<int>(kTopAgreement);  // common ids of the two top 5
};

// The k largest of values [count], by (value descending, id ascending).
struct TopEntry {
  float value = 0;
  int32_t id = -1;
};
void top_k(const float* values, size_t count, size_t k, std::vector<TopEntry>& top);

// Scores one row: reference [vocab], arms: pointers to [vocab] each; scores [1 + arms.size()], the
// reference's own first (kl 0). Full softmax in double from float32 logits. Logits may be -inf.
// Throws Error on NaN or +inf (naming arm index and token id), on rows that are -inf everywhere, on
// a target outside the vocabulary.
void score_row(const float* reference, std::span<const float* const> arms, size_t vocab,
               int32_t target, RowScores* scores);

// KL over the teacher's `buckets` most likely ids and one bucket for all others, and full KL, of
// two probability vectors (the definition, in plain form; score_row computes the same from logits).
double full_kl(std::span<const double> p, std::span<const double> q);
double bucketed_kl(std::span<const double> p, std::span<const double> q, size_t buckets);

}  // namespace oscar
