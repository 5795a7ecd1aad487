// Attention over the cache against a float64 reference: masks at every boundary, odd shapes,
// independence of chunking and threads, kernels of every instruction set.
#include <catch2/catch.hpp>
#include <limits>

#include "base/cpu.h"
#include "base/parallel.h"
#include "model/attention_kernels.h"
#include "model/cache_fixture.h"
#include "support/compare.h"

using namespace oscar_test;

namespace {

// Float32 sums of up to 1000 terms of size 1 that cancel: a few hundred roundings of 6e-8, seen as
// an absolute error.
const Tolerance kFp32Sums{.absolute = 5e-6, .relative = 1e-5, .min_cosine = 0.0};

void check_against_reference(const Geometry& g, std::shared_ptr<const KvArm> arm, size_t num_tokens,
                             const std::vector<size_t>& calls) {
  const Rows rows = random_rows(g, num_tokens, 11);
  KvCache cache(g.config(), arm);
  const Outputs actual = run(cache, g, rows, 0, num_tokens, calls);
  const ReferenceOutputs expected = reference_attention(g, rows, *arm);
  // Centering by random means makes the stored rows three times larger: scores reach 30, whose
  // rounding (2e-6) is the relative error of a weight, and outputs reach 10.
  const bool centered = arm->quantized && !arm->layers[0].k.mean.empty();
  const Tolerance tolerance{.absolute = centered ? 3e-5 : 5e-6, .relative = 1e-5};
  CHECK_CLOSE(actual.o.data(), expected.o.data(), actual.o.size(), tolerance);
  CHECK_CLOSE(actual.lse.data(), expected.lse.data(), actual.lse.size(), tolerance);
  CHECK(cache.length() == num_tokens);
}

}  // namespace

TEST_CASE("reference arms equal float64 attention", "[attention]") {
  for (const HighPrecision type : {HighPrecision::kBf16, HighPrecision::kFp32}) {
    for (const size_t group : {1, 3, 4, 6, 7}) {
      for (const size_t dim : {64, 80, 96, 128}) {
        CAPTURE(group, dim);
        const Geometry g{.num_kv_heads = 2, .group = group, .head_dim = dim};
        check_against_reference(g, make_reference_arm(type), 100, {});
      }
    }
  }
  const Geometry odd{.num_kv_heads = 1, .group = 2, .head_dim = 36};
  check_against_reference(odd, make_reference_arm(HighPrecision::kBf16), 70, {3, 60});
}

TEST_CASE("a single token attends to itself", "[attention]") {
  const Geometry g{.num_kv_heads = 3, .group = 3, .head_dim = 64};
  const Rows rows = random_rows(g, 1, 5);
  KvCache cache(g.config(), make_reference_arm(HighPrecision::kFp32));
  const Outputs out = run(cache, g, rows, 0, 1, {});
  for (size_t head = 0; head < 9; ++head) {
    CHECK_CLOSE(out.o.data() + head * 64, rows.v.data() + head / 3 * 64, 64, Tolerance{});
  }
}

TEST_CASE("exact windows: each query reads the right form of each key", "[attention]") {
  const Geometry g{.num_kv_heads = 2, .group = 3, .head_dim = 64};
  const size_t edges[][2] = {{64, 256}, {0, 0},   {64, 64}, {5, 17},  {63, 65},
                             {65, 63},  {0, 128}, {130, 0}, {500, 10}};
  for (const auto& [sink, recent] : edges) {
    for (const bool transformed : {false, true}) {
      CAPTURE(sink, recent, transformed);
      const auto arm = make_test_arm(g, {.windows = {.sink = sink, .recent = recent},
                                         .rotated = transformed,
                                         .per_head = transformed,
                                         .centered = transformed});
      check_against_reference(g, arm, 391, {});
      check_against_reference(g, arm, 200, {1, 64, 1, 33, 2});
    }
  }
}

TEST_CASE("exact windows with keys packed in blocks of tokens", "[attention]") {
  const Geometry g{.num_kv_heads = 1, .group = 4, .head_dim = 80};
  for (const size_t block : {16, 32, 48, 128}) {
    for (const size_t sink : {0, 7, 64}) {
      CAPTURE(block, sink);
      const auto arm = make_test_arm(
          g, {.windows = {.sink = sink, .recent = 50}, .key_block = block, .centered = true});
      check_against_reference(g, arm, 333, {100, 1, 70});
    }
  }
}

