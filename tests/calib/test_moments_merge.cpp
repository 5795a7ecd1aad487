#include <algorithm>

#include "base/error.h"
#include "calib/moments_merge.h"
#include "moments_fixture.h"
#include "support/compare.h"
#include "support/paths.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Contains;

namespace {

constexpr double kMergeError = 1e-12;  // relative to the largest entry: sums in another order

void check_sums(const MomentsLayer& actual, const MomentsLayer& expected,
                const std::string& left_out = {}) {
  REQUIRE(actual.sums.size() == expected.sums.size());
  for (const auto& [name, moment] : expected.sums) {
    if (name == left_out) continue;
    INFO(name);
    const Moment& found = actual.sums.at(name);
    CHECK(found.count == moment.count);
    double largest = 0.0;
    for (const double value : moment.sum.values) largest = std::max(largest, std::abs(value));
    CHECK_CLOSE(found.sum.data(), moment.sum.data(), moment.sum.size(),
                {.absolute = kMergeError * largest});
  }
  for (const auto& [name, rows] : expected.rows) {
    INFO(name);
    CHECK(actual.rows.at(name).values == rows.values);
  }
}

// A capture of KV heads [first, first + count) of a whole capture.
void write_rank(const CaptureReader& whole, const std::string& path, size_t first, size_t count) {
  CaptureInfo info = whole.info();
  const size_t group = static_cast<size_t>(info.num_heads / info.num_kv_heads);
  info.num_heads = static_cast<int64_t>(count * group);
  info.num_kv_heads = static_cast<int64_t>(count);
  CaptureWriter writer(path, info);
  const auto& offsets = whole.sequence_offsets();
  const size_t dim = static_cast<size_t>(info.head_dim);
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    writer.begin_sequence(
        {whole.token_ids().begin() + offsets[s], whole.token_ids().begin() + offsets[s + 1]});
    for (const int64_t layer : whole.layers()) {
      const auto part = [&](CaptureTensor tensor, size_t from, size_t heads) {
        const auto rows = whole.read(layer, tensor, offsets[s], offsets[s + 1]);
        const size_t all = whole.num_heads(tensor);
        std::vector<float> chosen;
        for (size_t t = 0; t * all * dim < rows.size(); ++t)
          chosen.insert(chosen.end(),
                        rows.begin() + static_cast<std::ptrdiff_t>((t * all + from) * dim),
                        rows.begin() + static_cast<std::ptrdiff_t>((t * all + from + heads) * dim));
        return chosen;
      };
      writer.append(layer, part(CaptureTensor::kQ, first * group, count * group).data(),
                    part(CaptureTensor::kK, first, count).data(),
                    part(CaptureTensor::kV, first, count).data(), nullptr);
    }
    writer.end_sequence();
  }
  writer.finish();
}

}  // namespace

TEST_CASE("shards of tokens add up to one run, held-out part and contest included") {
  ShardedRun run;
  const std::string all = run.write_moments("all.h5", 0, 4, 0.25, true);
  const std::string a = run.write_moments("a.h5", 0, 2, 0.0, true);
  const std::string b = run.write_moments("b.h5", 2, 4, 0.5, true);
  const MergedMoments merged({a, b}), whole({all});
  CHECK(merged.info().calibration_tokens() == 450);
  CHECK(merged.info().held_out_tokens() == 150);
  CHECK(merged.info().token_fingerprints == whole.info().token_fingerprints);
  CHECK_FALSE(merged.proxy_is_approximate());
  CHECK(merged.layers() == std::vector<int64_t>{0, 1, 2});
  // The weights of a shard's proxy are those of its own queries until they are computed again.
  for (const int64_t layer : merged.layers())
    check_sums(merged.layer(layer), whole.layer(layer), "proxy");

  // Every recipe from the shards, from the file of one run, and straight from the run.
  const std::vector<std::string> recipes{"official", "paper", "light", "lean", "best"};
  CalibrationOptions options = run.options(recipes, 0.25);
  const CalibrationResult direct = calibrate(*run.source(0, 4, 0.25), options, Progress{});
  const CalibrationResult from_file = calibrate_moments({all}, options, Progress{});
  options.moments_out = run.folder / "merged.h5";
  const CalibrationResult from_shards = calibrate_moments({a, b}, options, Progress{});
  check_sums(MomentsReader(run.folder / "merged.h5").read(1), [&] {
    MomentsLayer layer = whole.layer(1);
    layer.rows.erase("rows_k");
    layer.rows.erase("rows_v");
    return layer;
  }());
  for (size_t r = 0; r < recipes.size(); ++r) {
    INFO(recipes[r]);
    const Bundle& expected = direct.recipes[r].bundle;
    CHECK_FALSE(from_shards.recipes[r].bundle.info.approximate);
    CHECK(from_shards.recipes[r].bundle.info.tokens == 450);
    for (const auto& [id, layer] : expected.layers) {
      const BundleLayer& file = from_file.recipes[r].bundle.layers.at(id);
      CHECK(file.k_rotation.values == layer.k_rotation.values);
      CHECK(file.v_rotation.values == layer.v_rotation.values);
      CHECK(file.k_metric.values == layer.k_metric.values);
      CHECK(file.held_out_json == layer.held_out_json);
      CHECK(file.policy_json == layer.policy_json);
      const BundleLayer& shards = from_shards.recipes[r].bundle.layers.at(id);
      CHECK(shards.policy_json == layer.policy_json);
      CHECK_CLOSE(shards.k_metric.data(), layer.k_metric.data(), layer.k_metric.size(),
                  {.absolute = 1e-6});  // float32 storage
      CHECK_CLOSE(shards.v_eigenvalues.data(), layer.v_eigenvalues.data(),
                  layer.v_eigenvalues.size(), {.relative = 1e-10});
    }
  }
}

