#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "base/cpu.h"
#include "base/error.h"
#include "base/random.h"
#include "eval/logit_sums.h"
#include "eval/row_divergence.h"

namespace {

using namespace oscar;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

std::vector<float> random_logits(size_t count, uint64_t seed, double scale) {
  Random random(seed);
  std::vector<float> logits(count);
  for (float& value : logits) value = static_cast<float>(scale * random.normal() - 5.0);
  return logits;
}

std::vector<double> softmax(const std::vector<float>& logits) {
  double max = -1e300, sum = 0;
  for (const float value : logits) max = std::max(max, static_cast<double>(value));
  std::vector<double> p;
  for (const float value : logits) p.push_back(std::exp(static_cast<double>(value) - max));
  for (const double value : p) sum += value;
  for (double& value : p) value /= sum;
  return p;
}

std::vector<RowScores> score(const std::vector<float>& reference,
                             const std::vector<std::vector<float>>& arms, int32_t target = 0) {
  std::vector<const float*> pointers;
  for (const auto& arm : arms) pointers.push_back(arm.data());
  std::vector<RowScores> scores(1 + arms.size());
  score_row(reference.data(), pointers, reference.size(), target, scores.data());
  return scores;
}

std::vector<float> logs(const std::vector<double>& p) {
  std::vector<float> logits;
  for (const double value : p) logits.push_back(static_cast<float>(std::log(value)));
  return logits;
}

}  // namespace

TEST_CASE("vector of the protocol: full and bucketed divergence") {
  const std::vector<double> p{.6, .25, .1, .05}, q{.5, .2, .25, .05};
  CHECK(full_kl(p, q) == Approx(0.0735497).margin(5e-8));
  CHECK(bucketed_kl(p, q, 2) == Approx(0.0612067).margin(5e-8));
  CHECK(score(logs(p), {logs(q)})[1].kl == Approx(0.0735497).margin(2e-7));
  CHECK_THROWS_AS(full_kl(p, std::vector<double>{1.0}), Error);
}

TEST_CASE("an arm compared with itself has no divergence and full agreement") {
  for (const size_t vocab : {7, 1003, 49152}) {
    const auto logits = random_logits(vocab, vocab, 4.0);
    const auto scores = score(logits, {logits}, 3);
    CHECK(scores[1].kl <= 1e-12);
    CHECK(scores[1].kl_top <= 1e-12);
    CHECK(scores[1].same_top1);
    CHECK(scores[1].top5_overlap == 5);
    CHECK(scores[1].nll == Approx(scores[0].nll).epsilon(1e-14));
  }
}

TEST_CASE("scores from logits agree with the definition") {
  // Vocabulary sizes around the vector width, shifts of the logits, near and far students.
  for (const size_t vocab : {5, 60, 515, 4099, 151936}) {
    const auto teacher = random_logits(vocab, 1, 5.0);
    auto near = teacher, shifted = teacher;
    Random random(2);
    for (float& value : near) value += static_cast<float>(0.05 * random.normal());
    for (float& value : shifted) value += 64.0F;  // exact in float32 up to rounding of the sum
    const auto far = random_logits(vocab, 3, 9.0);
    const int32_t target = static_cast<int32_t>(vocab / 2);
    const auto scores = score(teacher, {near, far, shifted}, target);
    const auto p = softmax(teacher);
    const std::vector<std::vector<float>> students{near, far, shifted};
    CHECK(scores[0].nll == Approx(-std::log(p[vocab / 2])).epsilon(1e-11));
    for (size_t s = 0; s < 3; ++s) {
      const auto q = softmax(students[s]);
      CHECK(scores[s + 1].kl == Approx(full_kl(p, q)).epsilon(1e-9).margin(1e-11));
      CHECK(scores[s + 1].kl_top == Approx(bucketed_kl(p, q, 50)).epsilon(1e-9).margin(1e-11));
      CHECK(scores[s + 1].kl_top <= scores[s + 1].kl + 1e-11);
      CHECK(scores[s + 1].nll == Approx(-std::log(q[vocab / 2])).epsilon(1e-11));
      CHECK(scores[s + 1].probability == Approx(q[vocab / 2]).epsilon(1e-10));
    }
  }
}

