// The cache itself: serving windows, counters, bytes held, fork and truncate.
#include <catch2/catch.hpp>

#include "model/cache_fixture.h"
#include "model/kv_cache_state.h"
#include "support/compare.h"

using namespace oscar_test;

namespace {

struct Split {
  size_t prefix, recent, packed;
  bool operator==(const Split&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Split& s) {
  return out << s.prefix << " / " << s.recent << " / " << s.packed;
}

// Prefix, recent and packed tokens of layer 0, by the packed range of the values.
Split split(KvCache& cache) {
  const LayerCache& layer = cache.state().layers[0];
  const size_t prefix = std::min(layer.length, cache.arm().windows.sink);
  const size_t packed = layer.packed[kValueSide].end - cache.arm().windows.sink;
  return {prefix, layer.length - prefix - packed, packed};
}

const Geometry kSmall{.num_kv_heads = 1, .group = 2, .head_dim = 16};

KvCache serving_cache(size_t key_block = 1) {
  return KvCache(kSmall.config(), make_test_arm(kSmall, {.windows = {64, 256, WindowMode::kServing},
                                                         .key_block = key_block}));
}

}  // namespace

TEST_CASE("serving windows follow the vectors of the format description", "[kv_cache]") {
  const Rows rows = random_rows(kSmall, 600, 1);
  KvCache cache = serving_cache();
  run(cache, kSmall, rows, 0, 300, {});
  CHECK(split(cache) == Split{64, 236, 0});
  cache.clear();
  run(cache, kSmall, rows, 0, 400, {});
  CHECK(split(cache) == Split{64, 256, 80});
  run(cache, kSmall, rows, 400, 407, std::vector<size_t>(7, 1));
  CHECK(split(cache) == Split{64, 263, 80});
  run(cache, kSmall, rows, 407, 408, {1});
  CHECK(split(cache) == Split{64, 256, 88});
  cache.clear();
  run(cache, kSmall, rows, 0, 400, {300, 100});
  CHECK(split(cache) == Split{64, 100, 236});
  cache.clear();
  run(cache, kSmall, rows, 0, 40, {});
  CHECK(split(cache) == Split{40, 0, 0});
  run(cache, kSmall, rows, 40, 70, std::vector<size_t>(30, 1));
  CHECK(split(cache) == Split{64, 6, 0});
}

TEST_CASE("serving decode counts as formats.md 7.4 says", "[kv_cache]") {
  const Rows rows = random_rows(kSmall, 600, 2);
  KvCache cache = serving_cache();
  run(cache, kSmall, rows, 0, 350, {});
  const size_t after_prefill = split(cache).packed;
  for (size_t length = 351; length <= 500; ++length) {
    run(cache, kSmall, rows, length - 1, length, {1});
    const size_t past_prefix = length - 64;
    const size_t flushed = 8 * ((past_prefix - std::min(past_prefix, after_prefill + 256)) / 8);
    CHECK(split(cache) ==
          Split{64, past_prefix - after_prefill - flushed, after_prefill + flushed});
  }
}

TEST_CASE("serving prefill reads its own chunk in high precision", "[kv_cache]") {
  const Rows rows = random_rows(kSmall, 300, 3);
  KvCache cache = serving_cache();
  KvCache reference(kSmall.config(), make_reference_arm(HighPrecision::kBf16));
  const Outputs actual = run(cache, kSmall, rows, 0, 300, {});
  const Outputs expected = run(reference, kSmall, rows, 0, 300, {});
  CHECK(actual.o == expected.o);
  CHECK(cache.counters().tokens_int2_read == 0);
  // The second chunk finds 236 packed tokens.
  const Rows next = random_rows(kSmall, 10, 4);
  const Outputs second = run(cache, kSmall, next, 0, 10, {});
  const Outputs exact = run(reference, kSmall, next, 0, 10, {});
  CHECK(second.o != exact.o);
  CHECK(cache.counters().tokens_int2_read == 10 * 236);
}

TEST_CASE("teacher-forced tokens can count as decode steps", "[kv_cache]") {
  const Rows rows = random_rows(kSmall, 500, 5);
  KvCache together = serving_cache(32);
  KvCache one_by_one = serving_cache(32);
  run(together, kSmall, rows, 0, 400, {});
  run(one_by_one, kSmall, rows, 0, 400, {});
  together.set_append_as_decode(true);
  const Outputs a = run(together, kSmall, rows, 400, 500, {100});
  const Outputs b = run(one_by_one, kSmall, rows, 400, 500, std::vector<size_t>(100, 1));
  CHECK(a.o == b.o);
  CHECK(split(together) == split(one_by_one));
  CHECK(together.counters().tokens_int2_read == one_by_one.counters().tokens_int2_read);
}

TEST_CASE("counters and bytes are those of the rows really held", "[kv_cache]") {
  const Geometry g{.num_kv_heads = 3, .group = 3, .head_dim = 64, .num_layers = 2};
  const Rows rows = random_rows(g, 1000, 6);
  KvCache cache(g.config(), make_test_arm(g, {.windows = {.sink = 64, .recent = 256}}));
  for (size_t layer = 0; layer < 2; ++layer) run(cache, g, rows, 0, 1000, {}, layer);
  const CacheCounters counters = cache.counters();
  CHECK(counters.tokens == 1000);
  CHECK(counters.tokens_int2_written == 680);
  CHECK(counters.tokens_high_precision == 320);
  CHECK(counters.tokens_int2_read == 680 * 681 / 2);
  CHECK(counters.encode.rows == 680 * 3 * 2 * 2);
  // 11 packed pages (680 tokens) and 6 high-precision pages (0..63, 704..999) a layer.
  CHECK(counters.bytes_packed == size_t{2} * 2 * 11 * 64 * 3 * 64);
  CHECK(counters.bytes_high_precision == size_t{2} * 2 * 6 * 64 * 3 * 64 * 2);
  // Of these 680 packed tokens and 320 rows are in use.
  CHECK(counters.bytes_packed_used * 704 == counters.bytes_packed * 680);
  CHECK(counters.bytes_high_precision_used == size_t{2} * 2 * 320 * 3 * 64 * 2);
  KvCache reference(g.config(), make_reference_arm(HighPrecision::kBf16));
  for (size_t layer = 0; layer < 2; ++layer) run(reference, g, rows, 0, 1000, {}, layer);
  CHECK(reference.counters().bytes_packed_used == 0);
  CHECK(reference.counters().bytes_high_precision_used == size_t{2} * 2 * 1000 * 3 * 64 * 2);
  CHECK(reference.counters().bytes_packed == 0);
  CHECK(reference.counters().bytes_high_precision == size_t{2} * 2 * 16 * 64 * 3 * 64 * 2);
  CHECK(reference.counters().tokens_int2_written == 0);
}

TEST_CASE("forks share pages and do not see each other", "[kv_cache]") {
  const Geometry g{.num_kv_heads = 2, .group = 2, .head_dim = 64};
  const Rows prefix = random_rows(g, 500, 7);
  const Rows left = random_rows(g, 90, 8);
  const Rows right = random_rows(g, 90, 9);
  for (const size_t recent : {40, 500}) {
    const auto arm = make_test_arm(
        g, {.windows = {.sink = 10, .recent = recent}, .key_block = 32, .rotated = true});
    KvCache base(g.config(), arm);
    run(base, g, prefix, 0, 500, {});
    KvCache first = base.fork();
    KvCache second = base.fork();
    // In turns, so that rows written by one would be read by the other.
    const Outputs a0 = run(first, g, left, 0, 60, {1, 40});
    const Outputs b0 = run(second, g, right, 0, 60, {64});
    const Outputs a1 = run(first, g, left, 60, 90, {});
    const Outputs b1 = run(second, g, right, 60, 90, {10});
    const auto alone = [&](const Rows& rows) {
      KvCache cache(g.config(), arm);
      run(cache, g, prefix, 0, 500, {});
      return run(cache, g, rows, 0, 90, {}).o;
    };
    const auto joined = [](std::vector<float> head, const std::vector<float>& tail) {
      head.insert(head.end(), tail.begin(), tail.end());
      return head;
    };
    CHECK(joined(a0.o, a1.o) == alone(left));
    CHECK(joined(b0.o, b1.o) == alone(right));
    CHECK(run(base, g, left, 0, 90, {}).o == alone(left));
  }
}

TEST_CASE("truncate returns to the shorter cache or refuses", "[kv_cache]") {
  const Geometry g{.num_kv_heads = 1, .group = 2, .head_dim = 64};
  const Rows rows = random_rows(g, 400, 10);
  const Rows other = random_rows(g, 50, 12);
  const auto arm = make_test_arm(g, {.windows = {.sink = 64, .recent = 128}});
  KvCache expected(g.config(), arm);
  run(expected, g, rows, 0, 390, {});
  const Outputs want = run(expected, g, other, 0, 50, {});
  KvCache cache(g.config(), arm);
  run(cache, g, rows, 0, 400, {});  // packed up to 272; page 4 (256..319) is still there
  CHECK_THROWS_WITH(cache.truncate(300), Catch::Contains("layer 0: cannot truncate 400 tokens"));
  CHECK(cache.length() == 400);
  cache.truncate(390);
  CHECK(cache.length() == 390);
  CHECK(run(cache, g, other, 0, 50, {}).o == want.o);
  cache.truncate(40);
  CHECK(cache.length() == 40);
  CHECK(cache.counters().tokens_int2_written == 0);
  cache.truncate(0);
  KvCache fresh(g.config(), arm);
  CHECK(run(cache, g, rows, 0, 400, {}).o == run(fresh, g, rows, 0, 400, {}).o);
  KvCache serving = serving_cache();
  const Rows small = random_rows(kSmall, 500, 13);
  run(serving, kSmall, small, 0, 500, {});
  serving.truncate(300);  // what was packed stays packed
  CHECK(split(serving) == Split{64, 56, 180});
  serving.truncate(200);
  CHECK(split(serving) == Split{64, 0, 136});
}

TEST_CASE("a reference cache can be quantized after its prefill", "[kv_cache]") {
  const Geometry g{.num_kv_heads = 2, .group = 2, .head_dim = 64, .num_layers = 2};
  const Rows rows = random_rows(g, 300, 14);
  const Rows next = random_rows(g, 40, 15);
  const auto arm =
      make_test_arm(g, {.windows = {.sink = 64, .recent = 100}, .key_block = 32, .centered = true});
  KvCache reference(g.config(), make_reference_arm(HighPrecision::kFp32));
  KvCache direct(g.config(), arm);
  for (size_t layer = 0; layer < 2; ++layer) {
    run(reference, g, rows, 0, 300, {}, layer);
    run(direct, g, rows, 0, 300, {}, layer);
  }
  KvCache converted = quantize_after_prefill(reference, g.config(), arm);
  CHECK(converted.length() == 300);
  CHECK(converted.counters().tokens_int2_read == 0);
  CHECK(converted.counters().tokens_int2_written == direct.counters().tokens_int2_written);
  // Keys and values of the prefill are the same, so what follows is the same to the bit.
  CHECK(run(converted, g, next, 0, 40, {7}, 1).o == run(direct, g, next, 0, 40, {}, 1).o);
  CHECK_THROWS_WITH(quantize_after_prefill(direct, g.config(), arm),
                    Catch::Contains("needs the cache of a reference arm, got test"));
}

TEST_CASE("arms that do not fit the model are refused", "[kv_cache]") {
  const Geometry g{.num_kv_heads = 2, .group = 2, .head_dim = 64, .num_layers = 2};
  const auto broken = [&](auto change) {
    auto arm = make_test_arm(g, {.rotated = true, .centered = true});
    change(*arm);
    return std::shared_ptr<const KvArm>(arm);
  };
  using Catch::Contains;
  CHECK_THROWS_WITH(KvCache(g.config(), broken([](KvArm& a) { a.layers.pop_back(); })),
                    Contains("has 1 layers, the model 2"));
  CHECK_THROWS_WITH(KvCache(g.config(), broken([](KvArm& a) {
                              a.layers[1].k.rotation = TensorF({2, 64, 32});
                            })),
                    Contains("layer 1, keys: rotation has shape [2, 64, 32]"));
  CHECK_THROWS_WITH(KvCache(g.config(), broken([](KvArm& a) {
                              a.layers[0].v.mean = TensorF({1, 64});
                            })),
                    Contains("layer 0, values: mean has shape [1, 64]"));
  CHECK_THROWS_WITH(KvCache(g.config(), broken([](KvArm& a) { a.layers[0].v.codecs.clear(); })),
                    Contains("0 codecs, expected 1 or 2"));
  CHECK_THROWS_WITH(KvCache(g.config(), broken([](KvArm& a) {
                              a.windows = {60, 256, WindowMode::kServing};
                            })),
                    Contains("a multiple of 8 tokens, got 60"));
}
