#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/float16.h"
#include "base/parallel.h"
#include "base/random.h"
#include "model/weight_matmul.h"
#include "support/compare.h"
#include "support/paths.h"

using namespace oscar;

namespace {

const std::vector<WeightType> kAllTypes = {WeightType::kF32,  WeightType::kF16,  WeightType::kBF16,
                                           WeightType::kQ4_0, WeightType::kQ4_1, WeightType::kQ5_0,
                                           WeightType::kQ5_1, WeightType::kQ8_0, WeightType::kQ4_K,
                                           WeightType::kQ5_K, WeightType::kQ6_K};

// A stored matrix of random codes; scales and floats are moderate and finite.
struct RandomMatrix {
  std::vector<uint8_t> bytes;
  WeightMatrix weight;

  RandomMatrix(WeightType type, size_t rows, size_t columns, uint64_t seed) {
    weight.name = std::string("w");
    weight.type = type;
    weight.rows = rows;
    weight.columns = columns;
    Random random(seed);
    const size_t block = block_bytes(type);
    bytes.resize(rows * row_bytes(type, columns));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.below(256));
    const auto put_half = [&](size_t at) {
      const uint16_t bits = float_to_fp16(static_cast<float>(random.normal() * 0.05));
      std::memcpy(bytes.data() + at, &bits, sizeof bits);
    };
    for (size_t at = 0; at < bytes.size(); at += block) {
      if (type == WeightType::kF32) {
        const float value = static_cast<float>(random.normal());
        std::memcpy(bytes.data() + at, &value, sizeof value);
      } else if (type == WeightType::kBF16) {
        const uint16_t bits = float_to_bf16(static_cast<float>(random.normal()));
        std::memcpy(bytes.data() + at, &bits, sizeof bits);
      } else if (type == WeightType::kQ6_K) {
        put_half(at + 208);
      } else {
        put_half(at);
        const bool has_minimum = type == WeightType::kQ4_1 || type == WeightType::kQ5_1 ||
                                 type == WeightType::kQ4_K || type == WeightType::kQ5_K;
        if (has_minimum) put_half(at + 2);
      }
    }
    weight.bytes = bytes.data();
  }

  std::vector<float> expanded() const {
    std::vector<float> values(weight.rows * weight.columns);
    for (size_t r = 0; r < weight.rows; ++r)
      dequantize_row(weight.type, weight.row(r), weight.columns,
                     values.data() + r * weight.columns);
    return values;
  }
};

std::vector<float> random_floats(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.normal());
  return values;
}

std::vector<float> multiply(const RandomMatrix& matrix, const std::vector<float>& x, size_t tokens,
                            Compute compute = Compute::kFp32,
                            MatmulBackend backend = MatmulBackend::kAuto,
                            const float* bias = nullptr) {
  std::vector<float> out(tokens * matrix.weight.rows, NAN);
  const MatmulJob job{&matrix.weight, bias, out.data()};
  weight_matmul({&job, 1}, x.data(), tokens, compute, backend);
  return out;
}

// In double; magnitude receives the sum of |x w| per output, the natural scale of rounding errors.
std::vector<double> exact(const std::vector<float>& weights, const std::vector<float>& x,
                          size_t tokens, size_t rows, std::vector<double>* magnitude) {
  const size_t columns = weights.size() / rows;
  std::vector<double> out(tokens * rows, 0.0);
  magnitude->assign(tokens * rows, 0.0);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t r = 0; r < rows; ++r)
      for (size_t c = 0; c < columns; ++c) {
        const double product =
            static_cast<double>(x[t * columns + c]) * static_cast<double>(weights[r * columns + c]);
        out[t * rows + r] += product;
        (*magnitude)[t * rows + r] += std::abs(product);
      }
  return out;
}

// max |actual - expected| / magnitude
double worst_error(const std::vector<float>& actual, const std::vector<double>& expected,
                   const std::vector<double>& magnitude) {
  double worst = 0.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(static_cast<double>(actual[i]) - expected[i]);
    const double relative = error == 0.0 ? 0.0 : error / magnitude[i];
    worst = std::isnan(relative) ? HUGE_VAL : std::max(worst, relative);
  }
  return worst;
}

constexpr double kFloatEpsilon = 0x1p-23;

