// Quantization error on tokens that took no part in the calibration, with candidate rotations.
#pragma once

#include <cstddef>
#include <vector>

#include "calib/activation_rows.h"
#include "quant/codec.h"

namespace oscar {

inline constexpr size_t kErrorBlockTokens = 64;  // tokens of one block, the unit of error bars

// Keys and values of evenly spaced blocks of held-out tokens of one layer.
struct HeldOutSample {
  size_t num_tokens = 0;    // a multiple of kErrorBlockTokens unless the range is shorter
  std::vector<float> k, v;  // [num_tokens, Hkv, D]
  size_t num_blocks() const { return (num_tokens + kErrorBlockTokens - 1) / kErrorBlockTokens; }
};
// At most max_tokens (rounded up to whole blocks) of tokens [begin, end).
HeldOutSample sample_held_out(const ActivationRows& rows, const HeadGeometry& geometry,
                              size_t layer, size_t begin, size_t end, size_t max_tokens);

// One way to store one side: x' = (x - mean) R, then the codec.
struct StorageTrial {
  const TensorF* rotation = nullptr;  // [1 or Hkv, D, D]; null = identity
  const TensorF* mean = nullptr;      // [Hkv, D]; null = not centered
  CodecSpec codec;                    // head_dim is filled in
};

// How the error e = x^ - x of a row of one head is weighed: e C e^T (keys, C = C_Q of the head) or
// w |e|^2 (values, w the token's weight). One of the two is given.
struct ErrorWeights {
  const std::vector<TensorD>* matrices = nullptr;            // [Hkv] of [D, D]
  const std::vector<std::vector<double>>* tokens = nullptr;  // [Hkv] of [num_tokens]
};

// Sums of weighted errors [Hkv, num_blocks]; x [num_tokens, Hkv, D].
TensorD storage_error(const std::vector<float>& x, size_t num_tokens, const HeadGeometry& geometry,
                      const StorageTrial& trial, const ErrorWeights& weights);
// Sums of the weighted rows themselves per head [Hkv]; `centered`: about the mean of the rows.
std::vector<double> row_energy(const std::vector<float>& x, size_t num_tokens,
                               const HeadGeometry& geometry, bool centered,
                               const ErrorWeights& weights);

// Errors relative to the energy, mean over heads, and the paired difference of two of them.
struct RelativeError {
  double value = 0.0;
  std::vector<double> per_head;  // [Hkv]
};
RelativeError relative_error(const TensorD& errors, const std::vector<double>& energy);
struct PairedDifference {
  double value = 0.0;           // relative_error(a) - relative_error(b)
  double standard_error = 0.0;  // over blocks of kErrorBlockTokens tokens; 0 for a single block
};
PairedDifference paired_difference(const TensorD& a, const TensorD& b,
                                   const std::vector<double>& energy);

}  // namespace oscar