TEST_CASE("every instruction set gives the scalar sums") {
  const size_t vocab = 2051;
  const auto teacher = random_logits(vocab, 5, 6.0), student = random_logits(vocab, 6, 200.0);
  const float* students[] = {student.data()};
  double teacher_max = -1e30, student_max = -1e30;
  for (size_t i = 0; i < vocab; ++i) {
    teacher_max = std::max(teacher_max, static_cast<double>(teacher[i]));
    student_max = std::max(student_max, static_cast<double>(student[i]));
  }
  const LogitRow row{teacher.data(), teacher_max, students, &student_max, 1, vocab};
  StudentSums expected, actual;
  const double total = logit_sums_scalar(row, &expected);
  const auto check = [&](LogitSumsFunction function) {
    CHECK(function(row, &actual) == Approx(total).epsilon(1e-12));
    CHECK(actual.sum_exp == Approx(expected.sum_exp).epsilon(1e-12));
    CHECK(actual.weighted_gap == Approx(expected.weighted_gap).epsilon(1e-11));
  };
  if (cpu_features().avx2) check(logit_sums_avx2);
  if (cpu_features().avx512) check(logit_sums_avx512);
}

TEST_CASE("logits of minus infinity") {
  auto teacher = random_logits(700, 8, 3.0);
  auto student = random_logits(700, 9, 3.0);
  SECTION("in both: the term is 0") {
    teacher[30] = student[30] = kMinusInfinity;
    const auto scores = score(teacher, {student});
    CHECK(scores[1].kl == Approx(full_kl(softmax(teacher), softmax(student))).epsilon(1e-10));
  }
  SECTION("only in the teacher: the term is 0") {
    teacher[31] = kMinusInfinity;
    const auto scores = score(teacher, {student});
    CHECK(std::isfinite(scores[1].kl));
    CHECK(scores[1].kl == Approx(full_kl(softmax(teacher), softmax(student))).epsilon(1e-10));
  }
  SECTION("only in the student: infinite; other arms are not touched") {
    const auto clean = student;
    student[699] = kMinusInfinity;
    const auto scores = score(teacher, {student, clean}, 699);
    CHECK(std::isinf(scores[1].kl));
    CHECK(std::isinf(scores[1].nll));
    CHECK(scores[1].probability == 0);
    CHECK(scores[2].kl == Approx(full_kl(softmax(teacher), softmax(clean))).epsilon(1e-10));
  }
}

TEST_CASE("impossible logits and targets are refused") {
  const auto good = random_logits(100, 8, 3.0);
  for (const float value : {std::nanf(""), -kMinusInfinity}) {
    auto bad = good;
    bad[57] = value;
    CHECK_THROWS_AS(score(good, {bad}), Error);
    CHECK_THROWS_AS(score(bad, {good}), Error);
  }
  CHECK_THROWS_AS(score(good, {std::vector<float>(100, kMinusInfinity)}), Error);
  CHECK_THROWS_AS(score(good, {good}, 100), Error);
  CHECK_THROWS_AS(score(good, {good}, -1), Error);
}

TEST_CASE("top k: order, ties to the lower id, fewer values than k") {
  std::vector<TopEntry> top;
  const std::vector<float> values{1, 7, 3, 7, kMinusInfinity, 7, 2};
  top_k(values.data(), values.size(), 4, top);
  REQUIRE(top.size() == 4);
  CHECK(top[0].id == 1);
  CHECK(top[1].id == 3);
  CHECK(top[2].id == 5);
  CHECK(top[3].id == 2);
  top_k(values.data(), 2, 4, top);
  REQUIRE(top.size() == 2);
  CHECK(top[0].id == 1);
  const auto scores = score({0, 1, 2, 3, 4, 5, 6, 7}, {{7, 6, 5, 4, 3, 2, 1, 0}});
  CHECK_FALSE(scores[1].same_top1);
  CHECK(scores[1].top5_overlap == 2);  // {3..7} and {0..4}
}
