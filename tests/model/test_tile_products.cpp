// The products on tiles: layouts and edges with an emulated tile unit on every CPU, and the
// processor's unit against it where there is one.
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "base/cpu.h"
#include "base/float16.h"
#include "base/random.h"
#include "model/attention_kernels.h"
#include "model/kernel_scope.h"
#include "model/tile_emulation.h"
#include "model/tile_products.h"
#include "support/compare.h"
#include "support/paths.h"

using namespace oscar;
using namespace oscar_test;

namespace {

constexpr uint32_t kNanPair = 0x7fc07fc0U;
constexpr float kUntouched = 12345.0F;

std::vector<uint32_t> random_pairs(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<uint32_t> pairs(count);
  for (uint32_t& pair : pairs)
    pair = float_to_bf16(static_cast<float>(random.normal())) |
           uint32_t{float_to_bf16(static_cast<float>(random.normal()))} << 16;
  return pairs;
}
std::vector<float> random_floats(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.normal());
  return values;
}
double half(uint32_t pair, size_t which) {
  return static_cast<double>(bf16_to_float(static_cast<uint16_t>(pair >> (16 * which))));
}
double pair_product(uint32_t a, uint32_t b) {
  return half(a, 0) * half(b, 0) + half(a, 1) * half(b, 1);
}

// Sums of up to 768 products of normal numbers in another order.
const Tolerance kSums{.absolute = 1e-4, .relative = 1e-5};

// ---- panels of tokens and weight rows

struct Panels {
  size_t steps;
  std::vector<uint32_t> tokens, weights;
  explicit Panels(size_t num_steps)
      : steps(num_steps),
        tokens(random_pairs(num_steps * kPanelWidth, 1)),
        weights(random_pairs(num_steps * kPanelWidth, 2)) {}
  double sum(size_t token, size_t row) const {
    double total = 0.0;
    for (size_t s = 0; s < steps; ++s)
      total += pair_product(tokens[(s / kTile * kPanelWidth + token) * kTile + s % kTile],
                            weights[s * kPanelWidth + row]);
    return total;
  }
};

struct PanelCase {
  size_t num_tokens, num_rows;
  bool accumulate, biased;
};
std::vector<PanelCase> panel_cases() {
  std::vector<PanelCase> cases;
  for (const size_t tokens : {1, 15, 16, 17, 31, 32})
    for (const size_t rows : {1, 16, 31, 32})
      for (const int flags : {0, 1, 2, 3})
        cases.push_back({tokens, rows, (flags & 1) != 0, (flags & 2) != 0});
  return cases;
}
constexpr size_t kOutStride = kPanelWidth + 3;

// out [33, kOutStride] after multiply.
std::vector<float> run_panels(const Panels& panels, const PanelCase& c,
                              void (*multiply)(const MultiplyArgs&)) {
  const std::vector<float> before = random_floats(kPanelWidth * kOutStride, 3);
  const std::vector<float> bias = random_floats(kPanelWidth, 4);
  std::vector<float> out((kPanelWidth + 1) * kOutStride, kUntouched);
  for (size_t t = 0; c.accumulate && t < c.num_tokens; ++t)
    for (size_t r = 0; r < c.num_rows; ++r) out[t * kOutStride + r] = before[t * kOutStride + r];
  multiply({.weights = panels.weights.data(),
            .tokens = panels.tokens.data(),
            .steps = panels.steps,
            .num_tokens = c.num_tokens,
            .num_rows = c.num_rows,
            .accumulate = c.accumulate,
            .bias = c.biased ? bias.data() : nullptr,
            .out = out.data(),
            .out_stride = kOutStride});
  return out;
}

// ---- pairs of attention

struct PairCase {
  size_t m, n, num_pairs;
  bool accumulate;
  float scale;
};
std::vector<PairCase> pair_cases() {
  std::vector<PairCase> cases;
  for (const size_t m : {1, 3, 15, 16, 17, 48})
    for (const size_t n : {16, 32, 48, 64, 80, 96, 144})
      for (const size_t num_pairs : {8, 16, 24, 32, 40, 48, 64}) {
        cases.push_back({m, n, num_pairs, false, 0.37F});
        cases.push_back({m, n, num_pairs, true, 1.0F});
      }
  return cases;
}

