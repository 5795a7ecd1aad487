#include <utility>

#include "base/error.h"
#include "calib/activation_source.h"

namespace oscar {
namespace {

// Renumbers the sequence, keeps what must be visited again, and passes on.
class SpillingObserver : public LayerObserver {
 public:
  SpillingObserver(LayerObserver& next, SpillRows& spill) : next_(next), spill_(spill) {}
  void start(size_t sequence, size_t first_token) {
    sequence_ = sequence;
    first_token_ = first_token;
  }
  void on_layer(const LayerActivations& activations) override {
    LayerActivations numbered = activations;
    numbered.sequence = sequence_;
    spill_.append(numbered, first_token_);
    next_.on_layer(numbered);
  }

 private:
  LayerObserver& next_;
  SpillRows& spill_;
  size_t sequence_ = 0, first_token_ = 0;
};

class ModelSource : public ActivationSource {
 public:
  ModelSource(Transformer& model, const Provenance& provenance,
              std::vector<std::vector<int32_t>> sequences, const ModelSourceOptions& options)
      : model_(model),
        geometry_{model.config().num_heads, model.config().num_kv_heads, model.config().head_dim},
        provenance_(provenance),
        sequences_(std::move(sequences)),
        options_(options),
        arm_(reference_arm(options.compute)) {
    offsets_.push_back(0);
    for (const auto& sequence : sequences_) {
      OSCAR_CHECK(!sequence.empty(), "calibration: an empty sequence");
      offsets_.push_back(offsets_.back() + sequence.size());
    }
    OSCAR_CHECK(offsets_.size() > 1, "calibration: no sequences");
    open_spill();
  }

  const HeadGeometry& geometry() const override { return geometry_; }
  const Provenance& provenance() const override { return provenance_; }
  const std::vector<size_t>& sequence_offsets() const override { return offsets_; }
  const ActivationRows& rows() const override { return *spill_; }

  std::vector<std::vector<size_t>> layer_batches() const override {
    std::vector<size_t> all(model_.config().num_layers);
    for (size_t layer = 0; layer < all.size(); ++layer) all[layer] = layer;
    return {all};
  }

  std::span<const int32_t> tokens(size_t sequence) const override {
    return sequences_.at(sequence);
  }
  Compute compute() const override { return options_.compute; }
  bool resumable() const override { return !options_.rows_path.empty(); }
  std::string keep_rows() override { return spill_->keep(); }
  void discard_rows() override { spill_->discard(); }

  void visit(const std::vector<size_t>& layers, const VisitNeeds& needs, LayerObserver& observer,
             const Progress& progress) override {
    OSCAR_CHECK(layers.size() == model_.config().num_layers,
                "calibration: a forward pass shows all layers at once");
    start_rows(needs);
    SpillingObserver spilling(observer, *spill_);
    for (size_t s = needs.first_sequence; s < sequences_.size(); ++s) {
      progress.step({"forward", offsets_[s], offsets_.back(), "tokens"});
      KvCache cache(model_.config(), arm_);
      spilling.start(s, offsets_[s]);
      const SequenceChunk chunk{.tokens = sequences_[s], .cache = &cache};
      model_.observe({&chunk, 1}, spilling);
      if (needs.after_sequence) needs.after_sequence(s + 1);
    }
    progress.step({"forward", offsets_.back(), offsets_.back(), "tokens"});
  }

 private:
  void open_spill() {
    const bool bf16 = options_.compute == Compute::kBf16;
    const size_t num_layers = model_.config().num_layers;
    spill_ = resumable() ? SpillRows::named(options_.rows_path, geometry_, num_layers, bf16,
                                            options_.queries_from)
                         : std::make_unique<SpillRows>(options_.spill_folder, geometry_, num_layers,
                                                       bf16, options_.queries_from);
  }

  void start_rows(const VisitNeeds& needs) {
    OSCAR_CHECK(resumable() || needs.first_sequence == 0,
                "calibration: this source cannot be resumed");
    if (!resumable()) return;
    if (needs.first_sequence == 0) {
      spill_->restart();
      return;
    }
    const auto end = offsets_.begin() + static_cast<std::ptrdiff_t>(needs.first_sequence) + 1;
    spill_->resume({offsets_.begin(), end}, needs.rows_checksum);
  }

  Transformer& model_;
  HeadGeometry geometry_;
  Provenance provenance_;
  std::vector<std::vector<int32_t>> sequences_;
  ModelSourceOptions options_;
  std::shared_ptr<const KvArm> arm_;
  std::vector<size_t> offsets_;
  std::unique_ptr<SpillRows> spill_;
};

}  // namespace

std::shared_ptr<const KvArm> reference_arm(Compute compute) {
  auto arm = std::make_shared<KvArm>();
  const bool fp32 = compute == Compute::kFp32;
  arm->name = fp32 ? "fp32" : "bf16";
  arm->high_precision = fp32 ? HighPrecision::kFp32 : HighPrecision::kBf16;
  return arm;
}

std::unique_ptr<ActivationSource> model_source(Transformer& model, const Provenance& provenance,
                                               std::vector<std::vector<int32_t>> sequences,
                                               const ModelSourceOptions& options) {
  return std::make_unique<ModelSource>(model, provenance, std::move(sequences), options);
}

}  // namespace oscar
