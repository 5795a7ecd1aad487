#include "model/rotate.h"

#include <algorithm>
#include <vector>

#include "model/attention_kernels.h"

namespace oscar {

void rotate_rows(const float* rows, size_t row_stride, size_t num_rows, size_t head_dim,
                 const float* mean, const float* rotation, float* out) {
  const size_t width = padded_width(head_dim);
  thread_local std::vector<float> centered;
  if (mean != nullptr && rotation != nullptr) {
    centered.resize(num_rows * head_dim);
    for (size_t r = 0; r < num_rows; ++r) {
      for (size_t d = 0; d < head_dim; ++d) {
        centered[r * head_dim + d] = rows[r * row_stride + d] - mean[d];
      }
    }
    rows = centered.data();
    row_stride = head_dim;
  }
  if (rotation != nullptr) {
    attention_kernels().gemm(num_rows, width, head_dim, rows, row_stride, rotation, width, out,
                             width, false);
    return;
  }
  for (size_t r = 0; r < num_rows; ++r) {
    float* row = out + r * width;
    for (size_t d = 0; d < head_dim; ++d) {
      row[d] = rows[r * row_stride + d] - (mean == nullptr ? 0.0F : mean[d]);
    }
    std::fill(row + head_dim, row + width, 0.0F);
  }
}

}  // namespace oscar
