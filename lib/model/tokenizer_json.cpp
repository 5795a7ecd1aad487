// The tokenizer of a Hugging Face folder: tokenizer.json and the configuration files beside it
// (formats.md 12).
#include <array>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "io/json_file.h"
#include "io/printable.h"
#include "model/tokenizer_spec.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  OSCAR_CHECK(in.is_open(), path.string(), ": cannot be opened");
  std::string text;
  std::array<char, 1 << 16> block;
  while (in.read(block.data(), block.size()) || in.gcount() > 0) {
    text.append(block.data(), static_cast<size_t>(in.gcount()));
  }
  OSCAR_CHECK(!in.bad(), path.string(), ": cannot be read");
  return text;
}

json read_object(const fs::path& path) {
  json value;
  try {
    const std::string text = read_text(path);
    check_json_depth(text, path.string());
    value = json::parse(text);
  } catch (const json::exception& error) {
    fail(path.string(), ": not valid JSON: ", error.what());
  }
  OSCAR_CHECK(value.is_object(), path.string(), ": expected a JSON object, found ",
              value.type_name());
  return value;
}

// Reads fields of JSON objects with messages that say where they are.
class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}
  const std::string& file() const { return file_; }

  // Null when the field is absent or null.
  const json* find(const json& object, const char* key) const {
    if (!object.is_object()) return nullptr;
    const auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }
  bool boolean(const json& object, const char* key, bool otherwise,
               const std::string& where) const {
    const json* value = find(object, key);
    if (value == nullptr) return otherwise;
    OSCAR_CHECK(value->is_boolean(), file_, ": ", where, ".", key, " is ", value->type_name(),
                ", expected true or false");
    return value->get<bool>();
  }
  std::string string(const json& object, const char* key, const std::string& where) const {
    const json* value = find(object, key);
    OSCAR_CHECK(value != nullptr && value->is_string(), file_, ": ", where, ".", key,
                " is missing or not a string");
    return value->get<std::string>();
  }
  // A token id: an integer in [0, limit).
  int64_t id(const json& value, int64_t limit, const std::string& where) const {
    OSCAR_CHECK(value.is_number_integer(), file_, ": ", where, " has id ", value.dump(),
                ", expected an integer");
    const bool fits =
        !value.is_number_unsigned() ||
        value.get<uint64_t>() < static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    const int64_t number = fits ? value.get<int64_t>() : -1;
    OSCAR_CHECK(number >= 0 && number < limit, file_, ": ", where, " has id ", value.dump(),
                ", expected 0..", limit - 1);
    return number;
  }

 private:
  std::string file_;
};

// "a" or {"content": "a"}, as tokens are named in tokenizer_config.json.
std::string token_text(const json* value) {
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  if (value->is_object() && value->contains("content") && (*value)["content"].is_string()) {
    return (*value)["content"].get<std::string>();
  }
  return "";
}

// The steps of a normalizer or pre-tokenizer: the members of (nested) sequences in order.
void flatten(const Reader& reader, const json& step, const char* list_key, int depth,
             std::vector<const json*>& steps) {
  OSCAR_CHECK(depth < 8, reader.file(), ": ", list_key, " nested too deeply");
  if (reader.string(step, "type", list_key) != "Sequence") {
    steps.push_back(&step);
    return;
  }
  const json* members = reader.find(step, list_key);
  OSCAR_CHECK(members != nullptr && members->is_array(), reader.file(), ": a Sequence without ",
              list_key);
  for (const json& member : *members) flatten(reader, member, list_key, depth + 1, steps);
}

bool reads_nfc(const Reader& reader, const json& root) {
  const json* normalizer = reader.find(root, "normalizer");
  if (normalizer == nullptr) return false;
  std::vector<const json*> steps;
  flatten(reader, *normalizer, "normalizers", 0, steps);
  for (const json* step : steps) {
    const std::string type = reader.string(*step, "type", "normalizer");
    OSCAR_CHECK(type == "NFC", reader.file(), ": normalizer ", printable(type),
                " is not supported (NFC or none)");
  }
  return !steps.empty();
}

