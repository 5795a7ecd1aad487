// The KV cache of one sequence under one arm: BF16 sink and recent rows, packed rows for the rest,
// paged by 64 tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "model/kv_arm.h"

namespace oscar {

inline constexpr size_t kPageTokens = 64;

struct CacheCounters {
  size_t tokens = 0;                 // in the cache
  size_t tokens_int2_written = 0;    // (layer 0) tokens encoded so far
  size_t tokens_int2_read = 0;       // (layer 0) sum over queries of dequantized keys seen
  size_t tokens_high_precision = 0;  // tokens now held in high precision
  // Of all layers and heads: whole pages as allocated, and the rows in them that hold tokens still
  // needed in that form.
  size_t bytes_packed = 0, bytes_high_precision = 0;
  size_t bytes_packed_used = 0, bytes_high_precision_used = 0;
  EncodeStats encode;
};

class KvCache {
 public:
  // The arm must outlive the cache.
  KvCache(const ModelConfig& config, std::shared_ptr<const KvArm> arm);
  ~KvCache();
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;

  // Tokens appended to the last layer. During a forward pass earlier layers are already longer.
  size_t length() const;
  const KvArm& arm() const;
  CacheCounters counters() const;
  void clear();

  // A second cache with the same content, for scoring several continuations of one prefix: pages
  // are shared and copied when one side writes into them. The counters continue from here.
  KvCache fork() const;
  // Forgets all tokens from `length` on, in every layer. Throws Error when exact windows would need
  // high-precision rows that were already packed (use fork before appending instead).
  void truncate(size_t length);
  // Serving windows only: true makes every call count as decode steps, token by token, also when it
  // brings several tokens (teacher-forced scoring of a continuation). Default false: several tokens
  // = one prefill chunk.
  void set_append_as_decode(bool decode);

  struct State;  // defined in kv_cache_state.h; used by attention
  State& state() { return *state_; }
  const State& state() const { return *state_; }

 private:
  explicit KvCache(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace oscar
