// moments.h5: sums that calibration streamed over tokens, so that shards of text, tensor-parallel
// ranks and interrupted runs can be put together later.
//
// Schema (format "oscar-moments", version 1); h = KV heads in the file, G = query heads of each:
//   /                attributes as in bundle.h5 where they apply (model, tokenizer and text hashes,
//                    tool version, options, rope_theta, rope; head_dim, num_layers, num_heads,
//                    num_kv_heads of the model), first_kv_head, local_kv_heads: the heads in the
//                    file; compute ("fp32" | "bf16" | "capture"), sink, recent,
//                    output_projection ("model" | "identity": which W_O the weighted sums used),
//                    proxy_approximate (0, 1): proxy was merged from shards with weights of their
//                    own, sequences_complete: of /sequences (fewer in the checkpoint of a run),
//                    collected, rows_checksum (in the checkpoint of a run)
//   /sequences       int64 [n, 4]: number of the text in text_sha256, first token in that text (-1
//                    = not known), tokens, leading tokens behind the sums (the others are held out)
//   /token_fingerprints  int64 [m], base/token_fingerprint.h; absent = none
//   /layers/<id>/    one group a layer
//     queries, keys, values, outputs  float64 [h, D, D], sums of x^T x with attribute count (rows);
//                    outputs = attention outputs O^T O
//     key_sum, value_sum              float64 [h, D], positions >= sink; count
//     key_position_sum, rope_sum      float64 [h, D], of keys turned back by their position, and of
//                    the RoPE table's rows (cosines, sines, zeros; the same for every head); count
//     logit_metric, output_metric     float64 [h, D, D], M_A and M_O as sums; count = query rows
//     proxy          float64 [h, D, D], sum of w v^T v with w = k C_Q k^T and the C_Q of this file;
//                    count = tokens; weight_sums float64 [h], the sums of w
//     held_out_queries  float64 [h, D, D]; count
//     output_energy  float64 [h G, D, D], W_O,q^T W_O,q
//     held_out_k, held_out_v  float32 [n, h, D], contest_k, contest_v  float32 [m, h, D], contest_q
//                    float32 [l, h G, D], contest_tokens int64 [l]: rows that decisions are
//                    measured on
//     rows_k, rows_v float32 [tokens, h, D]: every row behind the sums, so that the weights of the
//                    proxy can be computed again; optional
// Absent tensors were not collected.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/tensor.h"

namespace oscar {

struct MomentsSequence {
  int64_t text = 0, first_token = -1, tokens = 0, calibration_tokens = 0;
  bool operator==(const MomentsSequence&) const = default;
};

struct MomentsInfo {
  std::string model_architecture, model_sha256, tokenizer_sha256, text_sha256, tool_version;
  std::string options_json = "{}", compute, output_projection, rope_json;
  int64_t head_dim = 0, num_layers = 0, num_heads = 0, num_kv_heads = 0;  // of the model
  int64_t first_kv_head = 0, local_kv_heads = 0;                          // in the file
  double rope_theta = 0.0;
  int64_t sink = 0, recent = 0;
  std::vector<MomentsSequence> sequences;
  int64_t sequences_complete = 0;
  bool proxy_approximate = false;
  std::vector<int64_t> token_fingerprints;
  // Of the checkpoint of a run: which kinds of sums it needs, checksum of the rows kept beside it.
  std::string collected, rows_checksum;

  bool complete() const { return sequences_complete == static_cast<int64_t>(sequences.size()); }
  int64_t calibration_tokens() const;
  int64_t held_out_tokens() const;
  int64_t longest_sequence() const;
};

// A sum over rows, heads first, and how many rows it has (proxy: how much weight).
struct Moment {
  TensorD sum;  // empty = not collected
  double count = 0.0;
};

// By name, see the schema.
struct MomentsLayer {
  std::map<std::string, Moment> sums;
  std::map<std::string, TensorF> rows;
  TensorD output_energy, weight_sums;
  Tensor<int64_t> contest_tokens;
};

// Layers one after another; the file appears under its name with finish().
class MomentsWriter {
 public:
  MomentsWriter(const std::string& path, const MomentsInfo& info);
  ~MomentsWriter();
  void write(int64_t layer, const MomentsLayer& moments);
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class MomentsReader {
 public:
  // Checks format, geometry and names. Throws Error naming file and attribute.
  explicit MomentsReader(const std::string& path);
  ~MomentsReader();
  const std::string& path() const;
  const MomentsInfo& info() const;
  const std::vector<int64_t>& layers() const;  // ascending
  // Throws Error naming file, layer and tensor: a shape that disagrees with the attributes, a value
  // that is not finite, a negative count.
  MomentsLayer read(int64_t layer) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace oscar
