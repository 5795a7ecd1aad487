// Rotary position embedding in half-split lane order: dims i and i + rotary_dim / 2 of a head turn
// together (formats.md 11).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "model/config.h"

namespace oscar {

// cos and sin of a range of positions, computed in double and multiplied by the attention factor.
struct RopeTable {
  size_t first_position = 0, num_positions = 0;
  size_t rotary_dim = 0;
  std::vector<float> cos, sin;  // [num_positions, rotary_dim / 2]
};
RopeTable make_rope_table(const RopeConfig& rope, size_t first_position, size_t num_positions);

struct RopeRows {
  float* rows = nullptr;  // [num_tokens, num_heads, head_dim], turned in place
  size_t num_tokens = 0, num_heads = 0, head_dim = 0;
  size_t token_stride = 0;    // floats from one token to the next, >= num_heads * head_dim
  size_t first_position = 0;  // of token 0; the others follow one by one
};
// Dims >= rotary_dim pass through. Throws Error when the table does not cover the positions.
void apply_rope(const RopeTable& table, const RopeRows& rows);
// The inverse: rows after RoPE as they were before it (the attention factor included).
void undo_rope(const RopeTable& table, const RopeRows& rows);

// All constants as one JSON object, for files that carry them, and back. `where` starts messages;
// throws Error naming the field. The text is empty for an unknown RoPE (rotary_dim 0).
std::string rope_to_json(const RopeConfig& rope);
RopeConfig rope_from_json(const std::string& text, const std::string& where);

}  // namespace oscar