// The pattern of a Split step whose matches all become pieces; throws on any other Split.
std::string split_pattern(const Reader& reader, const json& step) {
  const json* pattern = reader.find(step, "pattern");
  OSCAR_CHECK(pattern != nullptr && pattern->contains("Regex"), reader.file(),
              ": pre_tokenizer Split without a Regex pattern");
  const std::string behavior = reader.string(step, "behavior", "pre_tokenizer.Split");
  const bool invert = reader.boolean(step, "invert", false, "pre_tokenizer.Split");
  // The known patterns match everything, so that removing the gaps changes nothing.
  OSCAR_CHECK((behavior == "Isolated" && !invert) || (behavior == "Removed" && invert),
              reader.file(), ": pre_tokenizer Split with behavior ", printable(behavior),
              ", invert ", invert ? "true" : "false", " is not supported");
  return reader.string(*pattern, "Regex", "pre_tokenizer.Split.pattern");
}

void read_pre_tokenizer(const Reader& reader, const json& root, TokenizerSpec& spec) {
  const json* pre_tokenizer = reader.find(root, "pre_tokenizer");
  OSCAR_CHECK(pre_tokenizer != nullptr, reader.file(), ": pre_tokenizer is missing");
  std::vector<const json*> steps;
  flatten(reader, *pre_tokenizer, "pretokenizers", 0, steps);
  const auto type = [&](size_t i) { return reader.string(*steps[i], "type", "pre_tokenizer"); };
  OSCAR_CHECK(!steps.empty() && type(steps.size() - 1) == "ByteLevel", reader.file(),
              ": pre_tokenizer does not end in ByteLevel: not a byte-level tokenizer");
  const json& last = *steps.back();
  OSCAR_CHECK(!reader.boolean(last, "add_prefix_space", true, "pre_tokenizer.ByteLevel"),
              reader.file(), ": pre_tokenizer ByteLevel with add_prefix_space is not supported");
  const bool gpt2_pattern = reader.boolean(last, "use_regex", true, "pre_tokenizer.ByteLevel");

  std::string name;
  if (steps.size() == 1 && gpt2_pattern) name = "gpt-2";
  if (steps.size() == 2 && gpt2_pattern && type(0) == "Digits" &&
      reader.boolean(*steps[0], "individual_digits", false, "pre_tokenizer.Digits")) {
    name = "smollm";
  }
  if (steps.size() == 2 && !gpt2_pattern && type(0) == "Split") {
    const std::string pattern = split_pattern(reader, *steps[0]);
    for (const char* known : {"gpt-2", "qwen2", "llama-bpe"}) {
      if (pattern == pre_tokenizer_pattern(pre_tokenizer_of(known, reader.file()))) name = known;
    }
    OSCAR_CHECK(!name.empty(), reader.file(),
                ": unknown pre_tokenizer pattern: ", printable(pattern, 300));
  }
  OSCAR_CHECK(!name.empty(), reader.file(),
              ": unknown pre_tokenizer: ", pre_tokenizer->dump().substr(0, 300));
  spec.pre_tokenizer_name = name;
  spec.pre_tokenizer = pre_tokenizer_of(name, reader.file());
}

