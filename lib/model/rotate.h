// Centering and rotating rows of one head: from the model's coordinates to the stored form and
// back.
#pragma once

#include <cstddef>

namespace oscar {

// out = (rows - mean) * rotation for `num_rows` rows of width `head_dim`.
//   rows      row_stride floats apart
//   mean      [head_dim], may be null (zero)
//   rotation  [head_dim, padded_width(head_dim)] zero-padded, may be null (identity)
//   out       [num_rows, padded_width(head_dim)], padding written as zero; must not overlap rows
// The bits of a row do not depend on the other rows of the call.
void rotate_rows(const float* rows, size_t row_stride, size_t num_rows, size_t head_dim,
                 const float* mean, const float* rotation, float* out);

}  // namespace oscar