struct PairOperandsOf {
  size_t a_stride, b_stride, c_stride;
  std::vector<uint32_t> a, b;
  std::vector<float> c;
  // What must not be read is NaN.
  explicit PairOperandsOf(const PairCase& p)
      : a_stride(p.num_pairs + 8),
        b_stride(p.n + 16),
        c_stride(p.n + 5),
        a(random_pairs((p.m + 16) * a_stride, 5)),
        b(random_pairs((p.num_pairs + 16) * b_stride, 6)),
        c((p.m + 1) * c_stride, kUntouched) {
    for (size_t i = 0; i < a.size(); ++i)
      if (i / a_stride >= p.m || i % a_stride >= p.num_pairs) a[i] = kNanPair;
    for (size_t i = 0; i < b.size(); ++i)
      if (i / b_stride >= p.num_pairs || i % b_stride >= p.n) b[i] = kNanPair;
    const std::vector<float> before = random_floats(c.size(), 7);
    for (size_t i = 0; i < p.m * c_stride; ++i)
      if (i % c_stride < p.n) c[i] = p.accumulate ? before[i] : NAN;
  }
  PairProduct product(const PairCase& p, float* out) const {
    return {p.m,      p.n,     p.num_pairs, a.data(), a_stride,    b.data(),
            b_stride, p.scale, out,         c_stride, p.accumulate};
  }
};

}  // namespace

TEST_CASE("emulated tiles sum halves apart and flush denormal numbers", "[tiles]") {
  std::vector<uint32_t> a(256, 0), b(256, 0);
  std::vector<float> c(256, 0.0F);
  // Row 0: 2^24 + 1 + 1 in the even halves loses both ones; the odd half keeps its own.
  const uint32_t one = float_to_bf16(1.0F), large = float_to_bf16(0x1p24F);
  a[0] = large | one << 16;
  a[1] = a[2] = one;
  for (size_t p = 0; p < 3; ++p) b[p * 16] = one | one << 16;
  c[0] = 1.0F;
  a[16] = 1;  // row 1: the smallest denormal number
  c[17] = 1e-40F;
  EmulatedTiles::load<0>(c.data(), 16);
  EmulatedTiles::load<1>(a.data(), 16);
  EmulatedTiles::load<2>(b.data(), 16);
  EmulatedTiles::dot<0, 1, 2>();
  EmulatedTiles::store<0>(c.data(), 16);
  CHECK(c[0] == 0x1p24F);  // 1 + (2^24 + 1), each sum rounded to even
  CHECK(c[16] == 0.0F);
  CHECK(c[17] == 0.0F);
}

TEST_CASE("panels on tiles: every edge, biases and accumulation", "[tiles]") {
  const std::vector<float> before = random_floats(kPanelWidth * kOutStride, 3);
  const std::vector<float> bias = random_floats(kPanelWidth, 4);
  for (const size_t steps : {16, 48, 384}) {
    const Panels panels(steps);
    for (const PanelCase& c : panel_cases()) {
      CAPTURE(steps, c.num_tokens, c.num_rows, c.accumulate, c.biased);
      if (steps != 48 && c.num_tokens % 16 == 15) continue;
      const std::vector<float> actual = run_panels(panels, c, multiply_panels<EmulatedTiles>);
      std::vector<double> expected(actual.size(), static_cast<double>(kUntouched));
      for (size_t t = 0; t < c.num_tokens; ++t)
        for (size_t r = 0; r < c.num_rows; ++r) {
          const size_t at = t * kOutStride + r;
          expected[at] = panels.sum(t, r) + (c.biased ? static_cast<double>(bias[r]) : 0.0) +
                         (c.accumulate ? static_cast<double>(before[at]) : 0.0);
        }
      CHECK_CLOSE(actual.data(), expected.data(), actual.size(), kSums);
    }
  }
}

TEST_CASE("pairs on tiles: every edge, scale and accumulation", "[tiles]") {
  for (const PairCase& p : pair_cases()) {
    CAPTURE(p.m, p.n, p.num_pairs, p.accumulate);
    const PairOperandsOf operands(p);
    std::vector<float> actual = operands.c;
    multiply_pairs<EmulatedTiles>(operands.product(p, actual.data()));
    std::vector<double> expected(operands.c.begin(), operands.c.end());
    for (size_t i = 0; i < p.m; ++i)
      for (size_t j = 0; j < p.n; ++j) {
        double sum = 0.0;
        for (size_t k = 0; k < p.num_pairs; ++k)
          sum += pair_product(operands.a[i * operands.a_stride + k],
                              operands.b[k * operands.b_stride + j]);
        double& target = expected[i * operands.c_stride + j];
        target = p.accumulate ? target + sum : sum * static_cast<double>(p.scale);
      }
    CHECK_CLOSE(actual.data(), expected.data(), actual.size(), kSums);
  }
}

