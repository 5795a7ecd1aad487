// The description of a small moments file: two of four KV heads, two sequences.
#pragma once

#include "io/moments_file.h"

namespace oscar_test {

inline oscar::MomentsInfo small_moments() {
  oscar::MomentsInfo info;
  info.model_architecture = "llama";
  info.model_sha256 = std::string(64, 'a');
  info.compute = "bf16";
  info.output_projection = "model";
  info.head_dim = 4;
  info.num_layers = 3;
  info.num_heads = 8;
  info.num_kv_heads = 4;
  info.first_kv_head = 2;
  info.local_kv_heads = 2;
  info.rope_theta = 1e5;
  info.sink = 8;
  info.recent = 16;
  info.sequences = {{0, 100, 50, 50}, {1, -1, 60, 20}};
  info.sequences_complete = 2;
  info.token_fingerprints = {-5, 3, 9};
  return info;
}

}  // namespace oscar_test
