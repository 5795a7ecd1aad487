#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/random.h"
#include "model/norms.h"
#include "model/norms_kernels.h"
#include "support/compare.h"

using namespace oscar;

TEST_CASE("RMSNorm against double arithmetic") {
  const size_t rows = 3, width = 83;
  Random random(1);
  std::vector<float> x(rows * width), weight(width), out(rows * width);
  for (float& value : x) value = static_cast<float>(random.normal() * 3.0);
  for (float& value : weight) value = static_cast<float>(random.normal());
  rms_norm(x.data(), rows, width, weight.data(), 1e-5, "test", out.data());
  std::vector<double> expected(rows * width);
  for (size_t r = 0; r < rows; ++r) {
    double squares = 0.0;
    for (size_t i = 0; i < width; ++i)
      squares += std::pow(static_cast<double>(x[r * width + i]), 2);
    for (size_t i = 0; i < width; ++i)
      expected[r * width + i] = static_cast<double>(x[r * width + i]) *
                                static_cast<double>(weight[i]) /
                                std::sqrt(squares / static_cast<double>(width) + 1e-5);
  }
  CHECK_CLOSE(out.data(), expected.data(), out.size(), {.relative = 4 * 0x1p-24});
}

TEST_CASE("RMSNorm of huge values is finite, of NaN or infinity an error that names the place") {
  std::vector<float> x(64, 1e30F);
  const std::vector<float> weight(64, 1.0F);
  rms_norm(x.data(), 1, 64, weight.data(), 1e-5, "layer 3", x.data());
  CHECK(x[0] == Approx(1.0));
  for (const float bad : {NAN, HUGE_VALF, -HUGE_VALF}) {
    x[40] = bad;
    CHECK_THROWS_WITH(rms_norm(x.data(), 1, 64, weight.data(), 1e-5, "layer 3", x.data()),
                      Catch::Contains("layer 3"));
    CHECK_THROWS_WITH(check_finite(x.data(), x.size(), "layer 4 keys"),
                      Catch::Contains("layer 4 keys"));
  }
  x[40] = 3e38F;
  check_finite(x.data(), x.size(), "all finite");
}

TEST_CASE("SwiGLU against double arithmetic, extremes included") {
  std::vector<float> gate, up;
  for (double x = -120.0; x <= 120.0; x += 0.037) {
    gate.push_back(static_cast<float>(x));
    up.push_back(static_cast<float>(1.0 + 0.001 * x));
  }
  gate.insert(gate.end(), {0.0F, -0.0F, 1e30F, 1e-30F});
  up.insert(up.end(), {2.0F, 2.0F, 2.0F, 2.0F});
  std::vector<double> expected;
  for (size_t i = 0; i < gate.size(); ++i) {
    const double x = static_cast<double>(gate[i]);
    expected.push_back(x / (1.0 + std::exp(-x)) * static_cast<double>(up[i]));
  }
  swiglu(gate.data(), up.data(), gate.size());
  // Below exp(-88) * 120 the clamp of the exponent shows.
  CHECK_CLOSE(gate.data(), expected.data(), gate.size(),
              {.absolute = 1e-35, .relative = 4 * 0x1p-23});
  gate = {NAN, HUGE_VALF};
  up = {1.0F, 1.0F};
  swiglu(gate.data(), up.data(), 2);
  CHECK(std::isnan(gate[0]));
  CHECK(gate[1] == HUGE_VALF);
}

TEST_CASE("every instruction set gives the same bits") {
  Random random(5);
  std::vector<float> x(1003), y(1003);
  for (float& value : x) value = static_cast<float>(random.normal() * 4.0);
  for (float& value : y) value = static_cast<float>(random.normal());
  const norms::Kernels& reference = norms::generic();
  std::vector<const norms::Kernels*> others;
  if (cpu_features().avx2) others.push_back(&norms::avx2());
  if (cpu_features().avx512) others.push_back(&norms::avx512());
  for (const norms::Kernels* kernels : others) {
    CHECK(kernels->sum_of_squares(x.data(), x.size()) ==
          reference.sum_of_squares(x.data(), x.size()));
    std::vector<float> a = x, b = x;
    kernels->swiglu(a.data(), y.data(), a.size());
    reference.swiglu(b.data(), y.data(), b.size());
    CHECK(a == b);
    kernels->scale(x.data(), y.data(), 0.37F, x.size(), a.data());
    reference.scale(x.data(), y.data(), 0.37F, x.size(), b.data());
    CHECK(a == b);
  }
}