bool has_simd() { return cpu_features().avx2; }
bool bf16_supported() {
  try {
    check_compute_supported(Compute::kBf16);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

TEST_CASE("identity activations return exactly the dequantized weights, few and many tokens") {
  for (const WeightType type : kAllTypes) {
    INFO(type_name(type));
    const size_t columns = 512, rows = 37;
    const RandomMatrix matrix(type, rows, columns, 7);
    const std::vector<float> weights = matrix.expanded();
    std::vector<float> identity(columns * columns, 0.0F);
    for (size_t c = 0; c < columns; ++c) identity[c * columns + c] = 1.0F;
    const std::vector<float> all = multiply(matrix, identity, columns);
    size_t wrong = 0;
    for (size_t c = 0; c < columns; ++c)
      for (size_t r = 0; r < rows; ++r)
        wrong += all[c * rows + r] != weights[r * columns + c] ? 1U : 0U;
    CHECK(wrong == 0);
    for (size_t c = 0; c < columns; c += 7) {
      const std::vector<float> token(identity.begin() + static_cast<long>(c * columns),
                                     identity.begin() + static_cast<long>((c + 7) * columns));
      const size_t tokens = std::min<size_t>(7, columns - c);
      const std::vector<float> few = multiply(matrix, token, tokens);
      for (size_t t = 0; t < tokens; ++t)
        for (size_t r = 0; r < rows; ++r)
          wrong += few[t * rows + r] != weights[r * columns + c + t] ? 1U : 0U;
      if (c + 14 > columns) break;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("float32 products agree with double arithmetic for every type and number of tokens") {
  for (const WeightType type : kAllTypes) {
    for (const size_t tokens : {1, 2, 3, 7, 8, 9, 12, 13, 29}) {
      INFO(type_name(type) << ", " << tokens << " tokens");
      const size_t columns = 1024, rows = 70;
      const RandomMatrix matrix(type, rows, columns, 11 + tokens);
      const std::vector<float> x = random_floats(tokens * columns, tokens);
      std::vector<double> magnitude;
      const std::vector<double> expected = exact(matrix.expanded(), x, tokens, rows, &magnitude);
      CHECK(worst_error(multiply(matrix, x, tokens), expected, magnitude) < 8 * kFloatEpsilon);
      const std::vector<float> reference =
          multiply(matrix, x, tokens, Compute::kFp32, MatmulBackend::kReference);
      CHECK(worst_error(reference, expected, magnitude) < 32 * kFloatEpsilon);
    }
  }
}

TEST_CASE("column counts that are no multiple of 32, row counts of every remainder, biases") {
  for (const WeightType type : {WeightType::kF32, WeightType::kF16, WeightType::kBF16}) {
    for (const size_t columns : {1, 31, 50, 385}) {
      for (const size_t rows : {1, 16, 33, 64}) {
        for (const size_t tokens : {1, 8, 10}) {
          INFO(type_name(type) << " " << rows << " x " << columns << ", " << tokens << " tokens");
          const RandomMatrix matrix(type, rows, columns, columns);
          const std::vector<float> x = random_floats(tokens * columns, 3);
          const std::vector<float> bias = random_floats(rows, 4);
          std::vector<double> magnitude;
          std::vector<double> expected = exact(matrix.expanded(), x, tokens, rows, &magnitude);
          for (size_t i = 0; i < expected.size(); ++i) {
            expected[i] += static_cast<double>(bias[i % rows]);
            magnitude[i] += std::abs(static_cast<double>(bias[i % rows]));
          }
          const std::vector<float> actual =
              multiply(matrix, x, tokens, Compute::kFp32, MatmulBackend::kAuto, bias.data());
          CHECK(worst_error(actual, expected, magnitude) < 8 * kFloatEpsilon);
        }
      }
    }
  }
}

TEST_CASE("bf16 products are sums of products of rounded operands") {
  SKIP_UNLESS(bf16_supported(), "no bf16 matrix products on this CPU");
  for (const size_t tokens : {9, 300}) {
    const size_t rows = 70, columns = 1600;
    const RandomMatrix matrix(WeightType::kQ4_1, rows, columns, 5);
    std::vector<float> weights = matrix.expanded(), x = random_floats(tokens * columns, 6);
    const std::vector<float> actual = multiply(matrix, x, tokens, Compute::kBf16);
    round_to_bf16(weights.data(), weights.size());
    round_to_bf16(x.data(), x.size());
    std::vector<double> magnitude;
    const std::vector<double> expected = exact(weights, x, tokens, rows, &magnitude);
    INFO(tokens << " tokens");
    CHECK(worst_error(actual, expected, magnitude) < 8 * kFloatEpsilon);
  }
}

TEST_CASE("products are added to what is there") {
  const size_t rows = 70, columns = 1600;
  const RandomMatrix matrix(WeightType::kQ4_1, rows, columns, 5);
  const std::vector<float> bias = random_floats(rows, 8);
  for (const Compute compute : {Compute::kFp32, Compute::kBf16}) {
    if (compute == Compute::kBf16 && !bf16_supported()) continue;
    for (const MatmulBackend backend : {MatmulBackend::kAuto, MatmulBackend::kReference}) {
      if (compute == Compute::kBf16 && backend == MatmulBackend::kReference) continue;
      for (const size_t tokens : {3, 300}) {
        INFO("backend " << static_cast<int>(backend) << ", " << tokens << " tokens");
        const std::vector<float> x = random_floats(tokens * columns, 6);
        const std::vector<float> before = random_floats(tokens * rows, 7);
        std::vector<float> sum = before;
        const MatmulJob job{&matrix.weight, bias.data(), sum.data(), true};
        std::vector<float> product = multiply(matrix, x, tokens, compute, backend, bias.data());
        weight_matmul({&job, 1}, x.data(), tokens, compute, backend);
        for (size_t i = 0; i < sum.size(); ++i) product[i] += before[i];
        // Sums of 1600 terms of size 1 in another order.
        CHECK_CLOSE(sum.data(), product.data(), sum.size(), {.absolute = 1e-4});
      }
    }
  }
}

TEST_CASE("products do not depend on the thread count or on the other tokens") {
  const size_t rows = 200, columns = 1024, tokens = 50;
  const RandomMatrix matrix(WeightType::kQ4_K, rows, columns, 5);
  const std::vector<float> x = random_floats(tokens * columns, 6);
  for (const Compute compute : {Compute::kFp32, Compute::kBf16}) {
    if (compute == Compute::kBf16 && !bf16_supported()) continue;
    if (compute == Compute::kFp32 && !has_simd()) continue;  // OpenBLAS makes no such promise
    set_num_threads(1);
    const std::vector<float> single = multiply(matrix, x, tokens, compute);
    set_num_threads(3);
    CHECK(multiply(matrix, x, tokens, compute) == single);
    const size_t first = 17, part = 14;
    const std::vector<float> some(x.begin() + static_cast<long>(first * columns),
                                  x.begin() + static_cast<long>((first + part) * columns));
    const std::vector<float> partial = multiply(matrix, some, part, compute);
    CHECK_CLOSE(partial.data(), single.data() + first * rows, partial.size(), {});
    set_num_threads(0);
  }
}

TEST_CASE("several weights share one call, and mismatches are named") {
  const size_t columns = 64, tokens = 20;
  const RandomMatrix a(WeightType::kQ8_0, 40, columns, 1), b(WeightType::kF16, 1100, columns, 2);
  const std::vector<float> x = random_floats(tokens * columns, 3);
  std::vector<float> out_a(tokens * 40), out_b(tokens * 1100);
  const MatmulJob jobs[2] = {{&a.weight, nullptr, out_a.data()},
                             {&b.weight, nullptr, out_b.data()}};
  weight_matmul(jobs, x.data(), tokens, Compute::kFp32);
  CHECK(out_a == multiply(a, x, tokens));
  CHECK(out_b == multiply(b, x, tokens));

  RandomMatrix wrong(WeightType::kF32, 4, columns + 1, 4);
  wrong.weight.name = "blk.0.attn_q.weight";
  const MatmulJob bad[2] = {{&a.weight, nullptr, out_a.data()},
                            {&wrong.weight, nullptr, out_b.data()}};
  CHECK_THROWS_WITH(
      weight_matmul(bad, x.data(), tokens, Compute::kFp32),
      Catch::Contains("blk.0.attn_q.weight") && Catch::Contains("64") && Catch::Contains("65"));
  WeightMatrix absent;
  absent.name = "output.weight";
  const MatmulJob none{&absent, nullptr, out_a.data()};
  CHECK_THROWS_WITH(weight_matmul({&none, 1}, x.data(), tokens, Compute::kFp32),
                    Catch::Contains("output.weight"));
  CHECK_THROWS_AS(multiply(a, x, tokens, Compute::kBf16, MatmulBackend::kReference), Error);
}
