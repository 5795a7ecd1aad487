#include "model/bpe.h"

#include <array>
#include <bit>
#include <functional>
#include <limits>
#include <queue>

#include "base/error.h"
#include "base/random.h"
#include "model/unicode_text.h"

namespace oscar {
namespace {

// Up to this many bytes a scan over all pairs is faster than a queue.
constexpr size_t kShortPiece = 48;

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();

constexpr bool maps_to_itself(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct ByteAlphabet {
  std::array<uint16_t, 256> code_points{};
  std::array<int16_t, 0x144> bytes{};  // by code point, -1 = not in the alphabet

  ByteAlphabet() {
    bytes.fill(-1);
    uint16_t next = 0x100;
    for (uint16_t byte = 0; byte < 256; ++byte) {
      code_points[byte] = maps_to_itself(byte) ? byte : next++;
      bytes[code_points[byte]] = static_cast<int16_t>(byte);
    }
  }
};

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

// "<0x41>" -> 0x41; -1 when the text is something else.
int byte_token_value(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  };
  const int high = digit(token[3]), low = digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace

uint32_t byte_to_code_point(uint8_t byte) { return byte_alphabet().code_points[byte]; }

bool decode_byte_alphabet(std::string_view token, std::string& bytes) {
  const ByteAlphabet& alphabet = byte_alphabet();
  bytes.clear();
  for (size_t position = 0; position < token.size();) {
    const CodePoint c = decode_utf8(token, position);
    if (!c.valid || c.value >= alphabet.bytes.size() || alphabet.bytes[c.value] < 0) return false;
    bytes.push_back(static_cast<char>(alphabet.bytes[c.value]));
    position += c.num_bytes;
  }
  return true;
}

// The symbols of one piece while they are merged.
struct Bpe::Symbols {
  std::vector<int32_t> ids;
  std::vector<size_t> ends;  // in the piece
};

Bpe::Bpe(const TokenizerSpec& spec) : ignore_merges_(spec.ignore_merges) {
  OSCAR_CHECK(!spec.merges.empty(), spec.file, ": the list of merges is empty");
  OSCAR_CHECK(spec.tokens.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()) &&
                  spec.merges.size() < kNoRank,
              spec.file, ": vocabulary of ", spec.tokens.size(), " tokens is too large");
  add_tokens(spec);
  merges_.resize(std::bit_ceil(spec.merges.size() * 2));
  std::string left, right;
  for (size_t i = 0; i < spec.merges.size(); ++i) {
    const auto& [a, b] = spec.merges[i];
    OSCAR_CHECK(decode_byte_alphabet(a, left) && decode_byte_alphabet(b, right) && !left.empty() &&
                    !right.empty(),
                spec.file, ": merge ", i, " (\"", a, "\" \"", b,
                "\") is not written in the byte alphabet");
    const auto id_of = [&](const std::string& bytes, const std::string& token) {
      const auto found = ids_.find(bytes);
      OSCAR_CHECK(found != ids_.end(), spec.file, ": merge ", i, " (\"", a, "\" \"", b, "\"): \"",
                  token, "\" is not in the vocabulary");
      return found->second;
    };
    const uint64_t pair = pair_key(id_of(left, a), id_of(right, b));
    add_merge(pair, static_cast<uint32_t>(i), id_of(left + right, a + b));
  }
}

void Bpe::add_tokens(const TokenizerSpec& spec) {
  bytes_.resize(spec.tokens.size());
  for (size_t i = 0; i < spec.tokens.size(); ++i) {
    const std::string& token = spec.tokens[i];
    switch (spec.kinds[i]) {
      case TokenKind::kNormal:
        OSCAR_CHECK(!token.empty(), spec.file, ": vocabulary entry ", i, " is empty");
        // Outside the byte alphabet: kept as it is, no text leads to it.
        if (!decode_byte_alphabet(token, bytes_[i])) bytes_[i] = token;
        break;
      case TokenKind::kControl:
      case TokenKind::kUserDefined:
        bytes_[i] = token;
        break;
      case TokenKind::kByte: {
        const int value = byte_token_value(token);
        OSCAR_CHECK(value >= 0, spec.file, ": vocabulary entry ", i, " (\"", token,
                    "\") is marked as a byte but is not of the form <0x41>");
        bytes_[i].assign(1, static_cast<char>(value));
        break;
      }
      case TokenKind::kUnused:
        break;
    }
  }
  // Ordinary tokens first: an added token of the same bytes must not take their place.
  ids_.reserve(bytes_.size());
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (spec.kinds[i] != TokenKind::kNormal) continue;
    const bool fresh = ids_.try_emplace(bytes_[i], static_cast<int32_t>(i)).second;
    OSCAR_CHECK(fresh, spec.file, ": vocabulary entry ", i, " (\"", spec.tokens[i],
                "\") repeats entry ", ids_[bytes_[i]]);
  }
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (spec.kinds[i] == TokenKind::kControl || spec.kinds[i] == TokenKind::kUserDefined) {
      ids_.try_emplace(bytes_[i], static_cast<int32_t>(i));
    }
  }
  bool any = false;
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = ids_.find(std::string(1, static_cast<char>(byte)));
    byte_ids_[byte] = found == ids_.end() ? -1 : found->second;
    any = any || found != ids_.end();
  }
  OSCAR_CHECK(any, spec.file, ": the vocabulary has no byte symbols (not a byte-level tokenizer)");
}

