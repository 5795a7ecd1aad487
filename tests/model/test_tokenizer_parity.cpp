// Tokenizers of real models against reference ids (HF tokenizers): the fixtures beside the checkout
// where they are, and a few published vectors.
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "io/sha256.h"
#include "model/tokenizer.h"
#include "model/unicode_text.h"
#include "tests/support/paths.h"

namespace oscar {
namespace {

using oscar_test::shared;
using Ids = std::vector<int32_t>;

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  REQUIRE(in.good());
  return text.str();
}

// The Qwen3 tokenizer of the reference material, unpacked beside its configuration; null when it is
// not there.
std::shared_ptr<const Tokenizer> load_qwen3(const oscar_test::TemporaryFolder& folder) {
  const auto packed = shared("tokenizers/qwen3/tokenizer.json.xz");
  if (!packed) return nullptr;
  const std::string command =
      "xz -dc '" + packed->string() + "' > '" + (folder / "tokenizer.json").string() + "'";
  if (std::system(command.c_str()) != 0) return nullptr;
  std::filesystem::copy_file(packed->parent_path() / "tokenizer_config.json",
                             folder / "tokenizer_config.json");
  return Tokenizer::load(folder.path().string());
}

// Every property that must hold for any text: ids as expected, decoding gives the text back (its
// NFC for Qwen), offsets tile the text.
void check_text(const Tokenizer& tokenizer, const std::string& text, const Ids& expected) {
  INFO("text: " << text);
  const Ids ids = tokenizer.encode(text, true);
  CHECK(ids == expected);
  std::string normal;
  const bool changed = tokenizer.pre_tokenizer() == "qwen2" && normalize_nfc(text, normal, nullptr);
  CHECK(tokenizer.decode(ids) == (changed ? normal : text));

  Ids ids_with_offsets;
  const auto spans = tokenizer.offsets(text, true, &ids_with_offsets);
  CHECK(ids_with_offsets == ids);
  REQUIRE(spans.size() == ids.size());
  size_t covered = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    CHECK(spans[i].first <= covered);
    CHECK(spans[i].second >= covered);
    covered = spans[i].second;
    if (changed) continue;
    CHECK(text.substr(spans[i].first, spans[i].second - spans[i].first) ==
          tokenizer.decode({ids[i]}));
  }
  CHECK(covered == text.size());
}

void check_strings(const Tokenizer& tokenizer, const std::string& key) {
  const auto items = nlohmann::json::parse(read_text(*shared("fixtures/tokens/strings.json")));
  REQUIRE(items["items"].size() > 100);
  for (const auto& item : items["items"]) {
    check_text(tokenizer, item["text"].get<std::string>(), item[key].get<Ids>());
  }
}

void check_books(const Tokenizer& tokenizer, const std::string& key) {
  const auto books = nlohmann::json::parse(read_text(*shared("fixtures/tokens/books.json")));
  for (const auto& [file, expected] : books.items()) {
    const auto path = oscar_test::demo_text(file.substr(0, file.find('.')));
    SKIP_UNLESS(path, "no " + file);
    INFO(file);
    const Ids ids = tokenizer.encode(read_text(*path), true);
    const auto& reference = expected[key];
    REQUIRE(ids.size() == reference["n"].get<size_t>());
    CHECK(Ids(ids.begin(), ids.begin() + 8) == reference["first8"].get<Ids>());
    CHECK(Ids(ids.end() - 8, ids.end()) == reference["last8"].get<Ids>());
    CHECK(sha256_hex(ids.data(), ids.size() * sizeof(int32_t)) ==
          reference["sha256_le_u32"].get<std::string>());
  }
}

}  // namespace

TEST_CASE("SmolLM2 ids of the demo model", "[model]") {
  const auto path = oscar_test::demo_model();
  SKIP_UNLESS(path, "no demo model");
  const auto tokenizer = Tokenizer::load(path->string());
  CHECK(tokenizer->pre_tokenizer() == "smollm");
  CHECK(tokenizer->vocab_size() == 49152);
  CHECK(tokenizer->num_merges() == 48900);
  CHECK(tokenizer->bos_id() == 1);
  CHECK_FALSE(tokenizer->add_bos());
  CHECK(tokenizer->stop_ids() == std::vector<int64_t>{2});
  CHECK(tokenizer->sha256().size() == 64);
  CHECK(tokenizer->encode("The year 2026 has 365 days.", true) ==
        Ids{504, 713, 216, 34, 32, 34, 38, 553, 216, 35, 38, 37, 2009, 30});
  // Special tokens are text unless they are asked for.
  CHECK(tokenizer->encode("<|im_end|>", true) == Ids{2});
  const Ids as_text = tokenizer->encode("<|im_end|>", false);
  CHECK(as_text.size() > 3);
  CHECK(tokenizer->decode(as_text) == "<|im_end|>");
  CHECK(tokenizer->decode({2}, true).empty());
}

TEST_CASE("SmolLM2 agrees with the reference ids", "[model]") {
  const auto path = oscar_test::demo_model();
  SKIP_UNLESS(path && shared("fixtures/tokens/strings.json"), "no demo model or fixtures");
  const auto tokenizer = Tokenizer::load(path->string());
  check_strings(*tokenizer, "smollm2");
  check_books(*tokenizer, "smollm2");
}

TEST_CASE("Qwen2.5 agrees with the reference ids") {
  const auto path = oscar_test::qwen_model();
  SKIP_UNLESS(path && shared("fixtures/tokens/strings.json"), "no Qwen2.5 model or fixtures");
  const auto tokenizer = Tokenizer::load(path->string());
  CHECK(tokenizer->pre_tokenizer() == "qwen2");
  CHECK(tokenizer->vocab_size() == 151936);
  check_strings(*tokenizer, "qwen25");
  check_books(*tokenizer, "qwen25");
}

TEST_CASE("Qwen3 agrees with the reference ids") {
  const oscar_test::TemporaryFolder folder;
  const auto tokenizer = load_qwen3(folder);
  SKIP_UNLESS(tokenizer && shared("fixtures/tokens/strings.json"), "no Qwen3 tokenizer or xz");
  CHECK(tokenizer->pre_tokenizer() == "qwen2");
  CHECK(tokenizer->num_merges() == 151387);
  CHECK(tokenizer->bos_id() == -1);
  CHECK(tokenizer->stop_ids() == std::vector<int64_t>{151645});
  CHECK(tokenizer->encode("KV cache = 2.28 bits", true) ==
        Ids{82707, 6500, 284, 220, 17, 13, 17, 23, 9472});
  CHECK(tokenizer->encode("x=10\n\n\ty", true) == Ids{87, 28, 16, 15, 271, 14522});
  check_strings(*tokenizer, "qwen3");
  check_books(*tokenizer, "qwen3");

  ChatOptions options;
  options.thinking = false;
  CHECK(render_chat(*tokenizer, {{"user", "Hi"}}, options) ==
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
}

}  // namespace oscar
