#include <atomic>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "calib/checkpoint.h"
#include "moments_fixture.h"
#include "support/paths.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Contains;

namespace {

// Stops a run at the start of sequence `at`.
struct StopAt {
  std::atomic<bool> stop{false};
  Progress progress;
  explicit StopAt(size_t tokens) {
    progress.interrupted = &stop;
    progress.report = [this, tokens](const ProgressUpdate& update) {
      if (update.stage == "forward" && update.done == tokens) stop = true;
    };
  }
};

}  // namespace

TEST_CASE("an interrupted calibration continues with the same bits") {
  ShardedRun run;
  const std::vector<std::string> recipes{"official", "paper", "light", "best"};
  CalibrationOptions options = run.options(recipes, 0.25);
  const CalibrationResult whole = calibrate(*run.source(0, 4, 0.25), options, Progress{});
  const std::string part = run.folder / "b.h5.part", rows = part + "-rows";
  options.checkpoint_path = part;
  for (const double seconds : {0.0, 1e9}) {  // saved after every sequence; only when interrupted
    options.checkpoint_seconds = seconds;
    for (const size_t stop_at : {300, 450}) {
      StopAt stop(stop_at);
      CHECK_THROWS_AS(calibrate(*run.source(0, 4, 0.25, rows), options, stop.progress),
                      Interrupted);
      CHECK(MomentsReader(part).info().sequences_complete == static_cast<int64_t>(stop_at / 150));
      CHECK(std::filesystem::exists(rows));
    }
    const CalibrationResult resumed = calibrate(*run.source(0, 4, 0.25, rows), options, Progress{});
    CHECK(resumed.sequences_resumed == 3);
    CHECK_FALSE(std::filesystem::exists(part));
    CHECK_FALSE(std::filesystem::exists(rows));
    for (size_t r = 0; r < recipes.size(); ++r)
      for (const auto& [id, layer] : whole.recipes[r].bundle.layers) {
        const BundleLayer& other = resumed.recipes[r].bundle.layers.at(id);
        CHECK(other.k_rotation.values == layer.k_rotation.values);
        CHECK(other.v_rotation.values == layer.v_rotation.values);
        CHECK(other.k_mean.values == layer.k_mean.values);
        CHECK(other.k_metric.values == layer.k_metric.values);
        CHECK(other.k_eigenvalues.values == layer.k_eigenvalues.values);
        CHECK(other.v_eigenvalues.values == layer.v_eigenvalues.values);
        CHECK(other.held_out_json == layer.held_out_json);
      }
  }
}

TEST_CASE("an unfinished calibration is continued by the same command only") {
  ShardedRun run;
  CalibrationOptions options = run.options({"official"}, 0.25);
  const std::string part = run.folder / "b.h5.part", rows = part + "-rows";
  options.checkpoint_path = part;
  StopAt stop(300);
  CHECK_THROWS_AS(calibrate(*run.source(0, 4, 0.25, rows), options, stop.progress), Interrupted);
  CalibrationOptions other = options;
  other.sink = 9;
  CHECK_THROWS_WITH(calibrate(*run.source(0, 4, 0.25, rows), other, Progress{}),
                    Contains("b.h5.part") && Contains("windows"));
  CHECK_THROWS_WITH(calibrate(*run.source(0, 3, 0.25, rows), options, Progress{}),
                    Contains("tokens"));
  other = options;
  other.options_json = "{\"a\": 1}";
  CHECK_THROWS_WITH(calibrate(*run.source(0, 4, 0.25, rows), other, Progress{}),
                    Contains("options"));
  other = options;
  other.recipes = {recipe_options("paper")};
  CHECK_THROWS_WITH(calibrate(*run.source(0, 4, 0.25, rows), other, Progress{}),
                    Contains("b.h5.part") && Contains("recipes") &&
                        Contains("second moments there") && Contains("attention outputs here") &&
                        Contains("b.h5.part-rows to start"));
  std::filesystem::resize_file(rows, 100);
  CHECK_THROWS_WITH(calibrate(*run.source(0, 4, 0.25, rows), options, Progress{}),
                    Contains("part-rows") && Contains("byte 100"));
  CHECK(std::filesystem::exists(part));
  CHECK(std::filesystem::exists(rows));
}

TEST_CASE("damaged remains of an unfinished calibration are refused and left as they are") {
  ShardedRun run;
  CalibrationOptions options = run.options({"official"}, 0.25);
  const std::string part = run.folder / "b.h5.part", rows = part + "-rows";
  options.checkpoint_path = part;
  StopAt stop(300);
  CHECK_THROWS_AS(calibrate(*run.source(0, 4, 0.25, rows), options, stop.progress), Interrupted);
  const auto kept = std::filesystem::file_size(rows);
  {
    std::fstream file(rows, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(kept / 2));
    file.write("damage", 6);
  }
  CHECK_THROWS_WITH(calibrate(*run.source(0, 4, 0.25, rows), options, Progress{}),
                    Contains("b.h5.part-rows") && Contains("checksum") && Contains("expected") &&
                        Contains("delete"));
  CHECK(std::filesystem::file_size(rows) == kept);
  std::ofstream(part) << "junk";
  CHECK_THROWS_WITH(calibrate(*run.source(0, 4, 0.25, rows), options, Progress{}),
                    Contains("b.h5.part") && Contains("not an HDF5 file") &&
                        Contains("b.h5.part-rows to start anew"));
  CHECK(std::filesystem::file_size(rows) == kept);
}

TEST_CASE("two calibrations with the same output do not run at the same time") {
  ShardedRun run;
  CalibrationOptions options = run.options({"official"}, 0.25);
  options.checkpoint_path = run.folder / "b.h5.part";
  const std::string rows = options.checkpoint_path + "-rows";
  {
    const auto first = run.source(0, 4, 0.25, rows);
    CHECK_THROWS_WITH(run.source(0, 4, 0.25, rows),
                      Contains("b.h5.part-rows") && Contains("another process"));
    CHECK(calibrate(*first, options, Progress{}).tokens == 450);
  }
  CHECK(std::filesystem::is_empty(run.folder.path()));
  CHECK(calibrate(*run.source(0, 4, 0.25, rows), options, Progress{}).tokens == 450);
}

TEST_CASE("a run that is never saved leaves no file") {
  ShardedRun run;
  CalibrationOptions options = run.options({"official"}, 0.25);
  options.checkpoint_path = run.folder / "b.h5.part";
  StopAt stop(0);  // nothing to save yet
  CHECK_THROWS_AS(
      calibrate(*run.source(0, 4, 0.25, run.folder / "b.h5.part-rows"), options, stop.progress),
      Interrupted);
  CHECK(std::filesystem::is_empty(run.folder.path()));
}
