#include "calib/capture.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "calib/activation_source.h"
#include "model/rope.h"

namespace oscar {
namespace {

class CaptureObserver : public LayerObserver {
 public:
  CaptureObserver(CaptureWriter& writer, const std::vector<size_t>& layers, bool outputs)
      : writer_(writer), layers_(layers.begin(), layers.end()), outputs_(outputs) {}
  void on_layer(const LayerActivations& a) override {
    if (!layers_.empty() && layers_.count(a.layer) == 0) return;
    writer_.append(static_cast<int64_t>(a.layer), a.q, a.k, a.v, outputs_ ? a.o : nullptr);
  }

 private:
  CaptureWriter& writer_;
  std::set<size_t> layers_;
  bool outputs_;
};

// The tokens of an unfinished capture must be the first tokens of these sequences.
void check_resumed_tokens(const CaptureWriter& writer,
                          const std::vector<std::vector<int32_t>>& sequences,
                          const std::string& path) {
  const std::vector<int32_t> done = writer.token_ids_done();
  OSCAR_CHECK(writer.sequences_done() <= sequences.size(), path, ".part holds ",
              writer.sequences_done(), " sequences, expected at most ", sequences.size());
  size_t position = 0;
  for (size_t s = 0; s < writer.sequences_done(); ++s) {
    const std::vector<int32_t>& expected = sequences[s];
    OSCAR_CHECK(position + expected.size() <= done.size() &&
                    std::equal(expected.begin(), expected.end(),
                               done.begin() + static_cast<std::ptrdiff_t>(position)),
                path, ".part: the tokens of sequence ", s, " differ from the text's");
    position += expected.size();
  }
}

}  // namespace

CaptureResult capture(Transformer& model, Compute compute,
                      const std::vector<std::vector<int32_t>>& sequences, CaptureInfo info,
                      const std::vector<size_t>& layers, const std::string& path,
                      const Progress& progress) {
  const ModelConfig& config = model.config();
  for (const size_t layer : layers)
    OSCAR_CHECK(layer < config.num_layers, "--layers: layer ", layer, " in a model of ",
                config.num_layers, " layers");
  info.head_dim = static_cast<int64_t>(config.head_dim);
  info.num_layers = static_cast<int64_t>(config.num_layers);
  info.num_heads = static_cast<int64_t>(config.num_heads);
  info.num_kv_heads = static_cast<int64_t>(config.num_kv_heads);
  info.rope_theta = config.rope.theta;
  info.rope_json = rope_to_json(config.rope);
  CaptureWriter writer(path, info);
  check_resumed_tokens(writer, sequences, path);
  CaptureObserver observer(writer, layers, info.has_outputs);
  CaptureResult result;
  result.sequences_resumed = writer.sequences_done();
  const auto arm = reference_arm(compute);
  size_t total = 0;
  for (const auto& sequence : sequences) total += sequence.size();
  for (const auto& sequence : sequences) {
    if (result.sequences++ >= result.sequences_resumed) {
      progress.step({"capture", result.tokens, total, "tokens"});
      KvCache cache(config, arm);
      const SequenceChunk chunk{.tokens = sequence, .cache = &cache};
      writer.begin_sequence(sequence);
      model.observe({&chunk, 1}, observer);
      writer.end_sequence();
    }
    result.tokens += sequence.size();
  }
  writer.finish();
  progress.step({"capture", total, total, "tokens"});
  return result;
}

}  // namespace oscar
