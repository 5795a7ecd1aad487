#include "eval/logit_sums.h"

#include <cmath>

#include "base/cpu.h"

namespace oscar {

double logit_sums_scalar(const LogitRow& row, StudentSums* sums) {
  double total = 0, poison = 0;
  for (size_t s = 0; s < row.num_students; ++s) sums[s] = {};
  for (size_t i = 0; i < row.vocab; ++i) {
    const double teacher = static_cast<double>(row.teacher[i]);
    const double weight = std::exp(teacher - row.teacher_max);
    total += weight;
    poison += teacher * 0.0;
    for (size_t s = 0; s < row.num_students; ++s) {
      const double student = static_cast<double>(row.students[s][i]);
      sums[s].sum_exp += std::exp(student - row.student_max[s]) + student * 0.0;
      sums[s].weighted_gap += weight * (teacher - student);
    }
  }
  return total + poison;
}

LogitSumsFunction logit_sums_function() {
  if (cpu_features().avx512) return logit_sums_avx512;
  if (cpu_features().avx2) return logit_sums_avx2;
  return logit_sums_scalar;
}

}  // namespace oscar
