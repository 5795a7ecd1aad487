// Next-token sampling with a stream of uniform numbers that depends only on seed and token index
// (evaluation.md 6), so that all arms draw the same numbers for the same request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

struct SamplingOptions {
  double temperature = 1.0;  // 0: argmax, lowest id on ties
  size_t top_k = 40;         // 0: off
  double top_p = 0.95;       // 1: off
  uint64_t seed = 0;
};

// Throws Error naming the option: temperature < 0, top_p outside (0, 1], non-finite values.
void check_sampling_options(const SamplingOptions& options);

// Token for step `token_index` (0-based count of generated tokens) from logits [vocab]. Logits of
// -infinity are never chosen; throws Error when a logit is NaN or +infinity, or none is finite.
int32_t sample_token(const float* logits, size_t vocab, const SamplingOptions& options,
                     uint64_t token_index);

// Id of the largest logit, the lowest one on ties. Same errors.
int32_t argmax_token(const float* logits, size_t vocab);

// Seed of a request: the first 8 bytes, little-endian, of SHA-256 over "base\x1fbenchmark\x1fitem
// \x1fsample" (decimal numbers).
uint64_t request_seed(uint64_t base, std::string_view benchmark, std::string_view item,
                      uint64_t sample);

}  // namespace oscar
