// Attention with products in bf16: against the float64 reference fed the rounded queries,
// independence of chunking and threads, the pair kernels against plain loops.
#include <bit>
#include <catch2/catch.hpp>

#include "base/cpu.h"
#include "base/parallel.h"
#include "model/attention_kernels.h"
#include "model/cache_fixture.h"
#include "support/compare.h"
#include "support/paths.h"

using namespace oscar_test;

namespace {

Rows rows_with_rounded_queries(const Geometry& g, size_t num_tokens, uint64_t seed) {
  Rows rows = random_rows(g, num_tokens, seed);
  round_to_bf16(rows.q.data(), rows.q.size());
  return rows;
}

struct Tables {
  std::vector<const AttentionKernels*> kernels = {&kAttentionGeneric};
  std::vector<const PairKernels*> pairs;
  Tables() {
    if (cpu_features().avx2) kernels.push_back(&kAttentionAvx2);
    if (cpu_features().avx512) kernels.push_back(&kAttentionAvx512);
    if (cpu_features().avx512_bf16) pairs.push_back(&kPairsAvx512Bf16);
    if (cpu_features().amx_bf16) pairs.push_back(&kPairsAmx);
  }
};

std::vector<uint32_t> random_pairs(size_t count, uint64_t seed) {
  const std::vector<float> values = random_values(2 * count, seed);
  std::vector<uint32_t> pairs(count);
  for (size_t i = 0; i < count; ++i)
    pairs[i] = float_to_bf16(values[2 * i]) | uint32_t{float_to_bf16(values[2 * i + 1])} << 16;
  return pairs;
}
float half(uint32_t pair, size_t which) {
  return bf16_to_float(static_cast<uint16_t>(pair >> (16 * which)));
}

}  // namespace

TEST_CASE("bf16 products differ from the reference by the rounding of weights", "[attention]") {
  SKIP_UNLESS(pair_kernels() != nullptr, "no bf16 products on this CPU");
  for (const size_t group : {1, 3, 7}) {
    for (const size_t dim : {64, 80, 128}) {
      CAPTURE(group, dim);
      const Geometry g{.num_kv_heads = 2, .group = group, .head_dim = dim};
      const Rows rows = rows_with_rounded_queries(g, 200, 13);
      const auto arm = make_reference_arm(HighPrecision::kBf16);
      KvCache cache(g.config(), arm);
      const Outputs actual = run(cache, g, rows, 0, 200, {}, 0, Compute::kBf16);
      const ReferenceOutputs expected = reference_attention(g, rows, *arm);
      // Products of bf16 numbers are exact in float32: only their sums round.
      CHECK_CLOSE(actual.lse.data(), expected.lse.data(), actual.lse.size(),
                  Tolerance{.absolute = 5e-6, .relative = 1e-5});
      // Weights sum to 1 and values reach 5: half a step of bf16 times 5 bounds an output.
      CHECK_CLOSE(actual.o.data(), expected.o.data(), actual.o.size(),
                  Tolerance{.absolute = 5 * kBf16Epsilon / 2, .min_cosine = 0.99999});
      CHECK(actual.o != run(*std::make_unique<KvCache>(g.config(), arm), g, rows, 0, 200, {}).o);
    }
  }
}

TEST_CASE("bf16 products next to packed rows", "[attention]") {
  const Geometry g{.num_kv_heads = 2, .group = 3, .head_dim = 64};
  const Rows rows = random_rows(g, 391, 17);
  for (const bool transformed : {false, true}) {
    const auto arm = make_test_arm(g, {.windows = {.sink = 70, .recent = 100},
                                       .key_block = 32,
                                       .rotated = transformed,
                                       .centered = transformed});
    KvCache cache(g.config(), arm);
    const Outputs actual = run(cache, g, rows, 0, 391, {100, 1, 64}, 0, Compute::kBf16);
    const ReferenceOutputs expected = reference_attention(g, rows, *arm);
    // Rounded queries: scores up to 30 move by up to half a bf16 step of their products.
    CHECK_CLOSE(actual.o.data(), expected.o.data(), actual.o.size(),
                Tolerance{.absolute = 0.1, .min_cosine = 0.9999});
  }
}

TEST_CASE("bf16 products give the same bits for every chunking and thread count", "[attention]") {
  const Geometry g{.num_kv_heads = 2, .group = 3, .head_dim = 64};
  const size_t length = 700;
  const Rows rows = random_rows(g, length, 23);
  const auto packed = make_test_arm(
      g,
      {.windows = {.sink = 20, .recent = 100}, .key_block = 32, .rotated = true, .centered = true});
  for (const std::shared_ptr<const KvArm>& arm :
       {std::shared_ptr<const KvArm>(packed),
        std::shared_ptr<const KvArm>(make_reference_arm(HighPrecision::kBf16))}) {
    KvCache whole(g.config(), arm);
    const Outputs expected = run(whole, g, rows, 0, length, {}, 0, Compute::kBf16);
    for (const std::vector<size_t>& calls :
         {std::vector<size_t>(length, 1), std::vector<size_t>{512},
          std::vector<size_t>{33, 1, 64, 100, 31, 200}}) {
      set_num_threads(calls.size() == 1 ? 1 : 3);
      KvCache cache(g.config(), arm);
      const Outputs actual = run(cache, g, rows, 0, length, calls, 0, Compute::kBf16);
      CHECK(actual.o == expected.o);
      CHECK(actual.lse == expected.lse);
    }
    set_num_threads(0);
  }
}

