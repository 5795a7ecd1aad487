#include "calib/text_sequences.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <span>

#include "base/error.h"
#include "io/sha256.h"

namespace oscar {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  OSCAR_CHECK(file.good(), path, ": cannot open the text");
  std::string text(std::istreambuf_iterator<char>(file), {});
  OSCAR_CHECK(!file.bad(), path, ": cannot read the text");
  OSCAR_CHECK(!text.empty(), path, ": the text is empty");
  return text;
}

// Cuts one text; its share of the budget is divided evenly over the lengths. skipped: tokens of the
// text before the first of `ids`.
void cut(std::span<const int32_t> ids, size_t budget, const std::vector<size_t>& lengths,
         const std::string& path, int64_t text, size_t skipped, TextSequences& result) {
  const auto take = [&](size_t position, size_t count) {
    const auto tokens = ids.subspan(position, count);
    result.sequences.emplace_back(tokens.begin(), tokens.end());
    result.origins.push_back({.text = text,
                              .first_token = static_cast<int64_t>(skipped + position),
                              .tokens = static_cast<int64_t>(count)});
  };
  const size_t shortest = *std::min_element(lengths.begin(), lengths.end());
  size_t position = 0;
  std::vector<size_t> taken(lengths.size(), 0);
  while (true) {
    // The length with the fewest tokens so far that still fits text and budget.
    size_t best = lengths.size();
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (position + lengths[i] > ids.size() || position + lengths[i] > budget) continue;
      if (best == lengths.size() || taken[i] < taken[best]) best = i;
    }
    if (best == lengths.size()) break;
    take(position, lengths[best]);
    position += lengths[best];
    taken[best] += lengths[best];
  }
  if (position == 0) {
    const size_t count = std::min(ids.size(), budget);
    take(0, count);
    result.warnings.push_back(cat(path, ": ", ids.size(), " tokens, of which ", budget,
                                  " are wanted, give one sequence of ", count,
                                  " instead of the length ", shortest));
  } else if (position + shortest <= budget) {
    result.warnings.push_back(cat(path, ": only ", position, " of the ", budget, " tokens wanted"));
  }
}

}  // namespace

size_t TextSequences::num_tokens() const {
  size_t count = 0;
  for (const auto& sequence : sequences) count += sequence.size();
  return count;
}

void check_context(const std::vector<size_t>& lengths, const ModelConfig& config,
                   const std::string& model) {
  for (const size_t length : lengths)
    OSCAR_CHECK(length <= config.context_length, "--seq-len ", length, ": the context of ", model,
                " is ", config.context_length, " tokens");
}

TextSequences load_text_sequences(const std::vector<std::string>& paths, const Tokenizer& tokenizer,
                                  const TextOptions& options) {
  OSCAR_CHECK(!paths.empty(), "--text: expected at least one file");
  OSCAR_CHECK(options.num_tokens > 0, "--tokens: expected a positive number");
  OSCAR_CHECK(!options.lengths.empty(), "--seq-len: expected at least one length");
  for (const size_t length : options.lengths)
    OSCAR_CHECK(length > 0, "--seq-len: expected positive lengths, got 0");
  TextSequences result;
  std::string hashes;
  const size_t budget = (options.num_tokens + paths.size() - 1) / paths.size();
  for (const std::string& path : paths) {
    const std::string text = read_text(path);
    if (!hashes.empty()) hashes += ',';
    hashes += sha256_hex(text);
    const std::vector<int32_t> ids = tokenizer.encode(text, false);
    OSCAR_CHECK(!ids.empty(), path, ": the text has no tokens");
    OSCAR_CHECK(options.skip_tokens < ids.size(), "--skip-tokens ", options.skip_tokens, ": ", path,
                " has ", ids.size(), " tokens");
    cut(std::span(ids).subspan(options.skip_tokens), budget, options.lengths, path,
        static_cast<int64_t>(std::count(hashes.begin(), hashes.end(), ',')), options.skip_tokens,
        result);
  }
  result.text_sha256 = hashes;
  return result;
}

}  // namespace oscar
