#include "model/tokenizer.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "io/sha256.h"
#include "model/added_tokens.h"
#include "model/bpe.h"
#include "model/piece_cache.h"
#include "model/tokenizer_spec.h"
#include "model/unicode_text.h"

namespace oscar {
namespace {

using Spans = std::vector<std::pair<size_t, size_t>>;

// Pieces above this length are merged anew: they hardly ever repeat.
constexpr size_t kMaxCachedPiece = 256;

void append_number(uint64_t value, std::string& out) {
  for (int shift = 0; shift < 64; shift += 8) {
    out.push_back(static_cast<char>((value >> shift) & 0xFF));
  }
}
void append_text(const std::string& text, std::string& out) {
  append_number(text.size(), out);
  out += text;
}

// Hash of everything that decides ids, the same for a GGUF file and the tokenizer.json it was made
// from (unused tokens, where padding differs, do not count).
std::string hash_of(const TokenizerSpec& spec) {
  std::string all = "oscar-tokenizer 1\n" + spec.pre_tokenizer_name + "\n";
  all += spec.nfc ? "nfc\n" : "\n";
  all += spec.ignore_merges ? "ignore_merges\n" : "\n";
  for (size_t i = 0; i < spec.tokens.size(); ++i) {
    if (spec.kinds[i] == TokenKind::kUnused) continue;
    append_number(i, all);
    append_number(static_cast<uint64_t>(spec.kinds[i]), all);
    append_text(spec.tokens[i], all);
  }
  for (const auto& [left, right] : spec.merges) {
    append_text(left, all);
    append_text(right, all);
  }
  std::vector<AddedToken> added = spec.added;
  std::sort(added.begin(), added.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  for (const AddedToken& token : added) {
    append_number(static_cast<uint64_t>(token.id), all);
    append_text(token.content, all);
    const unsigned flags = (token.special ? 1U : 0U) | (token.lstrip ? 2U : 0U) |
                           (token.rstrip ? 4U : 0U) | (token.single_word ? 8U : 0U) |
                           (token.normalized ? 16U : 0U);
    append_number(flags, all);
  }
  return sha256_hex(all);
}

class ByteLevelTokenizer final : public Tokenizer {
 public:
  explicit ByteLevelTokenizer(const TokenizerSpec& spec)
      : bpe_(spec),
        added_(spec, spec.nfc),
        pre_tokenizer_(spec.pre_tokenizer),
        pre_tokenizer_name_(spec.pre_tokenizer_name),
        nfc_(spec.nfc),
        bos_id_(spec.bos_id),
        add_bos_(spec.add_bos),
        chat_template_(spec.chat_template),
        sha256_(hash_of(spec)) {
    const auto size = static_cast<int64_t>(spec.tokens.size());
    OSCAR_CHECK(bos_id_ >= -1 && bos_id_ < size, spec.file, ": BOS id ", bos_id_,
                " is outside the vocabulary of ", size);
    OSCAR_CHECK(!add_bos_ || bos_id_ >= 0, spec.file, ": a BOS is to be added but none is named");
    for (const int64_t id : spec.eos_ids) {
      OSCAR_CHECK(id >= 0 && id < size, spec.file, ": end-of-text id ", id,
                  " is outside the vocabulary of ", size);
      add_stop_id(id);
    }
    for (const char* marker : {"<|im_end|>", "<|eot_id|>"}) add_stop_id(added_.id_of(marker));
    if (added_.id_of("<|observation|>") >= 0) {  // GLM
      for (const char* marker : {"<|user|>", "<|observation|>", "<|endoftext|>"}) {
        add_stop_id(added_.id_of(marker));
      }
    }
  }

  std::vector<int32_t> encode(std::string_view text, bool parse_special) const override {
    std::vector<int32_t> ids;
    ids.reserve(text.size() / 4 + 8);
    Run run{.ids = ids};
    encode_text(text, parse_special, run);
    return ids;
  }

  Spans offsets(std::string_view text, bool parse_special,
                std::vector<int32_t>* ids) const override {
    std::vector<int32_t> found;
    Spans spans;
    Run run{.ids = found, .spans = &spans};
    encode_text(text, parse_special, run);
    if (ids != nullptr) *ids = std::move(found);
    return spans;
  }

  std::string decode(const std::vector<int32_t>& ids, bool skip_special) const override {
    std::string bytes;
    for (const int32_t id : ids) {
      OSCAR_CHECK(id >= 0, "token id ", id, " is negative");
      if (static_cast<size_t>(id) >= bpe_.vocab_size()) continue;
      if (skip_special && added_.is_special(id)) continue;
      bytes += bpe_.bytes(id);
    }
    return bytes;
  }

  size_t vocab_size() const override { return bpe_.vocab_size(); }
  size_t num_merges() const override { return bpe_.num_merges(); }
  int64_t bos_id() const override { return bos_id_; }
  bool add_bos() const override { return add_bos_; }
  std::vector<int64_t> stop_ids() const override { return stop_ids_; }
  std::string pre_tokenizer() const override { return pre_tokenizer_name_; }
  std::string sha256() const override { return sha256_; }
  std::string chat_template() const override { return chat_template_; }

 private:
  // One call of encode or offsets.
  struct Run {
    std::vector<int32_t>& ids;
    Spans* spans = nullptr;              // null: not wanted
    std::deque<std::string> texts = {};  // normalized texts, alive as long as the cache
    PieceCache cache = {};
    std::vector<size_t> piece_ends = {};
  };

  void add_stop_id(int64_t id) {
    if (id >= 0 && std::find(stop_ids_.begin(), stop_ids_.end(), id) == stop_ids_.end()) {
      stop_ids_.push_back(id);
    }
  }

  // `input` is the text of the caller; everything below works on the repaired text and the spans
  // are mapped back at the end.
  void encode_text(std::string_view input, bool special, Run& run) const {
    std::string repaired;
    TextEdits edits;
    const bool changed =
        replace_invalid_utf8(input, repaired, run.spans == nullptr ? nullptr : &edits) > 0;
    const std::string_view text = changed ? std::string_view(repaired) : input;
    size_t position = 0;
    for (const AddedTokens::Match& match : added_.find(text, special, false)) {
      encode_gap(text.substr(position, match.begin - position), position, special, run);
      push(match, 0, run);
      position = match.end;
    }
    encode_gap(text.substr(position), position, special, run);
    if (run.spans == nullptr || edits.empty()) return;
    for (auto& [begin, end] : *run.spans) std::tie(begin, end) = edits.to_input(begin, end);
  }

  // Text between added tokens, starting at byte `base` of the whole.
  void encode_gap(std::string_view gap, size_t base, bool special, Run& run) const {
    if (gap.empty()) return;
    TextEdits edits;
    std::string normal;
    std::string_view text = gap;
    if (nfc_ && normalize_nfc(gap, normal, run.spans == nullptr ? nullptr : &edits)) {
      text = run.texts.emplace_back(std::move(normal));
    }
    const size_t first_span = run.spans == nullptr ? 0 : run.spans->size();
    size_t position = 0;
    if (added_.any_normalized()) {
      for (const AddedTokens::Match& match : added_.find(text, special, true)) {
        encode_pieces(text.substr(position, match.begin - position), position, run);
        push(match, 0, run);
        position = match.end;
      }
    }
    encode_pieces(text.substr(position), position, run);
    if (run.spans == nullptr) return;
    for (size_t i = first_span; i < run.spans->size(); ++i) {
      const auto [begin, end] = edits.to_input((*run.spans)[i].first, (*run.spans)[i].second);
      (*run.spans)[i] = {base + begin, base + end};
    }
  }

  void encode_pieces(std::string_view text, size_t base, Run& run) const {
    run.piece_ends.clear();
    pre_tokenize(pre_tokenizer_, text, run.piece_ends);
    size_t begin = 0;
    std::vector<size_t> token_ends;
    for (const size_t end : run.piece_ends) {
      const std::string_view piece = text.substr(begin, end - begin);
      if (run.spans != nullptr) {
        token_ends.clear();
        bpe_.encode(piece, run.ids, &token_ends);
        size_t token_begin = 0;
        for (const size_t token_end : token_ends) {
          run.spans->emplace_back(base + begin + token_begin, base + begin + token_end);
          token_begin = token_end;
        }
      } else if (piece.size() > kMaxCachedPiece) {
        bpe_.encode(piece, run.ids, nullptr);
      } else {
        const auto cached = run.cache.get(
            piece, [&](std::vector<int32_t>& ids) { bpe_.encode(piece, ids, nullptr); });
        run.ids.insert(run.ids.end(), cached.begin(), cached.end());
      }
      begin = end;
    }
  }

  static void push(const AddedTokens::Match& match, size_t base, Run& run) {
    run.ids.push_back(match.id);
    if (run.spans != nullptr) run.spans->emplace_back(base + match.begin, base + match.end);
  }

  Bpe bpe_;
  AddedTokens added_;
  PreTokenizer pre_tokenizer_;
  std::string pre_tokenizer_name_;
  bool nfc_;
  int64_t bos_id_;
  bool add_bos_;
  std::vector<int64_t> stop_ids_;
  std::string chat_template_;
  std::string sha256_;
};

}  // namespace

PreTokenizer pre_tokenizer_of(const std::string& name, const std::string& file) {
  if (name == "smollm") return PreTokenizer::kSmollm;
  if (name == "gpt-2") return PreTokenizer::kGpt2;
  if (name == "qwen2") return PreTokenizer::kQwen2;
  if (name == "llama-bpe" || name == "glm4" || name == "chatglm-bpe") {
    return PreTokenizer::kLlamaBpe;
  }
  fail(file, ": unknown pre-tokenizer \"", name,
       "\" (known: smollm, gpt-2, qwen2, llama-bpe, glm4, chatglm-bpe)");
}

std::shared_ptr<const Tokenizer> Tokenizer::load(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    const fs::path json = fs::path(path) / "tokenizer.json";
    OSCAR_CHECK(fs::exists(json, ignored), path, ": the folder has no tokenizer.json");
    return std::make_shared<ByteLevelTokenizer>(read_json_tokenizer(json.string()));
  }
  OSCAR_CHECK(fs::exists(path, ignored), path, ": no such file or folder");
  const bool json = fs::path(path).extension() == ".json";
  return std::make_shared<ByteLevelTokenizer>(json ? read_json_tokenizer(path)
                                                   : read_gguf_tokenizer(path));
}

std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, std::string_view text,
                                   bool parse_special) {
  std::vector<int32_t> ids = tokenizer.encode(text, parse_special);
  if (!tokenizer.add_bos() || (!ids.empty() && ids[0] == tokenizer.bos_id())) return ids;
  ids.insert(ids.begin(), static_cast<int32_t>(tokenizer.bos_id()));
  return ids;
}

}  // namespace oscar
