// Sanity checks of calibration data: what would make a rotation meaningless is refused, what makes
// it weak is reported.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "calib/activation_source.h"
#include "calib/statistics.h"

namespace oscar {

inline constexpr size_t kFewTokens = 1000;  // below: a warning (formats.md 2)

// Refuses fewer tokens than head_dim (the covariance of one head would be singular); warns below
// max(kFewTokens, 8 x head_dim).
void check_token_count(size_t tokens, size_t head_dim, std::vector<std::string>& warnings);

// Refuses a source that has not all heads of the model (a tensor-parallel rank's share).
void check_head_coverage(const HeadGeometry& found, const HeadGeometry& expected,
                         const std::string& where);

// Refuses bit-identical heads: rows of `tensor` [num_tokens, heads, D] of one layer.
void check_duplicate_heads(size_t layer, const char* tensor, const float* rows, size_t num_tokens,
                           size_t heads, size_t head_dim);

// Number of leading sequences that are a warm-up (a serving engine's first request: at most 16
// tokens and under a tenth of the median length): 0 or 1.
size_t warm_up_sequences(const std::vector<size_t>& sequence_offsets);

// Warns when the rank is below the width.
void check_rank(size_t layer, const std::string& what, const std::vector<double>& eigenvalues,
                std::vector<std::string>& warnings);

}  // namespace oscar
