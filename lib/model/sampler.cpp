#include "model/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/random.h"
#include "io/sha256.h"

namespace oscar {
namespace {

void check_logits(const float* logits, size_t vocab) {
  bool any = false;
  for (size_t i = 0; i < vocab; ++i) {
    OSCAR_CHECK(!std::isnan(logits[i]) && logits[i] != std::numeric_limits<float>::infinity(),
                "sampling: logit of token ", i, " is ", logits[i]);
    any = any || std::isfinite(logits[i]);
  }
  OSCAR_CHECK(any, "sampling: none of the ", vocab, " logits is finite");
}

}  // namespace

void check_sampling_options(const SamplingOptions& options) {
  OSCAR_CHECK(std::isfinite(options.temperature) && options.temperature >= 0.0,
              "--temperature: expected a number >= 0, got ", options.temperature);
  OSCAR_CHECK(options.top_p > 0.0 && options.top_p <= 1.0,
              "--top-p: expected a number in (0, 1], got ", options.top_p);
}

int32_t argmax_token(const float* logits, size_t vocab) {
  check_logits(logits, vocab);
  return static_cast<int32_t>(std::max_element(logits, logits + vocab) - logits);
}

int32_t sample_token(const float* logits, size_t vocab, const SamplingOptions& options,
                     uint64_t token_index) {
  check_sampling_options(options);
  if (options.temperature == 0.0) return argmax_token(logits, vocab);
  check_logits(logits, vocab);
  std::vector<int32_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const size_t kept = options.top_k == 0 ? vocab : std::min(options.top_k, vocab);
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                    before);
  const double largest = static_cast<double>(logits[order[0]]);
  std::vector<double> mass(kept);
  for (size_t i = 0; i < kept; ++i) {
    const double logit = static_cast<double>(logits[order[i]]);
    mass[i] = std::exp((logit - largest) / options.temperature);
  }
  const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
  // The smallest prefix that holds at least top_p of the mass.
  double prefix_mass = 0.0;
  size_t prefix = 0;
  while (prefix < kept && (prefix == 0 || prefix_mass < options.top_p * total))
    prefix_mass += mass[prefix++];
  const double target = uniform_at(options.seed, token_index) * prefix_mass;
  double cumulative = 0.0;
  size_t last_possible = 0;
  for (size_t i = 0; i < prefix; ++i) {
    cumulative += mass[i];
    if (mass[i] > 0.0) last_possible = i;
    if (target < cumulative) return order[i];
  }
  return order[last_possible];  // rounding left the target just above the sum
}

uint64_t request_seed(uint64_t base, std::string_view benchmark, std::string_view item,
                      uint64_t sample) {
  std::string text = std::to_string(base);
  text += '\x1f';
  text += benchmark;
  text += '\x1f';
  text += item;
  text += '\x1f';
  text += std::to_string(sample);
  const std::string digest = sha256_hex(text);
  uint64_t seed = 0;
  for (size_t byte = 8; byte-- > 0;)
    seed = (seed << 8U) | std::stoul(digest.substr(2 * byte, 2), nullptr, 16);
  return seed;
}

}  // namespace oscar
