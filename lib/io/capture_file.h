// capture.h5: post-RoPE Q, K, V (and optionally attention outputs O) of a model on a text, streamed
// layer by layer and sequence by sequence.
//
// Schema (format "oscar-capture", version 1):
//   /                 attributes as in bundle.h5 where they apply (model, tokenizer and text
//   hashes, tool version, options, geometry, rope_theta), rope (JSON text, may be
//                     absent), dtype ("bf16" | "f32"),
//                     sequences_complete (int64): how many sequences are whole in every layer; a
//                     file under its final name is complete
//   /token_ids        int32 [T];   /positions int32 [T];   /sequence_offsets int64 [num_sequences +
//   1] /layers/<id>/q    [T, num_heads, D];  k, v  [T, num_kv_heads, D];  o [T, num_heads, D]
//   (optional); chunked by tokens
//                     f32, or bf16 as uint16 with attribute dtype = "bfloat16" (h5py:
//                     (a.astype("u4") << 16).view("f4"))
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace oscar {

struct CaptureInfo {
  std::string model_architecture, model_sha256, tokenizer_sha256, text_sha256, tool_version;
  std::string options_json = "{}";
  int64_t head_dim = 0, num_layers = 0, num_heads = 0, num_kv_heads = 0;
  double rope_theta = 0.0;
  std::string rope_json;  // all constants (model/rope.h); empty = not known (earlier versions)
  bool bf16 = true;
  bool has_outputs = false;
};

class CaptureReader;

// Appends sequences; resumable: opening an unfinished file of the same provenance continues after
// its last whole sequence (the whole ones are copied to a fresh file first). The unfinished file is
// flushed after each sequence and can be read under its own name (<path>.part), also after the
// process was killed.
class CaptureWriter {
 public:
  // Writes to `path` + ".part" until finish() renames it. Throws Error when an existing .part was
  // made from something else, or when another process writes it. `path` + ".part.lock" is locked
  // for that and lasts as long as this object (the .part itself must stay readable, and HDF5 locks
  // what it reads).
  CaptureWriter(const std::string& path, const CaptureInfo& info);
  ~CaptureWriter();
  size_t sequences_done() const;
  // Token ids of the sequences already whole, so that a resuming caller can check its text.
  std::vector<int32_t> token_ids_done() const;
  // Token ids of the next sequence; then append() once for every layer; then end_sequence().
  void begin_sequence(const std::vector<int32_t>& token_ids);
  // q [T, Hq, D], k, v [T, Hkv, D], o [T, Hq, D] or null; T = number of token ids given.
  // Throws Error naming layer, tensor, token and head when a value is not finite.
  void append(int64_t layer, const float* q, const float* k, const float* v, const float* o);
  void end_sequence();
  void finish();

 private:
  void copy_sequences(const CaptureReader& source);
  struct State;
  std::unique_ptr<State> state_;
};

enum class CaptureTensor { kQ, kK, kV, kO };
const char* tensor_name(CaptureTensor tensor);  // "q", "k", "v", "o"

class CaptureReader {
 public:
  // Checks format, geometry, every shape against the attributes and the file size.
  explicit CaptureReader(const std::string& path);
  ~CaptureReader();
  const CaptureInfo& info() const;
  const std::string& path() const;
  std::vector<int64_t> layers() const;                   // ascending
  const std::vector<int64_t>& sequence_offsets() const;  // [num_sequences + 1]
  const std::vector<int32_t>& token_ids() const;
  size_t num_heads(CaptureTensor tensor) const;  // of that tensor: Hq or Hkv
  // Reads tokens [begin, end) of one tensor as float32 [end - begin, heads, D]. Not thread-safe
  // (converts in parallel). Throws Error on a range outside the file; values are not checked.
  void read_into(int64_t layer, CaptureTensor tensor, int64_t begin, int64_t end,
                 float* destination) const;
  std::vector<float> read(int64_t layer, CaptureTensor tensor, int64_t begin, int64_t end) const;
  // The same by name: "q", "k", "v", "o".
  std::vector<float> read(int64_t layer, const std::string& tensor, int64_t begin,
                          int64_t end) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace oscar
