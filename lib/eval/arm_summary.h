// What a report says about an arm beside its measurements: codec, windows, honest bits per element.
#pragma once

#include <cstddef>
#include <string>

#include "model/kv_arm.h"

namespace oscar {

// Bits of one stored K or V element, windows and metadata included, when the cache holds `tokens`
// tokens under exact windows (evaluation.md 8): (n_hp * 16 + n_q * stored bits) / tokens, mean over
// layers and over K and V. Rotations and means are not in it.
double bits_per_element(const KvArm& arm, size_t tokens);

// Tokens of a cache of `tokens` tokens that are quantized under exact windows (keys; whole blocks
// only where groups run over tokens).
size_t quantized_tokens(const WindowSpec& windows, size_t tokens, size_t token_block);

struct ArmSummary {
  std::string name;
  bool quantized = false;
  WindowSpec windows;
  std::string codec;              // "int2", "int4", "int8", "bf16", "fp32"
  std::string group;              // "128", "32 tokens"; empty for high precision
  double meta_bits = 0;           // of one stored value; 0 for high precision
  double clip_k = 0, clip_v = 0;  // of layer 0
  std::string encoder_k, encoder_v;
  bool centered_k = false, centered_v = false;
  double bits_nominal = 16;
  std::string bundle_sha256;
};

ArmSummary summarize(const KvArm& arm);

// "64/256"
std::string to_string(const WindowSpec& windows);
// "exact" or "serving"
std::string mode_name(WindowMode mode);

}  // namespace oscar