TEST_CASE("without the rows only the published value weights of a merge are approximate") {
  ShardedRun run;
  const std::string a = run.write_moments("a.h5", 0, 2, 0.0),
                    b = run.write_moments("b.h5", 2, 4, 0.5);
  CalibrationOptions options = run.options({"best", "paper"}, 0.25);
  options.moments_out = run.folder / "both.h5";
  const CalibrationResult result = calibrate_moments({a, b}, options, Progress{});
  CHECK(result.recipes[0].bundle.info.approximate);
  CHECK_FALSE(result.recipes[1].bundle.info.approximate);
  REQUIRE_FALSE(result.warnings.empty());
  CHECK(std::any_of(result.warnings.begin(), result.warnings.end(), [](const std::string& warning) {
    return warning.find("value rotations of best are approximate") != std::string::npos;
  }));
  // Remembered by what was merged.
  CHECK(MergedMoments({run.folder / "both.h5"}).proxy_is_approximate());
  const CalibrationResult exact =
      calibrate(*run.source(0, 4, 0.25), run.options({"paper"}, 0.25), Progress{});
  for (const auto& [id, layer] : exact.recipes[0].bundle.layers)
    CHECK_CLOSE(result.recipes[1].bundle.layers.at(id).v_eigenvalues.data(),
                layer.v_eigenvalues.data(), layer.v_eigenvalues.size(), {.relative = 1e-10});
}

TEST_CASE("ranks with different heads are set side by side and must cover all heads") {
  ShardedRun run;
  CaptureInfo info;
  info.bf16 = false;
  info.model_sha256 = std::string(64, 'a');
  capture(*run.model, Compute::kFp32, run.sequences, info, {}, run.folder / "c.h5", Progress{});
  const CaptureReader whole(run.folder / "c.h5");
  std::vector<std::string> files;
  for (size_t rank = 0; rank < 2; ++rank) {
    const std::string path = run.folder / ("r" + std::to_string(rank) + ".h5");
    write_rank(whole, path, rank, 1);
    const CaptureReader reader(path);
    CalibrationOptions options = run.options({}, 0.25);
    options.first_kv_head = rank;
    options.model_kv_heads = 2;
    options.moments_out = run.folder / ("m" + std::to_string(rank) + ".h5");
    calibrate(*capture_source(reader), options, Progress{});
    files.push_back(options.moments_out);
    options.recipes = {recipe_options("official")};
    CHECK_THROWS_WITH(calibrate(*capture_source(reader), options, Progress{}),
                      Contains("tensor-parallel"));
  }
  CalibrationOptions options = run.options({"best", "official"}, 0.25);
  const CalibrationResult direct = calibrate(*capture_source(whole), options, Progress{});
  const CalibrationResult ranks = calibrate_moments({files[1], files[0]}, options, Progress{});
  for (size_t r = 0; r < 2; ++r)
    for (const auto& [id, layer] : direct.recipes[r].bundle.layers) {
      const BundleLayer& other = ranks.recipes[r].bundle.layers.at(id);
      CHECK(other.k_rotation.values == layer.k_rotation.values);
      CHECK(other.v_rotation.values == layer.v_rotation.values);
      CHECK(other.k_metric.values == layer.k_metric.values);
      CHECK(other.v_metric.values == layer.v_metric.values);
      CHECK(other.held_out_json == layer.held_out_json);
    }
  CHECK_THROWS_WITH(MergedMoments({files[0]}), Contains("KV heads 1 .. 1 of 2 are in no file"));
  CHECK_THROWS_WITH(MergedMoments({files[1]}), Contains("KV heads 0 .. 0 of 2 are in no file"));
  CHECK_THROWS_WITH(MergedMoments({files[0], files[0]}), Contains("would count twice"));
}