void Bpe::add_merge(uint64_t pair, uint32_t rank, int32_t id) {
  const size_t mask = merges_.size() - 1;
  size_t slot = static_cast<size_t>(mix64(pair)) & mask;
  while (merges_[slot].pair != kNoPair && merges_[slot].pair != pair) slot = (slot + 1) & mask;
  num_merges_ += merges_[slot].pair == kNoPair ? 1 : 0;
  merges_[slot] = {pair, rank, id};  // a repeated merge: the later one counts, as in the reference
}

const Bpe::Merge* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_key(left, right);
  const size_t mask = merges_.size() - 1;
  for (size_t slot = static_cast<size_t>(mix64(pair)) & mask;; slot = (slot + 1) & mask) {
    if (merges_[slot].pair == pair) return &merges_[slot];
    if (merges_[slot].pair == kNoPair) return nullptr;
  }
}

void Bpe::merge_short(Symbols& symbols) const {
  auto& [ids, ends] = symbols;
  std::array<const Merge*, kShortPiece> next;  // merge of symbols i and i + 1, null = none
  for (size_t i = 0; i + 1 < ids.size(); ++i) next[i] = find(ids[i], ids[i + 1]);
  while (ids.size() > 1) {
    size_t best = ids.size();
    uint32_t best_rank = kNoRank;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      if (next[i] != nullptr && next[i]->rank < best_rank) {
        best = i;
        best_rank = next[i]->rank;
      }
    }
    if (best == ids.size()) return;
    ids[best] = next[best]->id;
    ends[best] = ends[best + 1];
    for (size_t i = best + 1; i + 1 < ids.size(); ++i) {
      ids[i] = ids[i + 1];
      ends[i] = ends[i + 1];
      next[i] = next[i + 1];
    }
    ids.pop_back();
    ends.pop_back();
    if (best > 0) next[best - 1] = find(ids[best - 1], ids[best]);
    if (best + 1 < ids.size()) next[best] = find(ids[best], ids[best + 1]);
  }
}

void Bpe::merge_long(Symbols& symbols) const {
  auto& [ids, ends] = symbols;
  const size_t count = ids.size();
  // Linked list over the symbols; a merged-away symbol has id -1. Queue entries (rank, position,
  // expected pair) may be outdated and are checked when they come up.
  std::vector<size_t> previous(count), next(count);
  struct Candidate {
    uint32_t rank;
    size_t position;
    uint64_t pair;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  std::vector<Candidate> initial;
  for (size_t i = 0; i < count; ++i) {
    previous[i] = i - 1;
    next[i] = i + 1;
    if (i + 1 == count) break;
    const Merge* merge = find(ids[i], ids[i + 1]);
    if (merge != nullptr) initial.push_back({merge->rank, i, merge->pair});
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(std::greater<>(),
                                                                               std::move(initial));
  const auto offer = [&](size_t position) {
    const Merge* merge = find(ids[position], ids[next[position]]);
    if (merge != nullptr) queue.push({merge->rank, position, merge->pair});
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    const size_t left = top.position, right = next[left];
    if (ids[left] < 0 || right == count || pair_key(ids[left], ids[right]) != top.pair) continue;
    ids[left] = find(ids[left], ids[right])->id;
    ends[left] = ends[right];
    ids[right] = -1;
    next[left] = next[right];
    if (next[left] != count) {
      previous[next[left]] = left;
      offer(left);
    }
    if (left != 0) offer(previous[left]);
  }
  size_t kept = 0;
  for (size_t i = 0; i < count; i = next[i], ++kept) {
    ids[kept] = ids[i];
    ends[kept] = ends[i];
  }
  ids.resize(kept);
  ends.resize(kept);
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>& ids,
                 std::vector<size_t>* ends) const {
  if (ignore_merges_) {
    const auto found = ids_.find(piece);
    if (found != ids_.end()) {
      ids.push_back(found->second);
      if (ends != nullptr) ends->push_back(piece.size());
      return;
    }
  }
  Symbols symbols;
  symbols.ids.reserve(piece.size());
  symbols.ends.reserve(piece.size());
  for (size_t i = 0; i < piece.size(); ++i) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(piece[i])];
    if (id < 0) continue;
    symbols.ids.push_back(id);
    symbols.ends.push_back(i + 1);
  }
  if (symbols.ids.size() <= kShortPiece) {
    merge_short(symbols);
  } else {
    merge_long(symbols);
  }
  ids.insert(ids.end(), symbols.ids.begin(), symbols.ids.end());
  if (ends != nullptr) ends->insert(ends->end(), symbols.ends.begin(), symbols.ends.end());
}

}  // namespace oscar
