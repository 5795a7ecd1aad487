// The thread pool: every item once, exceptions arrive, nesting is serial.
#include <atomic>
#include <catch2/catch.hpp>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"

using namespace oscar;

TEST_CASE("parallel_for runs every item exactly once", "[parallel]") {
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    CHECK(num_threads() == threads);
    for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{1000}}) {
      std::vector<std::atomic<int>> hits(count);
      parallel_for(count, [&](size_t item) { ++hits[item]; });
      for (const std::atomic<int>& hit : hits) CHECK(hit == 1);
    }
  }
  set_num_threads(0);
}

TEST_CASE("parallel_for_ranges covers the range without overlap", "[parallel]") {
  std::vector<std::atomic<int>> hits(103);
  parallel_for_ranges(103, 10, [&](size_t begin, size_t end) {
    CHECK(end - begin <= 10);
    for (size_t i = begin; i < end; ++i) ++hits[i];
  });
  for (const std::atomic<int>& hit : hits) CHECK(hit == 1);
  CHECK_THROWS_AS(parallel_for_ranges(3, 0, [](size_t, size_t) {}), Error);
}

TEST_CASE("an exception of an item reaches the caller and the pool stays usable", "[parallel]") {
  set_num_threads(3);
  CHECK_THROWS_WITH(parallel_for(50, [](size_t item) { OSCAR_CHECK(item != 20, "item ", item); }),
                    "item 20");
  std::atomic<int> sum{0};
  parallel_for(10, [&](size_t) { parallel_for(10, [&](size_t) { ++sum; }); });
  CHECK(sum == 100);
  set_num_threads(0);
}
