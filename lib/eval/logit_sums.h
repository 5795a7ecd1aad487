// Inner loops over one row of logits: exponential sums of a teacher and its students in one pass.
// Light header: it is included by files compiled for AVX2 and AVX-512.
#pragma once

#include <cstddef>

namespace oscar {

// One row of the teacher and the same row of `num_students` students.
struct LogitRow {
  const float* teacher = nullptr;          // [vocab]
  double teacher_max = 0;                  // its largest logit
  const float* const* students = nullptr;  // [num_students] pointers to [vocab]
  const double* student_max = nullptr;     // [num_students]
  size_t num_students = 0;
  size_t vocab = 0;
};

inline constexpr size_t kMaxStudents = 64;  // of one row

struct StudentSums {
  double sum_exp = 0;       // sum_i exp(student_i - student_max)
  double weighted_gap = 0;  // sum_i exp(teacher_i - teacher_max) * (teacher_i - student_i)
};

// Returns sum_i exp(teacher_i - teacher_max) and fills sums [num_students]. Everything is summed in
// double; exp has a relative error below 1e-12 in the SIMD versions. A result is not finite when a
// logit is infinite or NaN: the caller then takes its careful path.
using LogitSumsFunction = double (*)(const LogitRow& row, StudentSums* sums);

double logit_sums_scalar(const LogitRow& row, StudentSums* sums);
double logit_sums_avx2(const LogitRow& row, StudentSums* sums);
double logit_sums_avx512(const LogitRow& row, StudentSums* sums);

// The fastest version for this machine.
LogitSumsFunction logit_sums_function();

}  // namespace oscar
