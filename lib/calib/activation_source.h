// Where calibration gets its activations: a capture file, or a model run over token sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/progress.h"
#include "calib/activation_rows.h"
#include "calib/statistics.h"
#include "io/capture_file.h"
#include "io/moments_file.h"
#include "model/transformer.h"

namespace oscar {

// Identity of model and text, copied into what is written.
struct Provenance {
  std::string model_architecture, model_sha256, tokenizer_sha256, text_sha256, tool_version;
  double rope_theta = 0.0;
  size_t num_layers = 0;  // of the model
  RopeConfig rope = {};   // rotary_dim 0 = not known
  std::string compute;    // "fp32", "bf16" or "capture"
  // Where every sequence stands in the texts, where that is known: text and first token are used.
  std::vector<MomentsSequence> origins;
};

// What visit() must show besides q, k and v, and from where.
struct VisitNeeds {
  bool outputs = false;            // LayerActivations::o
  bool log_sum_exp = false;        // LayerActivations::lse
  size_t first_sequence = 0;       // resumable sources only: those before are known and not shown
  std::string rows_checksum = {};  // with first_sequence: of the rows kept then, see keep_rows()
  // Called with the number of sequences shown whole in every layer, resumable sources only.
  std::function<void(size_t)> after_sequence = {};
};

class ActivationSource {
 public:
  virtual ~ActivationSource() = default;
  virtual const HeadGeometry& geometry() const = 0;
  virtual const Provenance& provenance() const = 0;
  virtual const std::vector<size_t>& sequence_offsets() const = 0;  // [num_sequences + 1]
  // Groups of layers to be visited together, in order: single layers where the source can be read
  // layer by layer, all of them where one pass yields everything.
  virtual std::vector<std::vector<size_t>> layer_batches() const = 0;
  // Shows every sequence of the batch's layers to the observer once, whole sequences, with
  // LayerActivations::sequence = sequence number. o and lse are given when needed.
  // Throws Error naming layer, sequence, tensor, token and head when a value is not finite.
  virtual void visit(const std::vector<size_t>& layers, const VisitNeeds& needs,
                     LayerObserver& observer, const Progress& progress) = 0;
  // Keys and values of every token, queries from `queries_from()` on; valid after visit().
  virtual const ActivationRows& rows() const = 0;
  virtual std::span<const int32_t> tokens(size_t sequence) const = 0;
  // Whether attention is computed with products of bf16 operands.
  virtual Compute compute() const = 0;

  // A source that shows all layers sequence by sequence can go on where an earlier run stopped, if
  // the rows are kept until then. Such a source owns its rows from the start: no other process can
  // have one with the same rows. keep_rows() returns their checksum.
  virtual bool resumable() const { return false; }
  virtual std::string keep_rows() { fail("these activations cannot be kept for a later run"); }
  virtual void discard_rows() {}

  size_t num_tokens() const { return sequence_offsets().back(); }
  size_t num_sequences() const { return sequence_offsets().size() - 1; }
};

// The reader must outlive the source. first_sequence > 0 leaves a warm-up sequence out. `compute`:
// outputs that the capture lacks are recomputed in float32, or, from rows stored in bf16, with bf16
// products (exact scores, weights rounded to bf16).
std::unique_ptr<ActivationSource> capture_source(const CaptureReader& reader,
                                                 size_t first_sequence = 0,
                                                 Compute compute = Compute::kFp32);

// A reference cache of the precision of the computation: float32 or bf16 rows.
std::shared_ptr<const KvArm> reference_arm(Compute compute);

struct ModelSourceOptions {
  Compute compute = Compute::kFp32;  // that of the model
  std::string spill_folder;          // for the temporary file of keys and values
  size_t queries_from = 0;           // queries are kept from this token on
  std::string rows_path = {};        // named file instead, which makes the source resumable
};
// The model must outlive the source. Every sequence is one forward call.
std::unique_ptr<ActivationSource> model_source(Transformer& model, const Provenance& provenance,
                                               std::vector<std::vector<int32_t>> sequences,
                                               const ModelSourceOptions& options);

}  // namespace oscar
