#include "calib/gates.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "linalg/eigen.h"

namespace oscar {
namespace {

constexpr size_t kWarmUpTokens = 16;

bool same_head(const float* rows, size_t num_tokens, size_t heads, size_t head_dim, size_t a,
               size_t b) {
  for (size_t t = 0; t < num_tokens; ++t) {
    const float* row = rows + t * heads * head_dim;
    if (std::memcmp(row + a * head_dim, row + b * head_dim, head_dim * sizeof(float)) != 0)
      return false;
  }
  return true;
}

}  // namespace

void check_token_count(size_t tokens, size_t head_dim, std::vector<std::string>& warnings) {
  OSCAR_CHECK(tokens >= head_dim, "calibration: ", tokens, " tokens for head_dim ", head_dim,
              ": expected at least ", head_dim, ", better ", 8 * head_dim, " or more");
  const size_t wanted = std::max(kFewTokens, 8 * head_dim);
  if (tokens < wanted)
    warnings.push_back(
        cat("only ", tokens, " tokens behind the statistics, at least ", wanted, " are advised"));
}

void check_head_coverage(const HeadGeometry& found, const HeadGeometry& expected,
                         const std::string& where) {
  OSCAR_CHECK(found.head_dim == expected.head_dim, where, ": head_dim ", found.head_dim,
              ", the model has ", expected.head_dim);
  OSCAR_CHECK(found.num_heads == expected.num_heads && found.num_kv_heads == expected.num_kv_heads,
              where, ": ", found.num_heads, " query and ", found.num_kv_heads,
              " KV heads, the model has ", expected.num_heads, " and ", expected.num_kv_heads,
              " (the share of one tensor-parallel rank?)");
}

void check_duplicate_heads(size_t layer, const char* tensor, const float* rows, size_t num_tokens,
                           size_t heads, size_t head_dim) {
  for (size_t a = 0; a < heads; ++a)
    for (size_t b = a + 1; b < heads; ++b)
      OSCAR_CHECK(!same_head(rows, num_tokens, heads, head_dim, a, b), "layer ", layer, ", tensor ",
                  tensor, ": heads ", a, " and ", b,
                  " are bit-identical (replicated heads of a tensor-parallel dump?)");
}

size_t warm_up_sequences(const std::vector<size_t>& sequence_offsets) {
  if (sequence_offsets.size() < 3) return 0;
  std::vector<size_t> lengths;
  for (size_t s = 1; s < sequence_offsets.size(); ++s)
    lengths.push_back(sequence_offsets[s] - sequence_offsets[s - 1]);
  const size_t first = lengths.front();
  std::nth_element(lengths.begin(),
                   lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / 2),
                   lengths.end());
  return first <= kWarmUpTokens && first * 10 < lengths[lengths.size() / 2] ? 1 : 0;
}

void check_rank(size_t layer, const std::string& what, const std::vector<double>& eigenvalues,
                std::vector<std::string>& warnings) {
  const size_t rank = numerical_rank(eigenvalues);
  if (rank < eigenvalues.size())
    warnings.push_back(
        cat("layer ", layer, ": ", what, " has rank ", rank, " of ", eigenvalues.size()));
}

}  // namespace oscar
