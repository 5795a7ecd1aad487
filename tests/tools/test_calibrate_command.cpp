// calibrate without a command line: options that change the recipe, several recipes, refusals.
#include <catch2/catch.hpp>
#include <filesystem>

#include "base/error.h"
#include "io/bundle_file.h"
#include "tests/calib/synthetic_capture.h"
#include "tests/support/paths.h"
#include "tools/cmd_calibrate.h"
#include "tools/commands.h"

namespace oscar {

using Catch::Matchers::Contains;

TEST_CASE("calibrate writes one bundle for every recipe", "[calibrate]") {
  const oscar_test::TemporaryFolder folder;
  oscar_test::write_synthetic_capture(folder / "c.h5", {.lengths = {400, 400, 400}});
  CalibrateCommand command;
  command.capture = folder / "c.h5";
  command.out = folder / "b-{recipe}.h5";
  command.recipes = {"official", "lean", "best"};
  command.quiet = true;
  run_calibrate(command);
  CHECK(read_bundle(folder / "b-official.h5").layers.at(0).k_mean.empty());
  CHECK_FALSE(read_bundle(folder / "b-lean.h5").layers.at(3).k_metric.empty());
  CHECK(read_bundle(folder / "b-best.h5").info.recipe == "best");
  CHECK_THAT(read_bundle(folder / "b-best.h5").info.options_json, Contains("\"held_out\":0.2"));

  // Options change the recipe; auto chooses one.
  command.out = folder / "one.h5";
  command.recipes = {"official"};
  command.composition = "plain";
  command.key_target = "ktk";
  command.per_head = command.center = true;
  command.clip_k = 0.5;
  run_calibrate(command);
  const BundleLayer layer = read_bundle(folder / "one.h5").layers.at(0);
  CHECK(layer.k_rotation.shape == Shape{2, 16, 16});
  CHECK(layer.k_mean.shape == Shape{2, 16});
  CHECK(layer.k_clip == 0.5);
  CHECK_THAT(layer.policy_json, Contains("\"rotation\":\"plain\"") && Contains("ktk"));
  command.recipes = {"auto"};
  command.bits = 4.0;  // fp16 metadata at this small head_dim
  command.write_cost = 0.01;
  run_calibrate(command);
  CHECK(read_bundle(folder / "one.h5").info.recipe == "centered");
}

TEST_CASE("calibrate refuses contradictory options and leaves nothing behind", "[calibrate]") {
  const oscar_test::TemporaryFolder folder;
  oscar_test::write_synthetic_capture(folder / "c.h5", {});
  CalibrateCommand good;
  good.capture = folder / "c.h5";
  good.out = folder / "b.h5";
  good.recipes = {"official"};
  good.quiet = true;
  const auto refuse = [&](auto change, const std::string& expected) {
    CalibrateCommand command = good;
    change(command);
    CHECK_THROWS_WITH(run_calibrate(command), Contains(expected));
    CHECK_FALSE(std::filesystem::exists(folder / "b.h5"));
  };
  refuse([](CalibrateCommand& c) { c.recipes = {"official", "paper"}; }, "{recipe}");
  refuse([](CalibrateCommand& c) { c.recipes = {"zap"}; }, "unknown recipe \"zap\"");
  refuse([](CalibrateCommand& c) { c.texts = {"t.txt"}; }, "either --capture or --model");
  refuse([](CalibrateCommand& c) { c.capture.clear(); }, "either --capture or --model");
  refuse([](CalibrateCommand& c) { c.composition = "rhp"; }, "unknown composition");
  refuse([](CalibrateCommand& c) { c.value_target = "qqt"; }, "unknown value target");
  refuse([](CalibrateCommand& c) { c.clip_v = 1.5; }, "--clip-v");
  refuse([](CalibrateCommand& c) { c.held_out = 0.95; }, "--held-out");
  refuse([](CalibrateCommand& c) { c.capture += ".none"; }, "c.h5.none");
  refuse([](CalibrateCommand& c) { c.out = "/nonexistent/b.h5"; }, "/nonexistent/b.h5");
  refuse([](CalibrateCommand& c) { c.recipes = {"lean"}; }, "--seq-len");
  // Statistics and bundle under one name, however it is spelled.
  refuse([](CalibrateCommand& c) { c.moments_out = c.out; }, "are the same file");
  refuse([&](CalibrateCommand& c) { c.moments_out = folder / "./b.h5"; }, "are the same file");
  refuse(
      [&](CalibrateCommand& c) {
        c.out = folder / "{recipe}.h5";
        c.moments_out = folder / "official.h5";
      },
      "--moments-out");
  refuse(
      [&](CalibrateCommand& c) {
        c.out = folder / "{recipe}.h5";
        c.recipes = {"auto"};
        c.bits = 4.0;
        c.write_cost = 0.01;
        c.moments_out = folder / "centered.h5";
      },
      "are the same file");
  refuse(
      [&](CalibrateCommand& c) {
        c.capture.clear();
        c.model = "m.gguf";
        c.texts = {"t.txt"};
        c.moments_out = c.out + ".part-rows";
      },
      "the unfinished run");
  CHECK_FALSE(std::filesystem::exists(folder / "centered.h5"));
}

TEST_CASE("calibrate refuses options that its source ignores", "[calibrate]") {
  const oscar_test::TemporaryFolder folder;
  oscar_test::write_synthetic_capture(folder / "c.h5", {});
  const auto run = [&](const std::vector<std::string>& arguments) {
    CLI::App app;
    add_calibrate(app);
    std::vector<std::string> reversed{"--quiet", "calibrate"};
    reversed.insert(reversed.begin(), arguments.rbegin(), arguments.rend());
    app.parse(reversed);
  };
  const std::vector<std::string> capture{"--capture", folder / "c.h5", "--recipe",
                                         "official",  "--moments-out", folder / "m.h5",
                                         "--out",     folder / "b.h5"};
  const std::vector<std::string> moments{"--moments", folder / "m.h5", "--recipe",
                                         "official",  "--out",         folder / "n.h5"};
  const auto with = [](std::vector<std::string> all, const std::vector<std::string>& more) {
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  run(with(capture, {"--compute", "fp32", "--held-out", "0.2"}));  // these are used
  for (const std::string name :
       {"--tokens", "--seq-len", "--skip-tokens", "--checkpoint-seconds"}) {
    CHECK_THROWS_WITH(run(with(capture, {name, "5"})), Contains(name) && Contains("--capture"));
    CHECK_THROWS_WITH(run(with(moments, {name, "5"})), Contains(name) && Contains("--moments"));
  }
  CHECK_THROWS_WITH(run(with(moments, {"--compute", "bf16"})), Contains("--compute"));
  CHECK_THROWS_WITH(run(with(moments, {"--held-out", "0.1"})), Contains("--held-out"));
  for (const std::string budget : {"--bits", "--write-cost"})
    CHECK_THROWS_WITH(run(with(moments, {budget, "0.5"})),
                      Contains(budget) && Contains("--recipe auto"));
  CHECK_FALSE(std::filesystem::exists(folder / "n.h5"));
  run(moments);
  CHECK(std::filesystem::exists(folder / "n.h5"));
}

}  // namespace oscar
