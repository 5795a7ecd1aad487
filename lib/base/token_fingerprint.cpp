#include "base/token_fingerprint.h"

#include <algorithm>
#include <iterator>

namespace oscar {
namespace {

constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ULL;  // odd: the rolling hash is modulo 2^64
constexpr size_t kFewestDistinct = 8;

// Finalizer of splitmix64: every bit of the sum reaches every bit of the result.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31U);
}

uint64_t value(int32_t token) {
  return mix(static_cast<uint64_t>(static_cast<uint32_t>(token)) + 1);
}

bool has_variety(std::span<const int32_t> run) {
  std::vector<int32_t> tokens(run.begin(), run.end());
  std::sort(tokens.begin(), tokens.end());
  return static_cast<size_t>(std::unique(tokens.begin(), tokens.end()) - tokens.begin()) >=
         kFewestDistinct;
}

}  // namespace

std::vector<int64_t> token_fingerprints(std::span<const int32_t> tokens) {
  std::vector<int64_t> found;
  uint64_t hash = 0, oldest_factor = 1;
  for (size_t i = 1; i < kFingerprintTokens; ++i) oldest_factor *= kFactor;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i >= kFingerprintTokens) hash -= value(tokens[i - kFingerprintTokens]) * oldest_factor;
    hash = hash * kFactor + value(tokens[i]);
    if (i + 1 < kFingerprintTokens) continue;
    const uint64_t mixed = mix(hash);
    if (mixed % kFingerprintSpacing == 0 &&
        has_variety(tokens.subspan(i + 1 - kFingerprintTokens, kFingerprintTokens)))
      found.push_back(static_cast<int64_t>(mixed));
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::vector<int64_t> merged_fingerprints(const std::vector<int64_t>& a,
                                         const std::vector<int64_t>& b) {
  std::vector<int64_t> both;
  std::set_union(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both;
}

size_t shared_fingerprints(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  std::vector<int64_t> common;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(common));
  return common.size();
}

}  // namespace oscar
