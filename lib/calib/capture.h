// Capture: a model run over token sequences, its post-RoPE activations written to capture.h5.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/progress.h"
#include "io/capture_file.h"
#include "model/transformer.h"

namespace oscar {

struct CaptureResult {
  size_t sequences_resumed = 0;  // found whole in an unfinished file of the same provenance
  size_t sequences = 0, tokens = 0;
};

// Writes layers `layers` (ascending; empty = all) of every sequence to `path`; info.head_dim,
// num_layers, num_heads, num_kv_heads and rope_theta are taken from the model. Continues after the
// last whole sequence of an unfinished file. compute: that of the model, decides whether K and V
// are attended to in float32 or bf16. An interruption leaves that file to be resumed. The
// memory is that of one sequence.
CaptureResult capture(Transformer& model, Compute compute,
                      const std::vector<std::vector<int32_t>>& sequences, CaptureInfo info,
                      const std::vector<size_t>& layers, const std::string& path,
                      const Progress& progress);

}  // namespace oscar
