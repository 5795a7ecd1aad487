// Fingerprints of a token stream: hashes of short runs of tokens, chosen by their content, so that
// two texts that share a passage share fingerprints wherever the passage stands in either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace oscar {

// Tokens behind one fingerprint, and how many runs there are for each one that is kept.
inline constexpr size_t kFingerprintTokens = 32;
inline constexpr uint64_t kFingerprintSpacing = 16;

// Hashes of the runs of kFingerprintTokens tokens that are a multiple of kFingerprintSpacing (about
// one in 16), ascending, each once. Empty for shorter sequences. Runs of fewer than 8 different
// tokens (dashes, padding) are left out.
std::vector<int64_t> token_fingerprints(std::span<const int32_t> tokens);

// The sorted union of two sorted lists.
std::vector<int64_t> merged_fingerprints(const std::vector<int64_t>& a,
                                         const std::vector<int64_t>& b);

// How many members two sorted lists have in common.
size_t shared_fingerprints(const std::vector<int64_t>& a, const std::vector<int64_t>& b);

}  // namespace oscar
