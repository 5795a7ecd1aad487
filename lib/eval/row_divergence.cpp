#include "eval/row_divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "eval/logit_sums.h"

namespace oscar {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSmallestRest = 1e-12;  // floor of the probability outside the buckets

double divergence_term(double p, double q) {
  if (p <= 0) return 0;
  return q > 0 ? p * std::log(p / q) : kInfinity;
}

// Row number 0 = reference, s + 1 = arm s.
[[noreturn]] void refuse_logit(size_t row, size_t id, float value) {
  fail("logits of ", row == 0 ? std::string("the reference arm") : cat("arm ", row - 1),
       ": token id ", id, " has the value ", value, ", expected a finite number or -inf");
}

double careful_log_sum_exp(const float* logits, size_t vocab, double max, size_t row) {
  double sum = 0;
  for (size_t i = 0; i < vocab; ++i) {
    if (std::isnan(logits[i]) || logits[i] == std::numeric_limits<float>::infinity()) {
      refuse_logit(row, i, logits[i]);
    }
    sum += std::exp(static_cast<double>(logits[i]) - max);
  }
  return max + std::log(sum);
}

// Any mixture of finite logits and -inf.
double careful_kl(const float* teacher, double teacher_lse, const float* student,
                  double student_lse, size_t vocab) {
  double kl = 0;
  for (size_t i = 0; i < vocab; ++i) {
    const double log_p = static_cast<double>(teacher[i]) - teacher_lse;
    const double p = std::exp(log_p);
    if (p <= 0) continue;
    if (std::isinf(student[i])) return kInfinity;
    kl += p * (log_p - (static_cast<double>(student[i]) - student_lse));
  }
  return std::max(0.0, kl);
}

double kl_of_top(const std::vector<TopEntry>& top, const float* teacher, double teacher_lse,
                 const float* student, double student_lse) {
  double kl = 0, rest_p = 1, rest_q = 1;
  for (const TopEntry& entry : top) {
    const size_t id = static_cast<size_t>(entry.id);
    const double p = std::exp(static_cast<double>(teacher[id]) - teacher_lse);
    const double q = std::exp(static_cast<double>(student[id]) - student_lse);
    rest_p -= p;
    rest_q -= q;
    kl += divergence_term(p, q);
  }
  rest_p = std::max(rest_p, kSmallestRest);
  rest_q = std::max(rest_q, kSmallestRest);
  return std::max(0.0, kl + divergence_term(rest_p, rest_q));
}

int overlap(std::span<const TopEntry> a, std::span<const TopEntry> b) {
  int common = 0;
  for (const TopEntry& x : a) {
    for (const TopEntry& y : b) common += x.id == y.id ? 1 : 0;
  }
  return common;
}

void score_target(const float* logits, double lse, int32_t target, RowScores& scores) {
  const double log_p = static_cast<double>(logits[static_cast<size_t>(target)]) - lse;
  scores.nll = -log_p;
  scores.probability = std::exp(log_p);
}

struct Scratch {
  std::vector<TopEntry> teacher_top;
  std::vector<std::vector<TopEntry>> student_top;
  std::vector<double> student_max;
  std::vector<StudentSums> sums;
};

}  // namespace

void top_k(const float* values, size_t count, size_t k, std::vector<TopEntry>& top) {
  top.clear();
  float threshold = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < count; ++i) {
    const float value = values[i];
    if (top.size() == k && !(value > threshold)) continue;
    if (std::isnan(value)) continue;
    size_t place = top.size();
    while (place > 0 && top[place - 1].value < value) --place;
    if (top.size() == k) top.pop_back();
    top.insert(top.begin() + static_cast<ptrdiff_t>(place), {value, static_cast<int32_t>(i)});
    threshold = top.back().value;
  }
}

