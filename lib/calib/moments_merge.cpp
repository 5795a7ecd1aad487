#include "calib/moments_merge.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/token_fingerprint.h"

namespace oscar {
namespace {

// b behind a along an axis (0 or 1); other extents must agree.
template <class T>
Tensor<T> joined(const Tensor<T>& a, const Tensor<T>& b, size_t axis) {
  Shape shape = a.shape;
  shape[axis] += b.shape[axis];
  Tensor<T> result(shape);
  if (axis == 0) {
    std::copy(a.values.begin(), a.values.end(), result.values.begin());
    std::copy(b.values.begin(), b.values.end(),
              result.values.begin() + static_cast<std::ptrdiff_t>(a.size()));
    return result;
  }
  const size_t rows = a.shape[0], a_row = a.size() / rows, b_row = b.size() / rows;
  for (size_t r = 0; r < rows; ++r) {
    std::copy_n(a.at(r), a_row, result.at(r));
    std::copy_n(b.at(r), b_row, result.at(r) + a_row);
  }
  return result;
}

size_t contest_keys(const MomentsLayer& layer) {
  const auto found = layer.rows.find("contest_k");
  return found == layer.rows.end() ? 0 : found->second.extent(0);
}

// The longest sequence decides, as in one run; of equally long ones the first.
void keep_longer_contest(MomentsLayer& moments, const MomentsLayer& other) {
  if (contest_keys(other) <= contest_keys(moments)) return;
  for (const char* name : {"contest_k", "contest_v", "contest_q"})
    moments.rows[name] = other.rows.at(name);
  moments.contest_tokens = other.contest_tokens;
}

std::vector<std::string> split_hashes(const std::string& joined_hashes) {
  std::vector<std::string> hashes;
  std::stringstream stream(joined_hashes);
  for (std::string hash; std::getline(stream, hash, ',');) hashes.push_back(hash);
  return hashes;
}

// Do two files hold the same tokens of one text?
bool same_range(const MomentsInfo& a, const MomentsInfo& b) {
  const auto a_hashes = split_hashes(a.text_sha256), b_hashes = split_hashes(b.text_sha256);
  const auto hash = [](const auto& hashes, int64_t text) {
    return static_cast<size_t>(text) < hashes.size() ? hashes[static_cast<size_t>(text)] : "";
  };
  for (const MomentsSequence& x : a.sequences)
    for (const MomentsSequence& y : b.sequences)
      if (x.first_token >= 0 && y.first_token >= 0 && x.first_token < y.first_token + y.tokens &&
          y.first_token < x.first_token + x.tokens && !hash(a_hashes, x.text).empty() &&
          hash(a_hashes, x.text) == hash(b_hashes, y.text))
        return true;
  return false;
}

bool share_tokens(const MomentsInfo& a, const MomentsInfo& b) {
  return same_range(a, b) || shared_fingerprints(a.token_fingerprints, b.token_fingerprints) > 0;
}

bool same_tokens(const MomentsInfo& a, const MomentsInfo& b) {
  const auto lengths_agree = [](const MomentsSequence& x, const MomentsSequence& y) {
    return x.tokens == y.tokens && x.calibration_tokens == y.calibration_tokens;
  };
  return std::equal(a.sequences.begin(), a.sequences.end(), b.sequences.begin(), b.sequences.end(),
                    lengths_agree) &&
         a.token_fingerprints == b.token_fingerprints;
}

std::string heads(const MomentsInfo& info) {
  return cat(info.first_kv_head, " .. ", info.first_kv_head + info.local_kv_heads - 1);
}

}  // namespace

void add_tokens(MomentsLayer& moments, const MomentsLayer& other) {
  for (auto at = moments.sums.begin(); at != moments.sums.end();) {
    const auto found = other.sums.find(at->first);
    // Held-out queries add to nothing; every other kind is only known when all shards have it.
    if (found == other.sums.end() && at->first != "held_out_queries") {
      at = moments.sums.erase(at);
      continue;
    }
    if (found != other.sums.end()) {
      Moment& moment = at->second;
      for (size_t i = 0; i < moment.sum.size(); ++i)
        moment.sum.values[i] += found->second.sum.values[i];
      moment.count += found->second.count;
    }
    ++at;
  }
  const auto held_out = other.sums.find("held_out_queries");
  if (held_out != other.sums.end()) moments.sums.emplace(*held_out);
  if (moments.sums.count("proxy") == 0) moments.weight_sums = {};
  for (size_t h = 0; h < moments.weight_sums.size(); ++h)
    moments.weight_sums.values[h] += other.weight_sums.values[h];
  for (const char* name : {"held_out_k", "held_out_v"}) {
    const auto more = other.rows.find(name);
    if (more == other.rows.end()) continue;
    TensorF& rows = moments.rows[name];
    rows = rows.empty() ? more->second : joined(rows, more->second, 0);
  }
  for (const char* name : {"rows_k", "rows_v"}) {
    const auto mine = moments.rows.find(name);
    const auto more = other.rows.find(name);
    if (mine == moments.rows.end()) continue;
    if (more == other.rows.end())
      moments.rows.erase(mine);
    else
      mine->second = joined(mine->second, more->second, 0);
  }
  keep_longer_contest(moments, other);
}

void append_heads(MomentsLayer& moments, const MomentsLayer& other, const std::string& where) {
  for (auto& [name, moment] : moments.sums) {
    const auto found = other.sums.find(name);
    OSCAR_CHECK(found != other.sums.end() && found->second.count == moment.count, where, ": ", name,
                " has ", found == other.sums.end() ? 0.0 : found->second.count,
                " rows, the heads before it have ", moment.count);
    moment.sum = joined(moment.sum, found->second.sum, 0);
  }
  OSCAR_CHECK(moments.sums.size() == other.sums.size(), where,
              ": other statistics than the heads before it");
  for (auto& [name, rows] : moments.rows) {
    const auto found = other.rows.find(name);
    OSCAR_CHECK(found != other.rows.end() && found->second.extent(0) == rows.extent(0), where, ": ",
                name, " is not of the same tokens as that of the heads before it");
    rows = joined(rows, found->second, 1);
  }
  OSCAR_CHECK(moments.output_energy.empty() == other.output_energy.empty(), where,
              ": output_energy is there for some heads only");
  if (!moments.output_energy.empty())
    moments.output_energy = joined(moments.output_energy, other.output_energy, 0);
  if (!moments.weight_sums.empty())
    moments.weight_sums = joined(moments.weight_sums, other.weight_sums, 0);
}

MergedMoments::MergedMoments(const std::vector<std::string>& paths) {
  OSCAR_CHECK(!paths.empty(), "--moments: expected at least one file");
  std::vector<std::unique_ptr<MomentsReader>> readers;
  for (const std::string& path : paths) {
    readers.push_back(std::make_unique<MomentsReader>(path));
    const MomentsInfo& info = readers.back()->info();
    OSCAR_CHECK(info.complete(), path, ": holds ", info.sequences_complete, " of ",
                info.sequences.size(), " sequences; finish that calibration first");
    check_pair(*readers.front(), *readers.back());
  }
  group_by_heads(std::move(readers));
  check_ranks();
  describe();
}

void MergedMoments::check_pair(const MomentsReader& a, const MomentsReader& b) const {
  const MomentsInfo &x = a.info(), &y = b.info();
  const auto same = [&](const char* what, const auto& left, const auto& right) {
    OSCAR_CHECK(left == right, a.path(), " and ", b.path(), " do not fit: ", what, " ", left,
                " and ", right);
  };
  same("model", x.model_sha256, y.model_sha256);
  same("tokenizer", x.tokenizer_sha256, y.tokenizer_sha256);
  same("architecture", x.model_architecture, y.model_architecture);
  same("head_dim", x.head_dim, y.head_dim);
  same("number of layers", x.num_layers, y.num_layers);
  same("number of query heads", x.num_heads, y.num_heads);
  same("number of KV heads", x.num_kv_heads, y.num_kv_heads);
  same("RoPE base", x.rope_theta, y.rope_theta);
  same("RoPE", x.rope_json, y.rope_json);
  same("--sink", x.sink, y.sink);
  same("--recent", x.recent, y.recent);
  same("output projection", x.output_projection, y.output_projection);
  OSCAR_CHECK(a.layers() == b.layers(), a.path(), " and ", b.path(),
              " do not fit: they hold different layers (", a.layers().size(), " and ",
              b.layers().size(), ")");
}

void MergedMoments::group_by_heads(std::vector<std::unique_ptr<MomentsReader>> readers) {
  for (std::unique_ptr<MomentsReader>& reader : readers) {
    const MomentsInfo& info = reader->info();
    auto rank = std::find_if(shards_.begin(), shards_.end(), [&](const auto& shards) {
      return shards.front()->info().first_kv_head == info.first_kv_head &&
             shards.front()->info().local_kv_heads == info.local_kv_heads;
    });
    if (rank == shards_.end())
      rank = shards_.insert(rank, std::vector<std::unique_ptr<MomentsReader>>());
    for (const auto& other : *rank)
      OSCAR_CHECK(!share_tokens(other->info(), info), other->path(), " and ", reader->path(),
                  " hold the same tokens of the same heads (", heads(info),
                  "): they would count twice");
    rank->push_back(std::move(reader));
  }
  std::sort(shards_.begin(), shards_.end(), [](const auto& a, const auto& b) {
    return a.front()->info().first_kv_head < b.front()->info().first_kv_head;
  });
}

// Every rank has the same shards, and the ranks' heads are all heads of the model.
void MergedMoments::check_ranks() const {
  int64_t next = 0;
  for (const auto& rank : shards_) {
    const MomentsReader& first = *rank.front();
    const MomentsInfo& info = first.info();
    OSCAR_CHECK(info.first_kv_head >= next, first.path(), ": KV heads ", heads(info),
                " are in another file too");
    OSCAR_CHECK(info.first_kv_head == next, first.path(), ": KV heads ", next, " .. ",
                info.first_kv_head - 1, " of ", info.num_kv_heads, " are in no file");
    next = info.first_kv_head + info.local_kv_heads;
    OSCAR_CHECK(rank.size() == shards_[0].size(), first.path(), ": KV heads ", heads(info),
                " have ", rank.size(), " shards of tokens, KV heads ",
                heads(shards_[0].front()->info()), " have ", shards_[0].size());
    for (size_t s = 0; s < rank.size(); ++s)
      OSCAR_CHECK(same_tokens(rank[s]->info(), shards_[0][s]->info()), rank[s]->path(), " and ",
                  shards_[0][s]->path(),
                  " should hold different heads on the same tokens, but the tokens differ");
  }
  const MomentsInfo& info = shards_[0].front()->info();
  OSCAR_CHECK(next == info.num_kv_heads, shards_.back().front()->path(), ": KV heads ", next,
              " .. ", info.num_kv_heads - 1, " of ", info.num_kv_heads, " are in no file");
}

void MergedMoments::describe() {
  const auto& shards = shards_[0];
  info_ = shards.front()->info();
  info_.first_kv_head = 0;
  info_.local_kv_heads = info_.num_kv_heads;
  std::vector<std::string> hashes = split_hashes(info_.text_sha256);
  nlohmann::json options = nlohmann::json::array();
  bool rows_everywhere = true, approximate_shard = false;
  for (size_t s = 0; s < shards.size(); ++s) {
    const MomentsInfo& info = shards[s]->info();
    approximate_shard = approximate_shard || info.proxy_approximate;
    options.push_back(nlohmann::json::parse(info.options_json, nullptr, false));
    for (const auto& rank : shards_)
      rows_everywhere = rows_everywhere && rank[s]->read(layers().front()).rows.count("rows_k") > 0;
    if (s == 0) continue;
    const auto first_text = static_cast<int64_t>(hashes.size());
    for (const std::string& hash : split_hashes(info.text_sha256)) hashes.push_back(hash);
    for (MomentsSequence sequence : info.sequences) {
      sequence.text += first_text;
      info_.sequences.push_back(sequence);
    }
    info_.token_fingerprints =
        merged_fingerprints(info_.token_fingerprints, info.token_fingerprints);
    if (info.longest_sequence() != shards[0]->info().longest_sequence())
      warnings_.push_back(cat(shards[0]->path(), " has sequences of ",
                              shards[0]->info().longest_sequence(), " tokens, ", shards[s]->path(),
                              " of ", info.longest_sequence(), ": the lengths are pooled"));
    if (info.compute != info_.compute)
      warnings_.push_back(cat(shards[0]->path(), " was computed with ", info_.compute, ", ",
                              shards[s]->path(), " with ", info.compute));
  }
  info_.sequences_complete = static_cast<int64_t>(info_.sequences.size());
  info_.text_sha256.clear();
  for (const std::string& hash : hashes)
    info_.text_sha256 += (info_.text_sha256.empty() ? "" : ",") + hash;
  if (shards.size() > 1 || shards_.size() > 1)
    info_.options_json =
        nlohmann::json{{"sink", info_.sink}, {"recent", info_.recent}, {"shards", options}}.dump();
  info_.proxy_approximate = !rows_everywhere && (shards.size() > 1 || approximate_shard);
}

MomentsLayer MergedMoments::layer(int64_t id) const {
  MomentsLayer whole;
  for (size_t r = 0; r < shards_.size(); ++r) {
    MomentsLayer rank = shards_[r][0]->read(id);
    for (size_t s = 1; s < shards_[r].size(); ++s) add_tokens(rank, shards_[r][s]->read(id));
    if (r == 0)
      whole = std::move(rank);
    else
      append_heads(whole, rank, cat(shards_[r].front()->path(), ": layer ", id));
  }
  return whole;
}

}  // namespace oscar