TEST_CASE("bf16 products: a sink that holds everything gives the reference", "[attention]") {
  const Geometry g{.num_kv_heads = 2, .group = 3, .head_dim = 64};
  const Rows rows = random_rows(g, 150, 31);
  KvCache reference(g.config(), make_reference_arm(HighPrecision::kBf16));
  KvCache plain(g.config(), make_test_arm(g, {.windows = {.sink = 150, .recent = 0}}));
  const Outputs expected = run(reference, g, rows, 0, 150, {}, 0, Compute::kBf16);
  const Outputs actual = run(plain, g, rows, 0, 150, {}, 0, Compute::kBf16);
  CHECK(actual.o == expected.o);
  CHECK(actual.lse == expected.lse);
}

TEST_CASE("bf16 rows multiplied in float32 have the bits of expanded rows", "[attention]") {
  for (const AttentionKernels* kernels : Tables().kernels) {
    for (const size_t m : {1, 3, 6, 13, 48}) {
      for (const size_t n : {16, 48, 64, 80, 144}) {
        const size_t k = 38;
        const std::vector<float> a = random_values(m * (k + 3), 1);
        const std::vector<uint32_t> pairs = random_pairs(k / 2 * (n + 5), 2);
        std::vector<float> b(k * (n + 5));
        for (size_t i = 0; i < b.size(); ++i) {
          const size_t row = i / (n + 5), column = i % (n + 5);
          b[i] = half(pairs[row / 2 * (n + 5) + column], row % 2);
        }
        for (const bool accumulate : {false, true}) {
          std::vector<float> expected = random_values(m * n, 3);
          std::vector<float> actual = expected;
          kernels->gemm(m, n, k, a.data(), k + 3, b.data(), n + 5, expected.data(), n, accumulate);
          kernels->gemm_bf16(m, n, k, a.data(), k + 3, pairs.data(), n + 5, actual.data(), n,
                             accumulate);
          CHECK(actual == expected);
        }
      }
    }
  }
}

TEST_CASE("pair kernels agree with plain loops", "[attention]") {
  const Tables tables;
  SKIP_UNLESS(!tables.pairs.empty(), "no bf16 products on this CPU");
  for (const PairKernels* kernels : tables.pairs) {
    for (const size_t m : {1, 3, 6, 13, 16, 17, 48}) {
      for (const size_t n : {16, 48, 64, 80, 144}) {
        for (const size_t num_pairs : {8, 24, 32, 40}) {
          CAPTURE(m, n, num_pairs);
          const size_t a_stride = num_pairs + 8, b_stride = n + 16;
          const std::vector<uint32_t> a = random_pairs(m * a_stride, 1);
          const std::vector<uint32_t> b = random_pairs(num_pairs * b_stride, 2);
          std::vector<double> sums(m * n, 0.0);
          for (size_t i = 0; i < m * num_pairs * n * 2; ++i) {
            const size_t which = i % 2, p = i / 2 % num_pairs, j = i / 2 / num_pairs % n;
            const size_t row = i / 2 / num_pairs / n;
            sums[row * n + j] += static_cast<double>(half(a[row * a_stride + p], which)) *
                                 half(b[p * b_stride + j], which);
          }
          const std::vector<float> before = random_values(m * n, 3);
          std::vector<float> scaled = before, added = before;
          kernels->gemm(m, n, num_pairs, a.data(), a_stride, b.data(), b_stride, 0.37F,
                        scaled.data(), n, false);
          kernels->gemm(m, n, num_pairs, a.data(), a_stride, b.data(), b_stride, 1.0F, added.data(),
                        n, true);
          std::vector<double> expected_scaled(sums), expected_added(sums);
          for (size_t i = 0; i < sums.size(); ++i) {
            expected_scaled[i] *= static_cast<double>(0.37F);
            expected_added[i] += static_cast<double>(before[i]);
          }
          const Tolerance tolerance{.absolute = 1e-5, .relative = 1e-5, .min_cosine = 0.0};
          CHECK_CLOSE(scaled.data(), expected_scaled.data(), scaled.size(), tolerance);
          CHECK_CLOSE(added.data(), expected_added.data(), added.size(), tolerance);
        }
      }
    }
    const std::vector<float> rows = random_values(3 * 70, 5);
    std::vector<uint32_t> rounded(3 * 40, 7);
    kernels->round(3, 64, rows.data(), 70, rounded.data(), 40);
    for (size_t r = 0; r < 3; ++r) {
      for (size_t d = 0; d < 64; ++d)
        CHECK(half(rounded[r * 40 + d / 2], d % 2) == round_to_bf16(rows[r * 70 + d]));
      CHECK(rounded[r * 40 + 32] == 7);
    }
  }
}
