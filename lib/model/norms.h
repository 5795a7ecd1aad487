// Row-wise pieces of the forward pass: RMSNorm, SwiGLU, finite check. Same bits on every
// instruction set and thread count: each file is compiled from the same source, sums run in a fixed
// order.
#pragma once

#include <cstddef>
#include <string>

namespace oscar {

// out[r] = weight * x[r] / sqrt(mean(x[r]^2) + eps) for `rows` rows of `width`; the mean in double.
// out may be x. Throws Error "<what>: non-finite ..., row r" when a row holds NaN or infinity.
void rms_norm(const float* x, size_t rows, size_t width, const float* weight, double eps,
              const std::string& what, float* out);

// gate = silu(gate) * up, silu(x) = x / (1 + exp(-x)); relative error below 4 * 2^-23.
void swiglu(float* gate, const float* up, size_t count);

// Throws Error "<what>: non-finite value" unless all values are finite.
void check_finite(const float* values, size_t count, const std::string& what);

}  // namespace oscar
