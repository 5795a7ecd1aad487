// Shape and constants of a decoder-only model, read from GGUF keys or config.json (formats.md 9
// and 10.2), and its RoPE frequencies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace oscar {

class GgufFile;

struct RopeConfig {
  double theta = 10000.0;
  size_t rotary_dim = 0;         // even, <= head_dim; dims beyond pass through
  std::string scaling = "none";  // none, linear, llama3, yarn
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  double original_context_length = 0.0;                  // llama3, yarn
  double beta_fast = 32.0, beta_slow = 1.0;              // yarn
  bool truncate = true;                                  // yarn
  double attention_factor = 1.0;                         // cos and sin are multiplied by it
  std::vector<float> frequency_divisors = {};  // GGUF rope_freqs, [rotary_dim / 2] or empty
};

struct ModelConfig {
  std::string architecture;  // llama, qwen2, qwen3
  std::string name;          // general.name or folder name
  size_t num_layers = 0, hidden_size = 0, intermediate_size = 0;
  size_t num_heads = 0, num_kv_heads = 0,
         head_dim = 0;  // K and V have the same width in the supported families
  size_t vocab_size = 0, context_length = 0;
  double rms_norm_eps = 1e-5;
  bool qkv_bias = false, output_bias = false, qk_norm = false, tied_embeddings = false;
  RopeConfig rope;
  std::vector<int64_t> eos_token_ids;
  int64_t bos_token_id = -1;  // -1: none
  bool add_bos = false;
  std::vector<std::string> warnings;  // oddities of the file, one line each, for the tool to print

  size_t group_size() const { return num_heads / num_kv_heads; }
};

// Both throw Error naming file and field: an architecture other than llama, qwen2, qwen3, missing
// or contradictory fields, unknown RoPE types, sliding windows, MLP biases, experts. vocab_size
// stays 0 when a GGUF file does not say it (the embedding does).
ModelConfig config_from_gguf(const GgufFile& file);
ModelConfig config_from_folder(const std::string& folder);  // reads folder/config.json

// Throws Error (messages start with `where`) unless the sizes are positive and sane, heads divide,
// the rotary width is even and the RoPE constants are finite and positive.
void check(const ModelConfig& config, const std::string& where);
void check(const RopeConfig& rope, const std::string& where);

// Angular frequencies per pair, [rotary_dim / 2], in double (formats.md 11).
std::vector<double> rope_frequencies(const RopeConfig& rope);

}  // namespace oscar
