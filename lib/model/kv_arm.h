// An arm: how the KV cache of a run is stored. Every arm (BF16, naive, QuaRot, KIVI, OSCAR, INT4,
// ...) is a configuration of the same cache.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "io/bundle_file.h"
#include "model/config.h"
#include "quant/codec.h"

namespace oscar {

enum class WindowMode { kExact, kServing };

struct WindowSpec {
  size_t sink = 64;     // first tokens kept in high precision
  size_t recent = 256;  // last tokens kept in high precision
  WindowMode mode = WindowMode::kExact;
};

// One side (K or V) of one layer.
struct SideArm {
  TensorF rotation;  // [1 or Hkv, D, D], empty = identity; x' = (x - mean) R
  TensorF
      mean;  // [Hkv, D], empty = none. K: nothing is added back; V: added once to the head's output
  // Keys only, besides mean: [Hkv, D] mean before RoPE, see kv_position.h. Empty = none.
  TensorF position_mean;
  std::vector<std::shared_ptr<const Codec>> codecs;  // size 1 (shared) or Hkv
  const Codec& codec(size_t kv_head) const { return *codecs[codecs.size() == 1 ? 0 : kv_head]; }
  const float* rotation_of(size_t kv_head) const {
    return rotation.empty() ? nullptr : rotation.at(rotation.shape[0] == 1 ? 0 : kv_head);
  }
  const float* mean_of(size_t kv_head) const { return mean.empty() ? nullptr : mean.at(kv_head); }
  const float* position_mean_of(size_t kv_head) const {
    return position_mean.empty() ? nullptr : position_mean.at(kv_head);
  }
};

struct LayerArm {
  SideArm k, v;
};

enum class HighPrecision {
  kFp32,
  kBf16
};  // type of windows (and of everything, in a reference arm)

struct KvArm {
  std::string name;
  bool quantized =
      false;  // false: the whole cache is high precision (reference arm), layers is empty
  HighPrecision high_precision = HighPrecision::kBf16;
  WindowSpec windows;
  std::vector<LayerArm> layers;  // [num_layers] when quantized
  RopeConfig rope;               // of the model, where keys have a position_mean
  std::string bundle_sha256;     // of the file behind it, empty = none
  double bits_nominal = 16.0;    // INT2 rows without windows
};

// Throws Error naming arm, layer and side when the arm does not fit the model: number of layers or
// heads, widths, codecs of one side that differ in size, serving windows that are not multiples of
// the flush block.
void check(const KvArm& arm, const ModelConfig& config);

// Tokens that serving windows move to the packed pages at a time: 4 x the size of a high-precision
// element (formats.md 7.4).
inline size_t flush_block(const KvArm& arm) {
  return arm.high_precision == HighPrecision::kBf16 ? 8 : 16;
}

// First token after the INT2 range [sink, end) seen by the query at position t (exact windows):
// keys j with sink <= j < end are read dequantized. token_block > 1 (KIVI keys): only whole blocks
// counted from the sink are quantized.
inline size_t quantized_end(const WindowSpec& windows, size_t t, size_t token_block = 1) {
  const size_t seen = t + 1;
  if (seen <= windows.sink + windows.recent) return windows.sink;
  const size_t count = seen - windows.sink - windows.recent;
  return windows.sink + count / token_block * token_block;
}

// Options that apply to the arms named on a command line.
struct ArmOptions {
  WindowSpec windows;
  int group = 0;  // 0 = head_dim
  MetaFormat meta = MetaFormat::kScaleMinFp16;
  std::string model_sha256;   // of the model that will run; empty = a bundle's is not compared
  std::string bundle_sha256;  // of the bundle's file, recorded in the arm
  std::string bundle_path;    // for messages
};

// Builds an arm by name. bundle may be null where the recipe needs none.
//   bf16, fp32       reference arms
//   naive            INT2, no rotation, clip or windows;  naive-windows: with the windows
//   quarot           Hadamard, no windows, no clip;  hadamard: windows, clip 0.96 / 0.92
//   kivi             keys in groups of 32 tokens of a channel, values in groups of 32 channels
//   int4, int8       Hadamard, windows (controls)
//   oscar            the bundle's rotations and clip ratios;  oscar-centered: keys centered
//   oscar-light, oscar-lean, oscar-best   best_recipe.md, "The named recipes"
// Steps are changed by suffixes, each after a colon, in any order; "k." or "v." in front restricts
// one to a side:
//   no-centering no-v-centering centered   k.position (experimental: keys centered by position)
//   no-rotation h-only block-hadamard
//   rtn feedback no-feedback identity-metric damping=X   no-gain plain-gain metric-gain
//   grid-start metric-grid-start clip-start sweeps=N refits=N
//   multipliers=1|3|5|F/F/...   refit-multipliers=F/F/...   no-clip clip=X grid-clip
//   trellis (experimental, slow; from the clip start, no sweeps: oscar-lean:k.trellis)
//   bits=2|4|8 group=N
//   meta=fp16|log8|symmetric|scale-zero-fp32|scale-zero-bf16|scale-zero-fp16|vllm no-windows sink=N
//   recent=N exact serving fp32-windows
// rtn in place of the feedback encoder brings the bundle's clip ratio back; feedback switches it
// off. Throws Error naming arm and suffix, or the layer and head for which the bundle lacks
// something, or the two models when the bundle belongs to another one.
KvArm make_arm(const std::string& name, const ModelConfig& config, const ArmOptions& options,
               const Bundle* bundle);

// The names without suffixes.
std::vector<std::string> arm_names();
// Whether the arm (suffixes allowed) is built from a bundle. Throws Error listing the names when it
// is unknown.
bool arm_needs_bundle(const std::string& name);

// One line for reports: windows, and for each side rotation, centering, bits, encoder, clip,
// metadata.
std::string describe(const KvArm& arm);

}  // namespace oscar
