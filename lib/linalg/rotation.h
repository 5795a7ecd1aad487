// Rotations: Hadamard matrices, bit-reversal permutation and the compositions of formats.md 1.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "linalg/eigen.h"

namespace oscar {

// What to do with a width that is not a power of two.
enum class HadamardForm {
  kFull,   // Sylvester matrix of the whole width; refuses other widths
  kBlock,  // I (x) H_b, b = largest power of two that divides the width
};

// Normalised Sylvester Hadamard matrix [D, D], symmetric and orthogonal. Throws Error naming the
// width when the form does not exist.
TensorD hadamard_matrix(size_t dim, HadamardForm form = HadamardForm::kFull);

// perm[j] = D - 1 - bitrev(j): column j of M P is column perm[j] of M (eigenvalues ascending).
// D must be a power of two.
std::vector<size_t> bit_reversal_permutation(size_t dim);

// U eigenvectors ascending, H Hadamard, P bit reversal.
enum class Composition {
  kRHPbr,   // r_h_pbr  = U H P, the default
  kPlain,   // plain    = U
  kPbr,     // pbr      = P
  kBr,      // br       = U P
  kBrH128,  // br_h128  = U P H
  kRH,      // r_h      = U H
  kHPbr,    // h_pbr    = H P
  kHRPbr,   // h_r_pbr  = H U P
  kHPbrR,   // h_pbr_r  = H P U
};

const char* composition_name(Composition composition);
Composition parse_composition(const std::string& name);  // throws Error listing the names
std::vector<std::string> composition_names();

// The rotation [D, D] for row vectors (x' = x R). signs [D] of +-1 multiply the columns of U first
// (U D H P); empty = none. With HadamardForm::kBlock and a width that is not a power of two P is
// the identity: no bit reversal exists, and inside one quantization group it changes nothing.
TensorD compose_rotation(Composition composition, const TensorD& eigenvectors,
                         HadamardForm form = HadamardForm::kFull,
                         const std::vector<int8_t>& signs = {});

// max |R R^T - I|.
double orthogonality_error(const TensorD& rotation);

// a [m, k] b [k, n], and the conversion to the stored type.
TensorD matrix_product(const TensorD& a, const TensorD& b);
std::vector<float> to_float(const TensorD& matrix);

}  // namespace oscar