TEST_CASE("exact results have the same bits for every chunking and thread count", "[attention]") {
  const Geometry g{.num_kv_heads = 2, .group = 3, .head_dim = 64};
  const size_t length = 700;
  const Rows rows = random_rows(g, length, 21);
  const auto arm = make_test_arm(
      g,
      {.windows = {.sink = 20, .recent = 100}, .key_block = 32, .rotated = true, .centered = true});
  for (const std::shared_ptr<const KvArm>& each :
       {std::shared_ptr<const KvArm>(arm),
        std::shared_ptr<const KvArm>(make_reference_arm(HighPrecision::kBf16))}) {
    KvCache whole(g.config(), each);
    const Outputs expected = run(whole, g, rows, 0, length, {});
    const std::vector<size_t> ones(length, 1);
    for (const std::vector<size_t>& calls :
         {ones, std::vector<size_t>{512}, std::vector<size_t>{33, 1, 64, 100, 31, 200}}) {
      set_num_threads(calls.size() == 1 ? 1 : 3);
      KvCache cache(g.config(), each);
      const Outputs actual = run(cache, g, rows, 0, length, calls);
      CHECK(actual.o == expected.o);
      CHECK(actual.lse == expected.lse);
    }
    set_num_threads(0);
  }
}

TEST_CASE("a sink that holds everything gives the reference", "[attention]") {
  const Geometry g{.num_kv_heads = 2, .group = 3, .head_dim = 64};
  const Rows rows = random_rows(g, 150, 31);
  for (const HighPrecision type : {HighPrecision::kBf16, HighPrecision::kFp32}) {
    KvCache reference(g.config(), make_reference_arm(type));
    const Outputs expected = run(reference, g, rows, 0, 150, {});
    KvCache plain(g.config(), make_test_arm(g, {.windows = {.sink = 150, .recent = 0},
                                                .high_precision = type}));
    const Outputs actual = run(plain, g, rows, 0, 150, {});
    CHECK(actual.o == expected.o);
    CHECK(actual.lse == expected.lse);
    CHECK(plain.counters().tokens_int2_read == 0);
  }
  // Centering and rotation cancel up to float32 rounding (keys around 3: scores around 30).
  const Rows& input = rows;
  KvCache reference(g.config(), make_reference_arm(HighPrecision::kFp32));
  KvCache rotated(g.config(), make_test_arm(g, {.windows = {.sink = 150, .recent = 0},
                                                .rotated = true,
                                                .per_head = true,
                                                .centered = true,
                                                .high_precision = HighPrecision::kFp32}));
  const Outputs expected = run(reference, g, input, 0, 150, {});
  const Outputs actual = run(rotated, g, input, 0, 150, {});
  CHECK_CLOSE(actual.o.data(), expected.o.data(), actual.o.size(),
              Tolerance{.absolute = 2e-5, .relative = 2e-5});
  CHECK_CLOSE(actual.lse.data(), expected.lse.data(), actual.lse.size(),
              Tolerance{.absolute = 2e-5, .relative = 2e-5});
}

TEST_CASE("scores far apart stay finite and exact", "[attention]") {
  const Geometry g{.num_kv_heads = 1, .group = 1, .head_dim = 64};
  Rows rows = random_rows(g, 130, 41);
  for (float& x : rows.k) x *= 40.0F;
  for (float& x : rows.q) x *= 40.0F;
  KvCache cache(g.config(), make_reference_arm(HighPrecision::kFp32));
  const Outputs actual = run(cache, g, rows, 0, 130, {});
  const ReferenceOutputs expected = reference_attention(g, rows, cache.arm());
  // Scores reach 1e4: float32 rounding of a score (1e-3) is the relative error of a weight.
  CHECK_CLOSE(actual.o.data(), expected.o.data(), actual.o.size(),
              Tolerance{.absolute = 2e-2, .min_cosine = 0.99999});
  CHECK_CLOSE(actual.lse.data(), expected.lse.data(), actual.lse.size(),
              Tolerance{.relative = 1e-5});
}

