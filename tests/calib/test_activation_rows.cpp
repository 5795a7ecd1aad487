#include "base/error.h"
#include "base/float16.h"
#include "calib/activation_rows.h"
#include "support/paths.h"
#include "synthetic_capture.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Contains;

TEST_CASE("spilled rows come back, across sequences, in bf16 and float32") {
  TemporaryFolder folder;
  const HeadGeometry geometry{4, 2, 8};
  const std::vector<size_t> lengths{30, 50, 20};
  for (const bool bf16 : {false, true}) {
    SpillRows spill(folder.path(), geometry, 2, bf16, 40);
    std::vector<float> all_k, all_q;
    size_t first = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (size_t layer = 0; layer < 2; ++layer) {
        const uint64_t seed = s * 10 + layer * 3;
        const auto q = synthetic_rows(seed, lengths[s], 4, 8);
        const auto k = synthetic_rows(seed + 1, lengths[s], 2, 8);
        const auto v = synthetic_rows(seed + 2, lengths[s], 2, 8);
        spill.append({.layer = layer,
                      .sequence = s,
                      .num_tokens = lengths[s],
                      .q = q.data(),
                      .k = k.data(),
                      .v = v.data()},
                     first);
        if (layer == 1) {
          all_q.insert(all_q.end(), q.begin(), q.end());
          all_k.insert(all_k.end(), k.begin(), k.end());
        }
      }
      first += lengths[s];
    }
    if (bf16) {
      round_to_bf16(all_k.data(), all_k.size());
      round_to_bf16(all_q.data(), all_q.size());
    }
    std::vector<float> k(70 * 16), q(60 * 32);
    spill.read(1, CaptureTensor::kK, 20, 90, k.data());
    CHECK(std::equal(k.begin(), k.end(), all_k.begin() + 20 * 16));
    spill.read(1, CaptureTensor::kQ, 30, 90, q.data());
    CHECK(std::equal(q.begin(), q.end(), all_q.begin() + 30 * 32));
    CHECK_THROWS_WITH(spill.read(1, CaptureTensor::kQ, 20, 90, q.data()), Contains("not kept"));
    CHECK_THROWS_WITH(spill.read(2, CaptureTensor::kK, 20, 90, k.data()), Contains("layer 2"));
    CHECK(std::filesystem::is_empty(folder.path()));  // unlinked
  }
  CHECK_THROWS_WITH(SpillRows(folder / "none", geometry, 2, true, 0), Contains("none"));
}
