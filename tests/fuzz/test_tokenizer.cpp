// Damaged tokenizers: loading succeeds or throws oscar::Error, and what was loaded can be used.
#include <catch2/catch.hpp>

#include "base/error.h"
#include "fuzz/mutate.h"
#include "fuzz/outcome.h"
#include "model/tokenizer.h"
#include "model/tokenizer_builder.h"
#include "support/paths.h"

using namespace oscar;
using oscar_test::Bytes;
using oscar_test::Mutator;
using oscar_test::Outcome;
using oscar_test::TemporaryFolder;

namespace {

void use(const std::string& path) {
  const auto tokenizer = Tokenizer::load(path);
  const std::string text = "abc <s>aabc[x] 12\xc3\xa9\xff";
  for (const bool special : {false, true}) {
    std::vector<int32_t> ids;
    tokenizer->offsets(text, special, &ids);
    tokenizer->decode(tokenizer->encode(text, special), special);
  }
  REQUIRE(tokenizer->sha256().size() == 64);
  REQUIRE(tokenizer->stop_ids().size() <= tokenizer->vocab_size());
}

}  // namespace

TEST_CASE("damaged tokenizers in GGUF files", "[fuzz]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "t.gguf").string();
  auto builder = oscar_test::small_tokenizer();
  builder.pre = "qwen2";
  auto writer = builder.gguf();
  writer.u32("tokenizer.ggml.eos_token_id", 3);
  writer.boolean("tokenizer.ggml.add_bos_token", true);
  writer.u32("tokenizer.ggml.bos_token_id", 2);
  const Bytes seed = writer.bytes();
  Mutator mutator(5);
  Outcome outcome;
  for (int i = 0; i < 1500; ++i) {
    oscar_test::write_file(path, mutator.mutate(seed, seed.size()));
    outcome.run([&] { use(path); });
  }
  CHECK(outcome.accepted > 50);
  CHECK(outcome.refused > 500);
}

TEST_CASE("damaged tokenizer.json files", "[fuzz]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "tokenizer.json").string();
  auto builder = oscar_test::small_tokenizer();
  builder.pre = "qwen2";
  const Bytes seed = oscar_test::to_bytes(builder.json().dump());
  Mutator mutator(6);
  Outcome outcome;
  for (int i = 0; i < 1500; ++i) {
    oscar_test::write_file(path, mutator.mutate(seed, seed.size()));
    outcome.run([&] { use(path); });
  }
  CHECK(outcome.accepted > 50);
  CHECK(outcome.refused > 200);
}

TEST_CASE("a tokenizer.json nested a million deep is refused, not followed", "[fuzz]") {
  const TemporaryFolder folder;
  const std::string path = (folder / "tokenizer.json").string();
  constexpr size_t kDepth = 1000000;
  std::string deep = oscar_test::small_tokenizer().json().dump();
  const std::string type = "\"type\":\"BPE\"";
  deep.replace(deep.find(type), type.size(),
               cat("\"type\":", std::string(kDepth, '['), std::string(kDepth, ']')));
  oscar_test::write_file(path, deep);
  CHECK_THROWS_WITH(Tokenizer::load(path), Catch::Contains("nested deeper than 64"));
}
