// A small model with random tokens, calibrated in one run or in shards.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "calib/calibrate.h"
#include "calib/capture.h"
#include "model/small_model.h"
#include "support/paths.h"

namespace oscar_test {

class ShardedRun {
 public:
  ShardedRun() {
    oscar::Random random(5);
    for (size_t s = 0; s < 4; ++s) {
      sequences.emplace_back(150);
      for (int32_t& token : sequences.back())
        token = static_cast<int32_t>(random.below(small_.weights.config.vocab_size));
    }
    weights = std::make_shared<const oscar::ModelWeights>(small_.weights);
    model = std::make_unique<oscar::Transformer>(weights, oscar::Compute::kFp32);
  }

  oscar::CalibrationOptions options(const std::vector<std::string>& recipes,
                                    double held_out) const {
    oscar::CalibrationOptions result;
    for (const std::string& name : recipes) result.recipes.push_back(oscar::recipe_options(name));
    result.held_out_fraction = held_out;
    result.sink = 8;
    result.recent = 16;
    result.weights = weights;
    return result;
  }

  // Sequences [begin, end).
  std::unique_ptr<oscar::ActivationSource> source(size_t begin, size_t end, double held_out,
                                                  const std::string& rows_path = {}) {
    std::vector<std::vector<int32_t>> part(sequences.begin() + static_cast<std::ptrdiff_t>(begin),
                                           sequences.begin() + static_cast<std::ptrdiff_t>(end));
    std::vector<size_t> offsets{0};
    for (const auto& sequence : part) offsets.push_back(offsets.back() + sequence.size());
    oscar::Provenance provenance;
    provenance.model_sha256 = std::string(64, 'a');
    provenance.num_layers = weights->config.num_layers;
    provenance.compute = "fp32";
    return oscar::model_source(*model, provenance, std::move(part),
                               {oscar::Compute::kFp32, folder.path(),
                                oscar::held_out_begin(offsets, held_out), rows_path});
  }

  // Writes moments of sequences [begin, end) to `name` in the folder.
  std::string write_moments(const std::string& name, size_t begin, size_t end, double held_out,
                            bool rows = false) {
    oscar::CalibrationOptions wanted = options({}, held_out);
    wanted.moments_out = folder / name;
    wanted.moments_rows = rows;
    oscar::calibrate(*source(begin, end, held_out), wanted, oscar::Progress{});
    return folder / name;
  }

  TemporaryFolder folder;
  std::vector<std::vector<int32_t>> sequences;
  std::shared_ptr<const oscar::ModelWeights> weights;
  std::unique_ptr<oscar::Transformer> model;

 private:
  SmallModel small_;
};

}  // namespace oscar_test
