#include "model/norms.h"

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "base/error.h"
#include "base/parallel.h"
#include "model/norms_kernels.h"

namespace oscar {
namespace {

constexpr size_t kGrain = 16384;  // elements of one piece of parallel work

const norms::Kernels& kernels() {
  if (cpu_features().avx512) return norms::avx512();
  return cpu_features().avx2 ? norms::avx2() : norms::generic();
}

}  // namespace

void rms_norm(const float* x, size_t rows, size_t width, const float* weight, double eps,
              const std::string& what, float* out) {
  const norms::Kernels& k = kernels();
  parallel_for_ranges(rows, std::max<size_t>(1, kGrain / width), [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      const double squares = k.sum_of_squares(x + r * width, width);
      // Squares of floats cannot overflow a double, so this is the finite check of the row.
      OSCAR_CHECK(std::isfinite(squares), what, ": non-finite activations, row ", r);
      const double mean = squares / static_cast<double>(width);
      const float factor = static_cast<float>(1.0 / std::sqrt(mean + eps));
      k.scale(x + r * width, weight, factor, width, out + r * width);
    }
  });
}

void swiglu(float* gate, const float* up, size_t count) {
  const norms::Kernels& k = kernels();
  parallel_for_ranges(count, kGrain, [&](size_t begin, size_t end) {
    k.swiglu(gate + begin, up + begin, end - begin);
  });
}

void check_finite(const float* values, size_t count, const std::string& what) {
  const norms::Kernels& k = kernels();
  parallel_for_ranges(count, 4 * kGrain, [&](size_t begin, size_t end) {
    OSCAR_CHECK(k.zero_if_finite(values + begin, end - begin) == 0.0F, what,
                ": non-finite activations");
  });
}

}  // namespace oscar
