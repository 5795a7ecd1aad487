#include <catch2/catch.hpp>
#include <fstream>

#include "base/error.h"
#include "eval/text_windows.h"
#include "support/paths.h"

namespace {

using namespace oscar;

// One token a byte.
class ByteTokenizer : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text, bool) const override {
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  std::string decode(const std::vector<int32_t>&, bool) const override { return ""; }
  std::vector<std::pair<size_t, size_t>> offsets(std::string_view, bool,
                                                 std::vector<int32_t>*) const override {
    return {};
  }
  size_t vocab_size() const override { return 256; }
  size_t num_merges() const override { return 0; }
  int64_t bos_id() const override { return -1; }
  bool add_bos() const override { return false; }
  std::vector<int64_t> stop_ids() const override { return {}; }
  std::string pre_tokenizer() const override { return "bytes"; }
  std::string sha256() const override { return "bytes"; }
  std::string chat_template() const override { return ""; }
};

EvalText text_of(size_t tokens) {
  EvalText text;
  text.path = "novel.txt";
  text.tokens.assign(tokens, 1);
  return text;
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace

TEST_CASE("texts are read whole, hashed and tokenized once") {
  oscar_test::TemporaryFolder folder;
  write(folder / "abc.txt", "abc");
  const auto texts = load_texts({(folder / "abc.txt").string()}, ByteTokenizer());
  REQUIRE(texts.size() == 1);
  CHECK(texts[0].tokens == std::vector<int32_t>{97, 98, 99});
  CHECK(texts[0].sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST_CASE("missing, empty and impossible texts are refused by name") {
  oscar_test::TemporaryFolder folder;
  write(folder / "empty.txt", "");
  const ByteTokenizer tokenizer;
  CHECK_THROWS_WITH(load_texts({(folder / "empty.txt").string()}, tokenizer),
                    Catch::Contains("empty.txt") && Catch::Contains("empty"));
  CHECK_THROWS_WITH(load_texts({(folder / "absent.txt").string()}, tokenizer),
                    Catch::Contains("absent.txt"));
  CHECK_THROWS_WITH(load_texts({folder.path().string()}, tokenizer), Catch::Contains("folder"));
  CHECK_THROWS_AS(load_texts({}, tokenizer), Error);
}

TEST_CASE("windows are complete, do not overlap and are counted per text") {
  const std::vector<EvalText> texts{text_of(1050), text_of(700)};
  const TextWindows all = cut_windows(texts, 200, 0);
  REQUIRE(all.windows.size() == 8);
  CHECK(all.windows[4].first_token == 800);
  CHECK(all.windows[5].text == 1);
  CHECK(all.windows[5].first_token == 0);
  CHECK(all.tokens_dropped == 50 + 100);
  CHECK(cut_windows(texts, 200, 2).windows.size() == 4);
  CHECK(cut_windows(texts, 200, 2).tokens_dropped == 0);
  CHECK_THROWS_WITH(cut_windows(texts, 1000, 0),
                    Catch::Contains("novel.txt") && Catch::Contains("700"));
  CHECK_THROWS_AS(cut_windows(texts, 1, 0), Error);
}

TEST_CASE("rows to score") {
  const auto targets = [](const std::string& text, size_t length, bool bos = false,
                          size_t windows = 0) {
    return scored_targets(parse_row_selection(text), length, bos, windows);
  };
  SECTION("all: the first token has no prediction unless a BOS stands before it") {
    CHECK(targets("all", 8192).size() == 8191);
    CHECK(targets("all", 8).front() == 1);
    CHECK(targets("all", 8, true).front() == 0);
  }
  SECTION("from, tail, stride and their combination") {
    const auto from = targets("from:512", 1024);
    CHECK(from.size() == 512);
    CHECK(from.front() == 512);
    CHECK(from.back() == 1023);
    CHECK(targets("tail:16", 1024) == targets("from:1008", 1024));
    CHECK(targets("tail:99", 8) == targets("all", 8));
    CHECK(targets("from:512,stride:32", 1024).size() == 16);
    CHECK(targets("stride:3", 8) == std::vector<size_t>{1, 4, 7});
  }
  SECTION("auto: behind the windows and in the second half") {
    CHECK(targets("auto", 2048, false, 320).front() == 1024);
    CHECK(targets("auto", 600, false, 320).front() == 384);
  }
  SECTION("nothing left, or not understood") {
    CHECK_THROWS_AS(targets("from:1024", 1024), Error);
    CHECK_THROWS_AS(targets("auto", 384, false, 320), Error);
    for (const char* bad : {"", "some", "from:", "from:x", "tail:0", "stride:0", "tail:-1", "all,",
                            "from:1x", "from:99999999999999999999999"}) {
      INFO(bad);
      CHECK_THROWS_AS(parse_row_selection(bad), Error);
    }
  }
}
