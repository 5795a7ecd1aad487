// The tokenizer of a GGUF file (formats.md 10.2 and 12).
#include "base/error.h"
#include "io/gguf.h"
#include "model/tokenizer_spec.h"

namespace oscar {
namespace {

TokenKind kind_of(int64_t type, size_t index, const std::string& file) {
  switch (type) {
    case 1:
      return TokenKind::kNormal;
    case 2:  // the unknown token is a special one
    case 3:
      return TokenKind::kControl;
    case 4:
      return TokenKind::kUserDefined;
    case 5:
      return TokenKind::kUnused;
    case 6:
      return TokenKind::kByte;
    default:
      fail(file, ": tokenizer.ggml.token_type[", index, "] is ", type, ", expected 1..6");
  }
}

std::pair<std::string, std::string> split_merge(std::string_view merge, size_t index,
                                                const std::string& file) {
  const size_t space = merge.find(' ', 1);
  OSCAR_CHECK(space != std::string_view::npos && space + 1 < merge.size(), file,
              ": tokenizer.ggml.merges[", index, "] is \"", merge,
              "\", expected two symbols separated by a space");
  return {std::string(merge.substr(0, space)), std::string(merge.substr(space + 1))};
}

}  // namespace

TokenizerSpec read_gguf_tokenizer(const std::string& path) {
  const std::shared_ptr<const GgufFile> file = GgufFile::open(path);
  TokenizerSpec spec;
  spec.file = path;
  const std::string model(file->string("tokenizer.ggml.model"));
  OSCAR_CHECK(model == "gpt2", path, ": tokenizer.ggml.model is \"", model,
              "\", expected \"gpt2\" (byte-level BPE)");
  spec.pre_tokenizer_name = file->string("tokenizer.ggml.pre");
  spec.pre_tokenizer = pre_tokenizer_of(spec.pre_tokenizer_name, path);
  const std::string& pre = spec.pre_tokenizer_name;

  const std::vector<std::string_view> tokens = file->strings("tokenizer.ggml.tokens");
  const std::vector<int64_t> types = file->integers("tokenizer.ggml.token_type");
  OSCAR_CHECK(tokens.size() == types.size(), path, ": tokenizer.ggml.tokens has ", tokens.size(),
              " entries but tokenizer.ggml.token_type has ", types.size());
  spec.tokens.assign(tokens.begin(), tokens.end());
  spec.kinds.reserve(types.size());
  for (size_t i = 0; i < types.size(); ++i) {
    const TokenKind kind = kind_of(types[i], i, path);
    spec.kinds.push_back(kind);
    if (kind != TokenKind::kControl && kind != TokenKind::kUserDefined) continue;
    AddedToken added;
    added.id = static_cast<int32_t>(i);
    added.content = spec.tokens[i];
    added.special = kind == TokenKind::kControl;
    spec.added.push_back(std::move(added));
  }
  const std::vector<std::string_view> merges = file->strings("tokenizer.ggml.merges");
  spec.merges.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    spec.merges.push_back(split_merge(merges[i], i, path));
  }

  // GGUF carries no normalizer; the tokenizer.json of every qwen2 model has NFC.
  spec.nfc = pre == "qwen2";
  spec.ignore_merges = pre == "llama-bpe";
  const bool is_glm = pre == "glm4" || pre == "chatglm-bpe";
  spec.bos_id = is_glm ? -1 : file->integer("tokenizer.ggml.bos_token_id", -1);
  spec.add_bos = !is_glm && file->boolean("tokenizer.ggml.add_bos_token", pre == "llama-bpe");
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    const int64_t id = file->integer(key, -1);
    if (id >= 0) spec.eos_ids.push_back(id);
  }
  spec.chat_template = file->string("tokenizer.chat_template", "");
  return spec;
}

}  // namespace oscar
