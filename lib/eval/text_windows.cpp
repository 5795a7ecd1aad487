#include "eval/text_windows.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "io/sha256.h"

namespace oscar {
namespace {

std::string read_text(const std::string& path) {
  std::error_code problem;
  OSCAR_CHECK(!std::filesystem::is_directory(path, problem), path,
              ": is a folder, expected a text file");
  std::ifstream file(path, std::ios::binary);
  OSCAR_CHECK(file, path, ": cannot open the text file");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  OSCAR_CHECK(!file.bad(), path, ": reading the text file failed");
  OSCAR_CHECK(!text.empty(), path, ": the text is empty");
  return text;
}

size_t parse_count(const std::string& part, size_t prefix, size_t least) {
  size_t value = 0;
  const char* end = part.data() + part.size();
  const auto [stop, problem] = std::from_chars(part.data() + prefix, end, value);
  OSCAR_CHECK(problem == std::errc{} && stop == end && value >= least, "--rows ", part,
              ": expected a whole number >= ", least, " after the colon");
  return value;
}

}  // namespace

std::vector<EvalText> load_texts(const std::vector<std::string>& paths,
                                 const Tokenizer& tokenizer) {
  OSCAR_CHECK(!paths.empty(), "no text was given (--text)");
  std::vector<EvalText> texts;
  for (const std::string& path : paths) {
    EvalText text;
    text.path = path;
    text.text = read_text(path);
    text.tokens = tokenizer.encode(text.text, false);
    text.sha256 = sha256_file(path);
    OSCAR_CHECK(!text.tokens.empty(), path, ": the text has no token");
    texts.push_back(std::move(text));
  }
  return texts;
}

TextWindows cut_windows(const std::vector<EvalText>& texts, size_t length, size_t max_windows) {
  OSCAR_CHECK(length >= 2, "--length ", length, ": a window needs at least 2 tokens");
  TextWindows cut;
  cut.length = length;
  for (size_t index = 0; index < texts.size(); ++index) {
    const size_t available = texts[index].tokens.size() / length;
    OSCAR_CHECK(available > 0, texts[index].path, ": has ", texts[index].tokens.size(),
                " tokens, expected at least one window of ", length, " (--length)");
    const size_t taken = max_windows == 0 ? available : std::min(available, max_windows);
    for (size_t window = 0; window < taken; ++window) {
      cut.windows.push_back({index, window * length});
    }
    if (taken == available) cut.tokens_dropped += texts[index].tokens.size() % length;
  }
  return cut;
}

RowSelection parse_row_selection(const std::string& text) {
  RowSelection selection;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, comma - begin);
    if (part == "auto") {
      selection.automatic = true;
    } else if (part.starts_with("from:")) {
      selection.first_target = parse_count(part, 5, 0);
    } else if (part.starts_with("tail:")) {
      selection.tail = parse_count(part, 5, 1);
    } else if (part.starts_with("stride:")) {
      selection.stride = parse_count(part, 7, 1);
    } else {
      OSCAR_CHECK(part == "all", "--rows \"", part,
                  "\": expected auto, all, from:P, tail:N, stride:K, or several joined by commas");
    }
    begin = comma + 1;
  }
  return selection;
}

std::vector<size_t> scored_targets(const RowSelection& selection, size_t length, bool with_bos,
                                   size_t high_precision_tokens) {
  const size_t lowest = with_bos ? 0 : 1;
  size_t first = std::max(lowest, selection.first_target);
  if (selection.automatic) first = std::max({first, length / 2, high_precision_tokens + 64});
  if (selection.tail > 0 && selection.tail < length) {
    first = std::max(first, length - selection.tail);
  }
  OSCAR_CHECK(first < length, "no row is left to score: the first target is position ", first,
              " but the window has ", length, " tokens (--length, --rows)");
  std::vector<size_t> targets;
  for (size_t target = first; target < length; target += selection.stride) {
    targets.push_back(target);
  }
  return targets;
}

size_t position_bucket(size_t length) { return length <= 8192 ? 512 : 4096; }

}  // namespace oscar