TEST_CASE("shards that do not fit are refused") {
  ShardedRun run;
  const std::string a = run.write_moments("a.h5", 0, 2, 0.0);
  const std::string overlap = run.write_moments("b.h5", 1, 3, 0.0);
  CHECK_THROWS_WITH(MergedMoments({a, overlap}),
                    Contains("a.h5") && Contains("b.h5") && Contains("would count twice"));
  const auto refuse = [&](auto change, const std::string& expected) {
    const MomentsReader reader(run.write_moments("other.h5", 2, 4, 0.0));
    MomentsInfo info = reader.info();
    change(info);
    MomentsWriter writer(run.folder / "changed.h5", info);
    for (const int64_t layer : reader.layers())
      if (layer != 2 || info.model_architecture != "less") writer.write(layer, reader.read(layer));
    writer.finish();
    CHECK_THROWS_WITH(MergedMoments({a, run.folder / "changed.h5"}), Contains(expected));
  };
  refuse([](MomentsInfo& i) { i.model_sha256[0] = 'b'; }, "model");
  refuse([](MomentsInfo& i) { i.tokenizer_sha256 = "x"; }, "tokenizer");
  refuse([](MomentsInfo& i) { i.sink = 9; }, "--sink 8 and 9");
  refuse([](MomentsInfo& i) { i.recent = 9; }, "--recent 16 and 9");
  refuse([](MomentsInfo& i) { i.rope_theta = 5.0; }, "RoPE base");
  refuse([](MomentsInfo& i) { i.num_layers = 4; }, "number of layers");
  refuse([](MomentsInfo& i) { i.output_projection = "identity"; }, "output projection");
  refuse([](MomentsInfo& i) { i.sequences_complete = 1; }, "1 of 2 sequences");
  // Sequences of another length are pooled, and that is said.
  run.sequences[3].resize(100);
  const MergedMoments pooled({a, run.write_moments("short.h5", 3, 4, 0.0)});
  REQUIRE(pooled.warnings().size() == 1);
  CHECK_THAT(pooled.warnings()[0], Contains("150") && Contains("100") && Contains("pooled"));
}

TEST_CASE("a recipe that needs what the statistics lack is refused by layer and name") {
  ShardedRun run;
  const MomentsReader reader(run.write_moments("a.h5", 0, 4, 0.25));
  const auto without = [&](const std::string& name, const std::string& recipe) {
    MomentsWriter writer(run.folder / "less.h5", reader.info());
    for (const int64_t layer : reader.layers()) {
      MomentsLayer moments = reader.read(layer);
      if (layer == 1) moments.sums.erase(name);
      if (layer == 1 && name == "proxy") moments.weight_sums = {};
      if (layer == 1 && name == "output_energy") moments.output_energy = {};
      writer.write(layer, moments);
    }
    writer.finish();
    return calibrate_moments({run.folder / "less.h5"}, run.options({recipe}, 0.25), Progress{});
  };
  CHECK_THROWS_WITH(without("output_metric", "best"),
                    Contains("layer 1, KV head 0") && Contains("M_O"));
  CHECK_THROWS_WITH(without("logit_metric", "lean"),
                    Contains("layer 1, KV head 0") && Contains("M_A"));
  CHECK_THROWS_WITH(without("outputs", "paper"), Contains("layer 1") && Contains("sst"));
  CHECK_THROWS_WITH(without("proxy", "official"), Contains("layer 1") && Contains("proxy"));
  CHECK_THROWS_WITH(without("queries", "official"), Contains("layer 1") && Contains("queries"));
  CHECK_THROWS_WITH(without("key_sum", "centered"), Contains("layer 1") && Contains("means"));
  CHECK_THROWS_WITH(without("output_energy", "best"), Contains("layer 1") && Contains("M_V"));
}