void read_vocabulary(const Reader& reader, const json& model, const json* added,
                     TokenizerSpec& spec) {
  const json* vocab = reader.find(model, "vocab");
  OSCAR_CHECK(vocab != nullptr && vocab->is_object() && !vocab->empty(), reader.file(),
              ": model.vocab is missing, empty or not an object");
  const size_t num_added = added == nullptr ? 0 : added->size();
  // Ids may leave holes, but not so many that a hostile file decides about the memory.
  const auto limit = static_cast<int64_t>(2 * (vocab->size() + num_added) + 65536);
  const auto place = [&](int64_t id, const std::string& text, TokenKind kind) {
    const auto index = static_cast<size_t>(id);
    if (index >= spec.tokens.size()) {
      spec.tokens.resize(index + 1);
      spec.kinds.resize(index + 1, TokenKind::kUnused);
    }
    OSCAR_CHECK(spec.kinds[index] == TokenKind::kUnused || spec.tokens[index] == text,
                reader.file(), ": id ", id, " belongs to ", printable(spec.tokens[index]), " and ",
                printable(text));
    spec.tokens[index] = text;
    spec.kinds[index] = kind;
  };
  for (const auto& [text, id] : vocab->items()) {
    place(reader.id(id, limit, "vocabulary entry \"" + text + "\""), text, TokenKind::kNormal);
  }
  for (size_t i = 0; i < num_added; ++i) {
    const json& entry = (*added)[i];
    const std::string where = "added_tokens[" + std::to_string(i) + "]";
    OSCAR_CHECK(entry.is_object() && entry.contains("id"), reader.file(), ": ", where,
                " is not an object with an id");
    AddedToken token;
    token.id = static_cast<int32_t>(reader.id(entry["id"], limit, where));
    token.content = reader.string(entry, "content", where);
    token.special = reader.boolean(entry, "special", false, where);
    token.lstrip = reader.boolean(entry, "lstrip", false, where);
    token.rstrip = reader.boolean(entry, "rstrip", false, where);
    token.single_word = reader.boolean(entry, "single_word", false, where);
    token.normalized = reader.boolean(entry, "normalized", !token.special, where);
    place(token.id, token.content, token.special ? TokenKind::kControl : TokenKind::kUserDefined);
    spec.added.push_back(std::move(token));
  }
}

void read_merges(const Reader& reader, const json& model, TokenizerSpec& spec) {
  const json* merges = reader.find(model, "merges");
  OSCAR_CHECK(merges != nullptr && merges->is_array() && !merges->empty(), reader.file(),
              ": model.merges is missing, empty or not a list");
  spec.merges.reserve(merges->size());
  for (size_t i = 0; i < merges->size(); ++i) {
    const json& merge = (*merges)[i];
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      spec.merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      continue;
    }
    const std::string text = merge.is_string() ? merge.get<std::string>() : "";
    const size_t space = text.find(' ', 1);
    OSCAR_CHECK(space != std::string::npos && space + 1 < text.size(), reader.file(), ": merge ", i,
                " is ", merge.dump().substr(0, 100), ", expected \"a b\" or [\"a\", \"b\"]");
    spec.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
  }
}

void read_model(const Reader& reader, const json& root, TokenizerSpec& spec) {
  const json* model = reader.find(root, "model");
  OSCAR_CHECK(model != nullptr && model->is_object(), reader.file(),
              ": model is missing or not an object");
  const json* type = reader.find(*model, "type");
  OSCAR_CHECK(type == nullptr || *type == "BPE", reader.file(), ": model.type is ", type->dump(),
              ", expected \"BPE\"");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json* affix = reader.find(*model, key);
    OSCAR_CHECK(affix == nullptr || *affix == "", reader.file(), ": model.", key,
                " is not supported");
  }
  const json* dropout = reader.find(*model, "dropout");
  OSCAR_CHECK(dropout == nullptr || *dropout == 0.0, reader.file(),
              ": model.dropout is not supported");
  OSCAR_CHECK(!reader.boolean(*model, "byte_fallback", false, "model"), reader.file(),
              ": model.byte_fallback: not a byte-level tokenizer");
  spec.ignore_merges = reader.boolean(*model, "ignore_merges", false, "model");
  const json* added = reader.find(root, "added_tokens");
  OSCAR_CHECK(added == nullptr || added->is_array(), reader.file(), ": added_tokens is not a list");
  read_vocabulary(reader, *model, added, spec);
  read_merges(reader, *model, spec);
}

int64_t id_of_content(const TokenizerSpec& spec, const std::string& content) {
  for (const AddedToken& token : spec.added) {
    if (token.content == content) return token.id;
  }
  return -1;
}

