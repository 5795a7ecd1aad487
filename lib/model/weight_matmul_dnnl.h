// bf16 products through oneDNN, for CPUs whose tile unit (AMX) only it drives.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {

// True when this build has oneDNN.
bool dnnl_built();

struct DnnlMatmulArgs {
  const uint16_t* x;        // bf16 [tokens, columns]
  const uint16_t* weights;  // bf16 [rows, columns]
  size_t tokens, rows, columns;
  float* out;  // [tokens, out_stride], the first `rows` of each line are written
  size_t out_stride;
};

// Runs in the calling thread alone. Throws Error when oneDNN is not built in or refuses the shape.
void dnnl_matmul(const DnnlMatmulArgs& args);

}  // namespace oscar
