#include <algorithm>
#include <catch2/catch.hpp>

#include "base/random.h"
#include "base/token_fingerprint.h"

using namespace oscar;

namespace {

std::vector<int32_t> random_tokens(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(50000));
  return tokens;
}

}  // namespace

TEST_CASE("a shared passage is found wherever it stands") {
  const auto a = random_tokens(1, 4000);
  auto b = random_tokens(2, 3000);
  CHECK(shared_fingerprints(token_fingerprints(a), token_fingerprints(b)) == 0);
  b.insert(b.begin() + 1234, a.begin() + 777, a.begin() + 777 + 400);
  const auto found = token_fingerprints(b);
  const size_t shared = shared_fingerprints(token_fingerprints(a), found);
  CHECK(shared == token_fingerprints(std::span(a).subspan(777, 400)).size());
  CHECK(shared > 8);  // 369 runs, one in 16
  CHECK(shared < 50);
  CHECK(std::is_sorted(found.begin(), found.end()));
}

TEST_CASE("short and monotonous sequences have no fingerprints") {
  CHECK(token_fingerprints(random_tokens(3, kFingerprintTokens - 1)).empty());
  CHECK(token_fingerprints(std::vector<int32_t>(5000, 7)).empty());
  CHECK(token_fingerprints({}).empty());
}

TEST_CASE("fingerprints of parts merge into those of the whole where no run is cut") {
  const auto a = random_tokens(4, 1000), b = random_tokens(5, 1000);
  const auto both = merged_fingerprints(token_fingerprints(a), token_fingerprints(b));
  CHECK(both.size() == token_fingerprints(a).size() + token_fingerprints(b).size());
  CHECK(merged_fingerprints(both, both) == both);
}