TEST_CASE("keys and values that are not finite are refused by place", "[attention]") {
  const Geometry g{.num_kv_heads = 2, .group = 1, .head_dim = 64, .num_layers = 2};
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    KvCache cache(g.config(), make_reference_arm(HighPrecision::kBf16));
    Rows rows = random_rows(g, 80, 51);
    run(cache, g, rows, 0, 10, {}, 1);
    rows.k[(30 * 2 + 1) * 64 + 7] = bad;
    CHECK_THROWS_WITH(run(cache, g, rows, 10, 80, {}, 1),
                      Catch::Contains("layer 1: key of token 30, KV head 1, dimension 7"));
    CHECK(cache.length() == 10);
    rows = random_rows(g, 80, 51);
    rows.v[79 * 2 * 64] = bad;
    CHECK_THROWS_WITH(run(cache, g, rows, 10, 80, {}, 1),
                      Catch::Contains("layer 1: value of token 79, KV head 0"));
  }
}

TEST_CASE("kernels of every instruction set agree with plain loops", "[attention]") {
  std::vector<const AttentionKernels*> tables = {&kAttentionGeneric};
  if (cpu_features().avx2) tables.push_back(&kAttentionAvx2);
  if (cpu_features().avx512) tables.push_back(&kAttentionAvx512);
  for (const AttentionKernels* kernels : tables) {
    for (const size_t m : {1, 2, 5, 6, 7, 13, 48}) {
      for (const size_t n : {16, 48, 64, 80, 144}) {
        const size_t k = 37;
        const std::vector<float> a = random_values(m * (k + 3), 1);
        const std::vector<float> b = random_values(k * (n + 5), 2);
        std::vector<float> c = random_values(m * n, 3);
        std::vector<double> expected(c.begin(), c.end());
        for (size_t i = 0; i < m; ++i) {
          for (size_t j = 0; j < n; ++j) {
            for (size_t p = 0; p < k; ++p) {
              expected[i * n + j] += static_cast<double>(a[i * (k + 3) + p]) * b[p * (n + 5) + j];
            }
          }
        }
        kernels->gemm(m, n, k, a.data(), k + 3, b.data(), n + 5, c.data(), n, true);
        CHECK_CLOSE(c.data(), expected.data(), c.size(), kFp32Sums);
      }
    }
    const size_t width = 36;
    const std::vector<float> rows = random_values(64 * (width + 1), 4);
    for (const size_t count : {0, 1, 17, 64}) {
      std::vector<float> panel(width * 64, -1.0F);
      kernels->transpose(rows.data(), width + 1, count, width, panel.data());
      size_t wrong = 0;
      for (size_t d = 0; d < width; ++d) {
        for (size_t j = 0; j < 64; ++j) {
          if (panel[d * 64 + j] != (j < count ? rows[j * (width + 1) + d] : 0.0F)) ++wrong;
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("softmax weights follow exp2 over the whole range", "[attention]") {
  std::vector<const AttentionKernels*> tables = {&kAttentionGeneric};
  if (cpu_features().avx2) tables.push_back(&kAttentionAvx2);
  if (cpu_features().avx512) tables.push_back(&kAttentionAvx512);
  for (const AttentionKernels* kernels : tables) {
    for (int step = 0; step < 400; ++step) {
      std::vector<float> scores(64);
      for (size_t j = 0; j < 64; ++j) {
        scores[j] = 5.0F - static_cast<float>(j) * 0.31F - static_cast<float>(step) * 0.0071F;
      }
      const std::vector<float> before = scores;
      const uint32_t visible = 1 + static_cast<uint32_t>(step) % 64;
      float maximum = 4.0F;
      float sum = 3.0F;
      std::vector<float> out(16, 2.0F);
      kernels->softmax({.num_rows = 1,
                        .width = padded_width(visible),
                        .scores = scores.data(),
                        .num_visible = &visible,
                        .max_score = &maximum,
                        .sum = &sum,
                        .out = out.data(),
                        .out_width = 16});
      const double top = std::max(4.0F, before[0]);
      CHECK(maximum == static_cast<float>(top));
      double total = 3.0 * std::exp2(4.0 - top);
      for (size_t j = 0; j < padded_width(visible); ++j) {
        const double weight = j < visible ? std::exp2(static_cast<double>(before[j]) - top) : 0.0;
        // The subtraction rounds by 2^-25 |score - max|; the last steps of the polynomial add 2e-7.
        const double tolerance = 2e-7 + 0x1p-24 * std::abs(static_cast<double>(before[j]) - top);
        REQUIRE(std::abs(scores[j] - weight) <= tolerance * weight);
        total += weight;
      }
      REQUIRE(std::abs(sum - total) <= 1e-6 * total);
      REQUIRE(std::abs(out[3] - 2.0 * std::exp2(4.0 - top)) <= 1e-6);
    }
  }
}
