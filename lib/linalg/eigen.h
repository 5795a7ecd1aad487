// Eigen-decomposition of symmetric matrices with checked results and canonical signs.
#pragma once

#include <string>
#include <vector>

#include "base/tensor.h"

namespace oscar {

struct SymmetricEigen {
  std::vector<double> values;  // [D], ascending
  TensorD vectors;             // [D, D], eigenvectors in columns
};

// matrix [D, D] is symmetrised as (M + M^T) / 2 first. Throws Error with `what` when it is not
// square, not finite, or when the solver's result is not finite and orthogonal (max |U^T U - I| <=
// 1e-10). Rank-deficient matrices are legal. In every column the entry of largest magnitude (the
// first one on ties) is made positive (formats.md 1).
SymmetricEigen eigen_symmetric(const TensorD& matrix, const std::string& what);

// The sign rule alone, on columns.
void canonicalise_signs(TensorD& columns);

// Number of eigenvalues above `tolerance` x the largest one.
size_t numerical_rank(const std::vector<double>& eigenvalues, double tolerance = 1e-12);

// R^T M R [D, D] for M [D, D] symmetric and R [D, D].
TensorD congruence(const TensorD& matrix, const float* rotation);

// Lower triangular C with M = C C^T. Throws Error with `what` when M is not finite or not positive
// definite.
TensorD cholesky(const TensorD& matrix, const std::string& what);

}  // namespace oscar