TEST_CASE("a row of a product on tiles has the same bits next to any others", "[tiles]") {
  const PairCase whole{48, 64, 40, false, 0.37F};
  const PairOperandsOf operands(whole);
  std::vector<float> all = operands.c;
  multiply_pairs<EmulatedTiles>(operands.product(whole, all.data()));
  for (const size_t row : {0, 5, 17, 47}) {
    PairProduct single = operands.product(whole, nullptr);
    std::vector<float> one(operands.c_stride, 0.0F);
    single.m = 1;
    single.a += row * operands.a_stride;
    single.c = one.data();
    multiply_pairs<EmulatedTiles>(single);
    for (size_t j = 0; j < whole.n; ++j) CHECK(one[j] == all[row * operands.c_stride + j]);
  }
}

TEST_CASE("panels packed for tiles hold the rounded operands", "[tiles]") {
  SKIP_UNLESS(cpu_features().avx512_bf16, "no AVX512-BF16 on this CPU");
  const GemmKernels& gemm = weight_kernels_amx().gemm;
  const size_t columns = 50, tokens = 21, rows = 19;
  std::vector<float> x = random_floats(tokens * columns, 8), w = random_floats(rows * columns, 9);
  std::vector<uint32_t> token_panel(gemm.token_width * kBlockSteps, kNanPair);
  std::vector<uint32_t> weight_panel(gemm.row_width * 32, kNanPair);
  gemm.pack_tokens({x.data(), columns, tokens, columns, token_panel.data()});
  gemm.pack_weights({.weight = {WeightType::kF32, reinterpret_cast<const uint8_t*>(w.data()),
                                columns * sizeof(float), columns},
                     .row_begin = 0,
                     .row_end = rows,
                     .unit_begin = 0,
                     .unit_count = 2,
                     .panel = weight_panel.data()});
  std::vector<float> actual(tokens * rows, 0.0F);
  multiply_panels<EmulatedTiles>({.weights = weight_panel.data(),
                                  .tokens = token_panel.data(),
                                  .steps = 32,
                                  .num_tokens = tokens,
                                  .num_rows = rows,
                                  .accumulate = false,
                                  .bias = nullptr,
                                  .out = actual.data(),
                                  .out_stride = rows});
  round_to_bf16(x.data(), x.size());
  round_to_bf16(w.data(), w.size());
  std::vector<double> expected(tokens * rows, 0.0);
  for (size_t i = 0; i < tokens * rows * columns; ++i) {
    const size_t c = i % columns, r = i / columns % rows, t = i / columns / rows;
    expected[t * rows + r] +=
        static_cast<double>(x[t * columns + c]) * static_cast<double>(w[r * columns + c]);
  }
  CHECK_CLOSE(actual.data(), expected.data(), actual.size(), kSums);
}

TEST_CASE("the processor's tiles have the bits of the emulated ones", "[tiles]") {
  SKIP_UNLESS(cpu_features().amx_bf16, "no AMX on this CPU");
  const GemmKernels& gemm = weight_kernels_amx().gemm;
  const KernelScope scope(gemm.start, gemm.stop);
  for (const size_t steps : {16, 384}) {
    const Panels panels(steps);
    for (const PanelCase& c : panel_cases()) {
      CAPTURE(steps, c.num_tokens, c.num_rows, c.accumulate, c.biased);
      CHECK(run_panels(panels, c, gemm.multiply) ==
            run_panels(panels, c, multiply_panels<EmulatedTiles>));
    }
  }
  const KernelScope pair_scope(kPairsAmx.start, kPairsAmx.stop);
  for (const PairCase& p : pair_cases()) {
    CAPTURE(p.m, p.n, p.num_pairs, p.accumulate);
    const PairOperandsOf operands(p);
    std::vector<float> expected = operands.c, actual = operands.c;
    multiply_pairs<EmulatedTiles>(operands.product(p, expected.data()));
    kPairsAmx.gemm(p.m, p.n, p.num_pairs, operands.a.data(), operands.a_stride, operands.b.data(),
                   operands.b_stride, p.scale, actual.data(), operands.c_stride, p.accumulate);
    CHECK(actual == expected);
  }
}