// The token that a TemplateProcessing step puts in front of every text.
std::optional<std::string> template_bos(const Reader& reader, const json& root) {
  const json* processor = reader.find(root, "post_processor");
  if (processor == nullptr) return std::nullopt;
  std::vector<const json*> steps;
  flatten(reader, *processor, "processors", 0, steps);
  for (const json* step : steps) {
    if (reader.string(*step, "type", "post_processor") != "TemplateProcessing") continue;
    const json* single = reader.find(*step, "single");
    if (single == nullptr || !single->is_array() || single->empty()) continue;
    const json* special = reader.find((*single)[0], "SpecialToken");
    if (special != nullptr) {
      return reader.string(*special, "id", "post_processor.single[0].SpecialToken");
    }
  }
  return std::nullopt;
}

void add_eos_ids(const Reader& reader, const json& config, TokenizerSpec& spec) {
  const json* eos = reader.find(config, "eos_token_id");
  if (eos == nullptr) return;
  const auto limit = static_cast<int64_t>(spec.tokens.size());
  const json list = eos->is_array() ? *eos : json::array({*eos});
  for (const json& id : list) spec.eos_ids.push_back(reader.id(id, limit, "eos_token_id"));
}

// tokenizer_config.json, generation_config.json, config.json and chat_template.jinja, each of which
// may be absent.
void read_side_files(const Reader& reader, const fs::path& folder, const json& root,
                     TokenizerSpec& spec) {
  const std::optional<std::string> bos = template_bos(reader, root);
  if (bos) {
    spec.bos_id = id_of_content(spec, *bos);
    OSCAR_CHECK(spec.bos_id >= 0, reader.file(), ": post_processor adds ", printable(*bos),
                ", which is not an added token");
    spec.add_bos = true;
  }
  const fs::path config_path = folder / "tokenizer_config.json";
  if (fs::exists(config_path)) {
    const json config = read_object(config_path);
    const Reader config_reader(config_path.string());
    const std::string bos_text = token_text(config_reader.find(config, "bos_token"));
    if (spec.bos_id < 0) spec.bos_id = id_of_content(spec, bos_text);
    if (!bos && spec.bos_id >= 0) {
      spec.add_bos = config_reader.boolean(config, "add_bos_token", false, "");
    }
    const int64_t eos = id_of_content(spec, token_text(config_reader.find(config, "eos_token")));
    if (eos >= 0) spec.eos_ids.push_back(eos);
    const json* chat = config_reader.find(config, "chat_template");
    if (chat != nullptr && chat->is_string()) spec.chat_template = chat->get<std::string>();
    if (chat != nullptr && chat->is_array()) {
      for (const json& named : *chat) {
        if (config_reader.string(named, "name", "chat_template") != "default") continue;
        spec.chat_template = config_reader.string(named, "template", "chat_template");
      }
    }
  }
  for (const char* name : {"generation_config.json", "config.json"}) {
    const fs::path path = folder / name;
    if (fs::exists(path)) add_eos_ids(Reader(path.string()), read_object(path), spec);
  }
  const fs::path jinja = folder / "chat_template.jinja";
  if (fs::exists(jinja)) spec.chat_template = read_text(jinja);
}

}  // namespace

TokenizerSpec read_json_tokenizer(const std::string& path) {
  const json root = read_object(path);
  const Reader reader(path);
  TokenizerSpec spec;
  spec.file = path;
  read_pre_tokenizer(reader, root, spec);
  spec.nfc = reads_nfc(reader, root);
  const json* decoder = reader.find(root, "decoder");
  OSCAR_CHECK(decoder == nullptr || reader.string(*decoder, "type", "decoder") == "ByteLevel", path,
              ": decoder is not ByteLevel");
  read_model(reader, root, spec);
  read_side_files(reader, fs::path(path).parent_path(), root, spec);
  return spec;
}

}  // namespace oscar
