// Shards of calibration statistics put together: files of different tokens are added, files of
// different heads (tensor-parallel ranks) are set side by side.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "io/moments_file.h"

namespace oscar {

class MergedMoments {
 public:
  // Throws Error naming both files when shards do not fit each other: model, tokenizer, geometry,
  // RoPE, windows, output projection, layers; shards of the same heads that share tokens; ranks
  // whose tokens differ, whose heads overlap or leave a head of the model out.
  explicit MergedMoments(const std::vector<std::string>& paths);

  // Of the whole; sequences in the order of the files of one rank.
  const MomentsInfo& info() const { return info_; }
  const std::vector<int64_t>& layers() const { return shards_[0].front()->layers(); }
  // More than one shard of tokens, not all with their rows: the weights of the proxy are those of
  // every shard's own queries.
  bool proxy_is_approximate() const { return info_.proxy_approximate; }
  const std::vector<std::string>& warnings() const { return warnings_; }

  // Sums of all shards; a kind that one shard lacks is left out. rows_k and rows_v only where every
  // shard has them.
  MomentsLayer layer(int64_t id) const;

 private:
  void check_pair(const MomentsReader& a, const MomentsReader& b) const;
  void group_by_heads(std::vector<std::unique_ptr<MomentsReader>> readers);
  void check_ranks() const;
  void describe();

  // [rank][shard], ranks by first head.
  std::vector<std::vector<std::unique_ptr<MomentsReader>>> shards_;
  MomentsInfo info_;
  std::vector<std::string> warnings_;
};

// Adds the sums of `other` (other tokens, same heads) to `moments`.
void add_tokens(MomentsLayer& moments, const MomentsLayer& other);
// Puts the heads of `other` (same tokens) behind those of `moments`.
void append_heads(MomentsLayer& moments, const MomentsLayer& other, const std::string& where);

}  // namespace oscar
