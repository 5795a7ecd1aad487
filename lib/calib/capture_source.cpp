#include <algorithm>

#include "base/error.h"
#include "base/finite.h"
#include "calib/activation_source.h"
#include "model/attention.h"
#include "model/rope.h"

namespace oscar {
namespace {

class CaptureSource : public ActivationSource {
 public:
  CaptureSource(const CaptureReader& reader, size_t first_sequence, Compute compute)
      : reader_(reader),
        rows_(reader),
        compute_(reader.info().bf16 ? compute : Compute::kFp32),
        first_token_(0) {
    const CaptureInfo& info = reader.info();
    geometry_ = {static_cast<size_t>(info.num_heads), static_cast<size_t>(info.num_kv_heads),
                 static_cast<size_t>(info.head_dim)};
    provenance_ = {info.model_architecture,
                   info.model_sha256,
                   info.tokenizer_sha256,
                   info.text_sha256,
                   info.tool_version,
                   info.rope_theta,
                   static_cast<size_t>(info.num_layers),
                   rope_from_json(info.rope_json, reader.path() + ", attribute rope"),

                   "capture",
                   {}};
    const auto& offsets = reader.sequence_offsets();
    OSCAR_CHECK(first_sequence + 1 < offsets.size(), reader.path(), ": only ", offsets.size() - 1,
                " sequences, none left after a warm-up of ", first_sequence);
    first_token_ = static_cast<size_t>(offsets[first_sequence]);
    for (size_t s = first_sequence; s < offsets.size(); ++s)
      offsets_.push_back(static_cast<size_t>(offsets[s]) - first_token_);
    rows_.set_first_token(first_token_);
  }

  const HeadGeometry& geometry() const override { return geometry_; }
  const Provenance& provenance() const override { return provenance_; }
  const std::vector<size_t>& sequence_offsets() const override { return offsets_; }
  const ActivationRows& rows() const override { return rows_; }

  std::span<const int32_t> tokens(size_t sequence) const override {
    const std::span<const int32_t> all(reader_.token_ids());
    return all.subspan(first_token_ + offsets_.at(sequence),
                       offsets_.at(sequence + 1) - offsets_.at(sequence));
  }

  Compute compute() const override { return compute_; }

  std::vector<std::vector<size_t>> layer_batches() const override {
    std::vector<std::vector<size_t>> batches;
    for (const int64_t layer : reader_.layers()) batches.push_back({static_cast<size_t>(layer)});
    return batches;
  }

  void visit(const std::vector<size_t>& layers, const VisitNeeds& needs, LayerObserver& observer,
             const Progress& progress) override {
    for (const size_t layer : layers)
      for (size_t sequence = 0; sequence + 1 < offsets_.size(); ++sequence) {
        progress.check();
        visit_sequence(layer, sequence, needs, observer);
      }
  }

 private:
  void read(size_t layer, size_t sequence, CaptureTensor tensor, std::vector<float>& values) {
    const size_t begin = offsets_[sequence], end = offsets_[sequence + 1];
    const size_t row = reader_.num_heads(tensor) * geometry_.head_dim;
    values.resize((end - begin) * row);
    rows_.read(layer, tensor, begin, end, values.data());
    const size_t bad = first_non_finite(values.data(), values.size());
    OSCAR_CHECK(bad == values.size(), reader_.path(), ": layer ", layer, ", tensor ",
                tensor_name(tensor), ": non-finite value at token ",
                first_token_ + begin + bad / row, ", head ", bad % row / geometry_.head_dim);
  }

  void visit_sequence(size_t layer, size_t sequence, const VisitNeeds& needs,
                      LayerObserver& observer) {
    read(layer, sequence, CaptureTensor::kQ, q_);
    read(layer, sequence, CaptureTensor::kK, k_);
    read(layer, sequence, CaptureTensor::kV, v_);
    LayerActivations activations{.layer = layer,
                                 .sequence = sequence,
                                 .num_tokens = offsets_[sequence + 1] - offsets_[sequence],
                                 .q = q_.data(),
                                 .k = k_.data(),
                                 .v = v_.data()};
    const bool recompute = needs.log_sum_exp || (needs.outputs && !reader_.info().has_outputs);
    if (recompute) {
      attend(activations);
    } else if (needs.outputs) {
      read(layer, sequence, CaptureTensor::kO, o_);
    }
    if (recompute || needs.outputs) activations.o = o_.data();
    if (recompute) activations.lse = lse_.data();
    observer.on_layer(activations);
  }

  // Outputs and log-sum-exp by exact attention over the captured rows.
  void attend(const LayerActivations& activations) {
    ModelConfig config;
    config.num_layers = 1;
    config.num_heads = geometry_.num_heads;
    config.num_kv_heads = geometry_.num_kv_heads;
    config.head_dim = geometry_.head_dim;
    KvCache cache(config, reference_arm(compute_));
    o_.resize(q_.size());
    lse_.resize(activations.num_tokens * geometry_.num_heads);
    append_and_attend(cache, 0, activations.num_tokens, activations.q, activations.k, activations.v,
                      o_.data(), lse_.data(), compute_);
  }

  const CaptureReader& reader_;
  CaptureRows rows_;
  Compute compute_;  // of recomputed outputs
  size_t first_token_;
  HeadGeometry geometry_;
  Provenance provenance_;
  std::vector<size_t> offsets_;
  std::vector<float> q_, k_, v_, o_, lse_;
};

}  // namespace

std::unique_ptr<ActivationSource> capture_source(const CaptureReader& reader, size_t first_sequence,
                                                 Compute compute) {
  return std::make_unique<CaptureSource>(reader, first_sequence, compute);
}

}  // namespace oscar
