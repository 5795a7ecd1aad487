#include <immintrin.h>

#include "eval/logit_sums.h"

namespace oscar {
namespace {

// exp(x) for x <= 0; below -700 the result is about 1e-304. x = k ln 2 + r, |r| <= ln 2 / 2, Taylor
// polynomial of degree 10: relative error 2e-13.
__m256d exp_pd(__m256d x) {
  const __m256d magic = _mm256_set1_pd(0x1.8p52);  // adding it rounds to an integer in the low bits
  x = _mm256_max_pd(x, _mm256_set1_pd(-700.0));
  const __m256d shifted = _mm256_fmadd_pd(x, _mm256_set1_pd(1.4426950408889634), magic);
  const __m256d k = _mm256_sub_pd(shifted, magic);
  const __m256d r = _mm256_fnmadd_pd(k, _mm256_set1_pd(0.6931471805599453), x);
  __m256d y = _mm256_set1_pd(1.0 / 3628800);
  const double coefficients[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                                 1.0 / 24,     1.0 / 6,     1.0 / 2,    1.0,       1.0};
  for (const double c : coefficients) y = _mm256_fmadd_pd(y, r, _mm256_set1_pd(c));
  const __m256i exponent = _mm256_slli_epi64(_mm256_castpd_si256(shifted), 52);
  return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(y), exponent));
}

double sum_lanes(__m256d x) {
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, x);
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

}  // namespace

double logit_sums_avx2(const LogitRow& row, StudentSums* sums) {
  // Blocks small enough for the teacher's weights to stay in the first-level cache.
  constexpr size_t kBlock = 512;
  alignas(32) double weights[kBlock];
  const __m256d zero = _mm256_setzero_pd();
  const size_t whole = row.vocab / 4 * 4;
  double total = 0, poison = 0;
  for (size_t s = 0; s < row.num_students; ++s) sums[s] = {};
  for (size_t begin = 0; begin < whole; begin += kBlock) {
    const size_t count = whole - begin < kBlock ? whole - begin : kBlock;
    const __m256d teacher_max = _mm256_set1_pd(row.teacher_max);
    __m256d sum = zero, check = zero;
    for (size_t i = 0; i < count; i += 4) {
      const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(row.teacher + begin + i));
      const __m256d e = exp_pd(_mm256_sub_pd(x, teacher_max));
      _mm256_store_pd(weights + i, e);
      sum = _mm256_add_pd(sum, e);
      check = _mm256_fmadd_pd(x, zero, check);
    }
    total += sum_lanes(sum);
    poison += sum_lanes(check);
    for (size_t s = 0; s < row.num_students; ++s) {
      const float* student = row.students[s] + begin;
      const __m256d student_max = _mm256_set1_pd(row.student_max[s]);
      __m256d exps = zero, gaps = zero, poisoned = zero;
      for (size_t i = 0; i < count; i += 4) {
        const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(student + i));
        const __m256d t = _mm256_cvtps_pd(_mm_loadu_ps(row.teacher + begin + i));
        exps = _mm256_add_pd(exps, exp_pd(_mm256_sub_pd(x, student_max)));
        gaps = _mm256_fmadd_pd(_mm256_load_pd(weights + i), _mm256_sub_pd(t, x), gaps);
        poisoned = _mm256_fmadd_pd(x, zero, poisoned);
      }
      sums[s].sum_exp += sum_lanes(exps) + sum_lanes(poisoned);
      sums[s].weighted_gap += sum_lanes(gaps);
    }
  }
  if (whole < row.vocab) {
    // The last, shorter group: the scalar version on pointers moved to it.
    const float* tails[kMaxStudents];
    for (size_t s = 0; s < row.num_students; ++s) tails[s] = row.students[s] + whole;
    LogitRow tail = row;
    tail.teacher += whole;
    tail.students = tails;
    tail.vocab -= whole;
    StudentSums tail_sums[kMaxStudents];
    total += logit_sums_scalar(tail, tail_sums);
    for (size_t s = 0; s < row.num_students; ++s) {
      sums[s].sum_exp += tail_sums[s].sum_exp;
      sums[s].weighted_gap += tail_sums[s].weighted_gap;
    }
  }
  return total + poison;
}

}  // namespace oscar
