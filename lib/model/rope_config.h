// Internal to the configuration readers: RoPE fields of config.json and of GGUF keys.
#pragma once

#include <string>
#include <vector>

#include "io/gguf.h"
#include "io/json_file.h"
#include "model/config.h"

namespace oscar {

// Fills config.rope from head_dim, context_length and the RoPE fields; appends to config.warnings.
// Throws Error naming the field (formats.md 11).
void read_rope_from_json(const JsonObject& json, ModelConfig& config);
// prefix: the architecture, as in "llama.rope.freq_base".
void read_rope_from_gguf(const GgufFile& file, const std::string& prefix, ModelConfig& config);

}  // namespace oscar