void score_row(const float* reference, std::span<const float* const> arms, size_t vocab,
               int32_t target, RowScores* scores) {
  OSCAR_CHECK(target >= 0 && static_cast<size_t>(target) < vocab, "scoring: target token ", target,
              " is outside the vocabulary of ", vocab);
  OSCAR_CHECK(arms.size() <= kMaxStudents, "scoring: at most ", kMaxStudents, " arms, got ",
              arms.size());
  static thread_local Scratch scratch;
  scratch.student_top.resize(arms.size());
  scratch.student_max.resize(arms.size());
  scratch.sums.resize(arms.size());
  const auto largest = [](const std::vector<TopEntry>& top, size_t row) {
    OSCAR_CHECK(!top.empty() && !std::isinf(top[0].value), "logits of ",
                row == 0 ? std::string("the reference arm") : cat("arm ", row - 1),
                ": the largest is not finite");
    return static_cast<double>(top[0].value);
  };
  top_k(reference, vocab, kTopBuckets, scratch.teacher_top);
  const double teacher_max = largest(scratch.teacher_top, 0);
  for (size_t s = 0; s < arms.size(); ++s) {
    top_k(arms[s], vocab, kTopAgreement, scratch.student_top[s]);
    scratch.student_max[s] = largest(scratch.student_top[s], s + 1);
  }
  static const LogitSumsFunction logit_sums = logit_sums_function();
  const double teacher_sum = logit_sums({.teacher = reference,
                                         .teacher_max = teacher_max,
                                         .students = arms.data(),
                                         .student_max = scratch.student_max.data(),
                                         .num_students = arms.size(),
                                         .vocab = vocab},
                                        scratch.sums.data());
  const bool teacher_finite = std::isfinite(teacher_sum);
  const double teacher_lse = teacher_finite ? teacher_max + std::log(teacher_sum)
                                            : careful_log_sum_exp(reference, vocab, teacher_max, 0);
  const std::span<const TopEntry> teacher_top5(scratch.teacher_top.data(),
                                               std::min(kTopAgreement, scratch.teacher_top.size()));
  scores[0] = RowScores{};
  scores[0].top5_overlap = static_cast<int>(teacher_top5.size());
  score_target(reference, teacher_lse, target, scores[0]);
  for (size_t s = 0; s < arms.size(); ++s) {
    const StudentSums& sums = scratch.sums[s];
    RowScores& row = scores[s + 1];
    double student_lse = 0;
    if (teacher_finite && std::isfinite(sums.sum_exp) && std::isfinite(sums.weighted_gap)) {
      student_lse = scratch.student_max[s] + std::log(sums.sum_exp);
      // sum_i p_i (t_i - s_i) - lse_t + lse_s; rounding residue is clamped.
      row.kl = std::max(0.0, sums.weighted_gap / teacher_sum - teacher_lse + student_lse);
    } else {
      student_lse = careful_log_sum_exp(arms[s], vocab, scratch.student_max[s], s + 1);
      row.kl = careful_kl(reference, teacher_lse, arms[s], student_lse, vocab);
    }
    row.kl_top = kl_of_top(scratch.teacher_top, reference, teacher_lse, arms[s], student_lse);
    row.same_top1 = scratch.student_top[s][0].id == teacher_top5[0].id;
    row.top5_overlap = overlap(teacher_top5, scratch.student_top[s]);
    score_target(arms[s], student_lse, target, row);
  }
}

double full_kl(std::span<const double> p, std::span<const double> q) {
  OSCAR_CHECK(p.size() == q.size(), "KL: ", p.size(), " and ", q.size(), " probabilities");
  double kl = 0;
  for (size_t i = 0; i < p.size(); ++i) kl += divergence_term(p[i], q[i]);
  return std::max(0.0, kl);
}

double bucketed_kl(std::span<const double> p, std::span<const double> q, size_t buckets) {
  OSCAR_CHECK(p.size() == q.size(), "KL: ", p.size(), " and ", q.size(), " probabilities");
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
  double kl = 0, rest_p = 1, rest_q = 1;
  for (size_t i = 0; i < std::min(buckets, order.size()); ++i) {
    rest_p -= p[order[i]];
    rest_q -= q[order[i]];
    kl += divergence_term(p[order[i]], q[order[i]]);
  }
  return std::max(
      0.0, kl + divergence_term(std::max(rest_p, kSmallestRest), std::max(rest_q, kSmallestRest)));
}

}  // namespace oscar
