#include <cmath>

#include "base/error.h"
#include "io/hdf5_file.h"
#include "io/moments_file.h"
#include "support/paths.h"
#include "support/small_moments.h"

using namespace oscar;
using namespace oscar_test;
using Catch::Contains;

namespace {

MomentsLayer small_layer() {
  MomentsLayer layer;
  layer.sums["queries"] = {TensorD({2, 4, 4}, 0.1), 140.0};
  layer.sums["key_sum"] = {TensorD({2, 4}, -3.0), 54.0};
  layer.sums["proxy"] = {TensorD({2, 4, 4}, 2.0), 70.0};
  layer.weight_sums = TensorD({2}, 1e300);
  layer.output_energy = TensorD({4, 4, 4}, 1.0 / 3.0);
  for (const char* name : {"held_out_k", "held_out_v"}) layer.rows[name] = TensorF({5, 2, 4}, 1.5F);
  for (const char* name : {"contest_k", "contest_v"}) layer.rows[name] = TensorF({60, 2, 4}, 2.5F);
  layer.rows["contest_q"] = TensorF({3, 4, 4}, 0.5F);
  layer.contest_tokens = Tensor<int64_t>({3});
  layer.contest_tokens.values = {30, 40, 59};
  return layer;
}

void write_file(const std::string& path, const MomentsInfo& info, const MomentsLayer& layer) {
  MomentsWriter writer(path, info);
  writer.write(1, layer);
  writer.write(2, layer);
  writer.finish();
}

}  // namespace

TEST_CASE("moments come back bit for bit") {
  TemporaryFolder folder;
  const std::string path = folder / "m.h5";
  const MomentsInfo info = small_moments();
  MomentsLayer layer = small_layer();
  layer.sums["queries"].sum.values[5] = 0.1 + 0.2;
  write_file(path, info, layer);
  const MomentsReader reader(path);
  const MomentsInfo& found = reader.info();
  CHECK(found.model_sha256 == info.model_sha256);
  CHECK(found.compute == "bf16");
  CHECK(found.first_kv_head == 2);
  CHECK(found.sequences == info.sequences);
  CHECK(found.token_fingerprints == info.token_fingerprints);
  CHECK(found.calibration_tokens() == 70);
  CHECK(found.held_out_tokens() == 40);
  CHECK(found.longest_sequence() == 60);
  CHECK(found.complete());
  CHECK(reader.layers() == std::vector<int64_t>{1, 2});
  const MomentsLayer read = reader.read(2);
  CHECK(read.sums.size() == 3);
  CHECK(read.sums.at("queries").sum.values == layer.sums.at("queries").sum.values);
  CHECK(read.sums.at("key_sum").count == 54.0);
  CHECK(read.weight_sums.values == layer.weight_sums.values);
  CHECK(read.output_energy.values == layer.output_energy.values);
  CHECK(read.rows.size() == 5);
  CHECK(read.rows.at("contest_q").values == layer.rows.at("contest_q").values);
  CHECK(read.contest_tokens.values == layer.contest_tokens.values);
}

TEST_CASE("a moments file that is not finished does not appear") {
  TemporaryFolder folder;
  { MomentsWriter writer(folder / "m.h5", small_moments()); }
  CHECK(std::filesystem::is_empty(folder.path()));
  CHECK_THROWS_WITH(MomentsWriter("/nonexistent/m.h5", small_moments()), Contains("/nonexistent"));
}

TEST_CASE("hostile moments files are refused by name") {
  TemporaryFolder folder;
  const std::string path = folder / "m.h5";
  const auto refuse_info = [&](auto change, const std::string& expected) {
    MomentsInfo info = small_moments();
    change(info);
    write_file(path, info, small_layer());
    CHECK_THROWS_WITH(MomentsReader(path), Contains("m.h5") && Contains(expected));
  };
  refuse_info([](MomentsInfo& i) { i.head_dim = 0; }, "head_dim 0");
  refuse_info([](MomentsInfo& i) { i.num_heads = 7; }, "num_heads 7");
  refuse_info([](MomentsInfo& i) { i.local_kv_heads = 3; }, "KV heads 2 .. 4");
  refuse_info([](MomentsInfo& i) { i.first_kv_head = -1; }, "first_kv_head");
  refuse_info([](MomentsInfo& i) { i.sequences[0].calibration_tokens = 51; }, "/sequences");
  refuse_info([](MomentsInfo& i) { i.sequences_complete = 3; }, "sequences_complete is 3");
  refuse_info([](MomentsInfo& i) { i.num_layers = 2; }, "layer 2");
  refuse_info([](MomentsInfo& i) { i.token_fingerprints = {3, 1}; }, "token_fingerprints");
  const auto refuse_layer = [&](auto change, const std::string& expected) {
    MomentsLayer layer = small_layer();
    change(layer);
    write_file(path, small_moments(), layer);
    const MomentsReader reader(path);
    CHECK_THROWS_WITH(reader.read(1), Contains("m.h5") && Contains(expected));
  };
  refuse_layer(
      [](MomentsLayer& l) {
        l.sums["queries"].sum = TensorD({2, 4, 5}, 1.0);
      },
      "expected shape [2, 4, 4], got [2, 4, 5]");
  refuse_layer([](MomentsLayer& l) { l.sums["queries"].sum.values[17] = NAN; },
               "queries: non-finite value in head 1");
  refuse_layer([](MomentsLayer& l) { l.rows["contest_k"].values[13] = INFINITY; },
               "contest_k: non-finite value in head 1");
  refuse_layer([](MomentsLayer& l) { l.sums["key_sum"].count = -1.0; }, "count is -1");
  refuse_layer([](MomentsLayer& l) { l.weight_sums = {}; }, "weight_sums");
  refuse_layer([](MomentsLayer& l) { l.contest_tokens.values[2] = 60; }, "contest_tokens");
  refuse_layer(
      [](MomentsLayer& l) {
        l.rows["held_out_v"] = TensorF({4, 2, 4}, 1.0F);
      },
      "held_out_k has 5 tokens, held_out_v 4");
  refuse_layer([](MomentsLayer& l) { l.output_energy = TensorD({2, 4, 4}, 1.0); }, "output_energy");
  write_file(path, small_moments(), small_layer());
  std::filesystem::resize_file(path, 3000);
  CHECK_THROWS_WITH(MomentsReader(path), Contains("m.h5"));
  CHECK_THROWS_WITH(MomentsReader(folder / "none.h5"), Contains("none.h5"));
}
