// The forward pass against float64 reference logits, activations and perplexity of real models.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "io/hdf5_file.h"
#include "model/sampler.h"
#include "model/tokenizer.h"
#include "model/transformer.h"
#include "support/compare.h"
#include "support/paths.h"

using namespace oscar;
using nlohmann::json;

namespace {

json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  return json::parse(file);
}

std::shared_ptr<const KvArm> exact_arm() {
  auto arm = std::make_shared<KvArm>();
  arm->name = "fp32";
  arm->high_precision = HighPrecision::kFp32;
  return arm;
}

std::shared_ptr<const ModelWeights> load(const std::filesystem::path& path) {
  return std::make_shared<const ModelWeights>(load_weights(path.string()));
}

// Log-probabilities in double from float logits.
std::vector<double> log_softmax(const float* logits, size_t vocab) {
  double largest = -HUGE_VAL, sum = 0.0;
  for (size_t i = 0; i < vocab; ++i) largest = std::max(largest, static_cast<double>(logits[i]));
  for (size_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[i]) - largest);
  std::vector<double> result(vocab);
  for (size_t i = 0; i < vocab; ++i)
    result[i] = static_cast<double>(logits[i]) - largest - std::log(sum);
  return result;
}

struct Deviation {
  double max_top20 = 0.0, sum_top20 = 0.0, sum_nll = 0.0;
  double kl = 0.0, max_kl = 0.0;  // over the reference's top 20 and the rest lumped together
  size_t positions = 0, top1_equal = 0, top1_unequal_clear = 0;
};

// Runs one input of a logits fixture in a single chunk and compares every stored position.
Deviation deviation(Transformer& model, const json& input) {
  const std::vector<int32_t> ids = input["ids"];
  const size_t vocab = model.config().vocab_size, hidden = model.config().hidden_size;
  KvCache cache(model.config(), exact_arm());
  const SequenceChunk chunk{ids, &cache};
  const std::vector<float> states = model.forward({&chunk, 1});
  std::vector<float> logits(ids.size() * vocab);
  model.logits(states.data(), states.size() / hidden, logits.data());
  Deviation d;
  for (size_t t = 0; t + 1 < ids.size(); ++t) {
    const std::vector<double> p = log_softmax(logits.data() + t * vocab, vocab);
    d.sum_nll -= p[static_cast<size_t>(ids[t + 1])];
  }
  for (const json& position : input["positions"]) {
    const size_t t = position["pos"];
    const std::vector<size_t> top_ids = position["top_ids"];
    const std::vector<double> expected = position["top_logprobs"];
    const std::vector<double> p = log_softmax(logits.data() + t * vocab, vocab);
    double kl = 0.0, rest_expected = 1.0, rest_actual = 1.0;
    for (size_t i = 0; i < top_ids.size(); ++i) {
      const double difference = std::abs(p[top_ids[i]] - expected[i]);
      d.max_top20 = std::max(d.max_top20, difference);
      d.sum_top20 += difference / static_cast<double>(top_ids.size());
      kl += std::exp(expected[i]) * (expected[i] - p[top_ids[i]]);
      rest_expected -= std::exp(expected[i]);
      rest_actual -= std::exp(p[top_ids[i]]);
    }
    if (rest_expected > 1e-4 && rest_actual > 1e-4)
      kl += rest_expected * std::log(rest_expected / rest_actual);
    d.kl += std::max(kl, 0.0);
    d.max_kl = std::max(d.max_kl, kl);
    const auto best = static_cast<size_t>(std::max_element(p.begin(), p.end()) - p.begin());
    ++d.positions;
    if (best == top_ids[0]) {
      ++d.top1_equal;
    } else if (expected[0] - expected[1] > 2e-3) {
      ++d.top1_unequal_clear;
    }
  }
  return d;
}

// Greedy continuation, one token at a time; compared up to the first step whose gap is too small.
void check_greedy(Transformer& model, const json& input) {
  const std::vector<int32_t> ids = input["ids"];
  const std::vector<int32_t> expected = input["greedy"]["ids"];
  const std::vector<double> gaps = input["greedy"]["top1_top2_logit_gap"];
  KvCache cache(model.config(), exact_arm());
  std::vector<float> logits(model.config().vocab_size);
  std::vector<int32_t> next = ids;
  for (size_t step = 0; step < expected.size() && gaps[step] >= 2e-3; ++step) {
    const SequenceChunk chunk{next, &cache};
    const std::vector<float> states = model.forward({&chunk, 1});
    model.logits(states.data() + states.size() - model.config().hidden_size, 1, logits.data());
    const int32_t token = argmax_token(logits.data(), logits.size());
    INFO("step " << step);
    REQUIRE(token == expected[step]);
    next = {token};
  }
}

void check_parity(const std::filesystem::path& model_path, const std::string& fixture,
                  Compute compute, bool greedy) {
  const auto path = oscar_test::shared("fixtures/logits/" + fixture + ".json");
  SKIP_UNLESS(path, "no reference logits");
  Transformer model(load(model_path), compute);
  const json fixture_file = read_json(*path);
  REQUIRE(fixture_file["inputs"].size() == 4);
  for (const json& input : fixture_file["inputs"]) {
    const std::string name = input["name"];
    const Deviation d = deviation(model, input);
    const double n = static_cast<double>(d.positions), nll = input["sum_nll"];
    const double nll_error = std::abs(d.sum_nll - nll) / nll;
    CAPTURE(name, d.positions, d.max_top20, d.sum_top20 / n, d.kl / n, d.max_kl, nll_error);
    CHECK(d.positions > 0);
    if (compute == Compute::kFp32) {
      CHECK(d.max_top20 <= 1e-3);
      CHECK(nll_error <= 1e-5);
      // The stored log-probabilities have 6 decimals, which limits this estimate of the KL.
      CHECK(d.kl / n <= 1e-6);
      CHECK(d.top1_unequal_clear == 0);
    } else if (name == "passage") {
      CHECK(static_cast<double>(d.top1_equal) / n >= 0.97);
      CHECK(d.sum_top20 / n <= 0.08);
      CHECK(d.max_top20 <= 1.5);
      CHECK(d.kl / n <= 1.5e-3);
      CHECK(nll_error <= 4e-3);
    }
    if (greedy && input["greedy"].is_object()) check_greedy(model, input);
  }
}

bool bf16_supported() {
  try {
    check_compute_supported(Compute::kBf16);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

TEST_CASE("SmolLM2 float32 logits agree with the float64 reference", "[model]") {
  const auto model = oscar_test::demo_model();
  SKIP_UNLESS(model, "no demo model");
  check_parity(*model, "smollm2", Compute::kFp32, true);
}

TEST_CASE("SmolLM2 bf16 logits are within the reference's bf16 tolerances", "[model]") {
  const auto model = oscar_test::demo_model();
  SKIP_UNLESS(model, "no demo model");
  SKIP_UNLESS(bf16_supported(), "no bf16 matrix products on this CPU or build");
  check_parity(*model, "smollm2", Compute::kBf16, false);
}

TEST_CASE("Qwen2.5 float32 logits agree with the float64 reference", "[model]") {
  const auto model = oscar_test::qwen_model();
  SKIP_UNLESS(model, "no Qwen2.5 model");
  check_parity(*model, "qwen2.5-coder-1.5b", Compute::kFp32, true);
}

TEST_CASE("Qwen2.5 bf16 logits are within the reference's bf16 tolerances", "[model]") {
  const auto model = oscar_test::qwen_model();
  SKIP_UNLESS(model, "no Qwen2.5 model");
  SKIP_UNLESS(bf16_supported(), "no bf16 matrix products on this CPU or build");
  check_parity(*model, "qwen2.5-coder-1.5b", Compute::kBf16, false);
}

namespace {

// Compares the first tokens of the layers that the fixture holds.
class ActivationCheck : public LayerObserver {
 public:
  explicit ActivationCheck(const std::string& path) : file_(Hdf5File::open(path)) {}

  void on_layer(const LayerActivations& a) override {
    const std::string group = cat("/l", a.layer);
    if (!file_.exists(group)) return;
    ++layers;
    INFO(group);
    compare(group + "/q", a.q, 2e-5);
    compare(group + "/k", a.k, 2e-5);
    compare(group + "/v", a.v, 1e-5);
  }
  std::vector<int32_t> ids() const { return file_.read<int32_t>("/ids", 1).values; }
  size_t layers = 0;

 private:
  void compare(const std::string& dataset, const float* actual, double relative_to_largest) {
    const TensorF expected = file_.read<float>(dataset, 3);
    double largest = 0.0;
    for (const float value : expected.values)
      largest = std::max(largest, std::abs(static_cast<double>(value)));
    CHECK_CLOSE(actual, expected.data(), expected.size(),
                {.absolute = relative_to_largest * largest});
  }
  Hdf5File file_;
};

void check_activations(const std::filesystem::path& model_path, const std::string& fixture,
                       size_t num_layers) {
  const auto path = oscar_test::shared("fixtures/activations/" + fixture + ".h5");
  SKIP_UNLESS(path, "no reference activations");
  Transformer model(load(model_path), Compute::kFp32);
  ActivationCheck check(path->string());
  const std::vector<int32_t> ids = check.ids();
  KvCache cache(model.config(), exact_arm());
  const SequenceChunk chunk{ids, &cache};
  model.forward({&chunk, 1}, &check);
  CHECK(check.layers == num_layers);
}

}  // namespace

TEST_CASE("SmolLM2 queries, keys and values agree with the reference", "[model]") {
  const auto model = oscar_test::demo_model();
  SKIP_UNLESS(model, "no demo model");
  check_activations(*model, "smollm2", 2);
}

TEST_CASE("Qwen2.5 queries, keys and values agree with the reference", "[model]") {
  const auto model = oscar_test::qwen_model();
  SKIP_UNLESS(model, "no Qwen2.5 model");
  check_activations(*model, "qwen2.5-coder-1.5b", 1);
}

namespace {

// Mean loss of the targets 512 .. 1023 of windows of 1024 tokens.
double window_loss(Transformer& model, const std::vector<int32_t>& ids, size_t window) {
  const size_t length = 1024, first = 511, hidden = model.config().hidden_size;
  const size_t vocab = model.config().vocab_size, rows = length - 1 - first;
  KvCache cache(model.config(), exact_arm());
  const SequenceChunk chunk{std::span(ids).subspan(window * length, length), &cache};
  const std::vector<float> states = model.forward({&chunk, 1});
  std::vector<float> logits(rows * vocab);
  model.logits(states.data() + first * hidden, rows, logits.data());
  double loss = 0.0;
  for (size_t r = 0; r < rows; ++r) {
    const auto target = static_cast<size_t>(ids[window * length + first + r + 1]);
    loss -= log_softmax(logits.data() + r * vocab, vocab)[target];
  }
  return loss / static_cast<double>(rows);
}

void check_perplexity(size_t num_windows) {
  const auto model_path = oscar_test::demo_model();
  const auto text = oscar_test::demo_text("pride_and_prejudice");
  const auto fixture = oscar_test::shared("fixtures/ppl/smollm2.json");
  SKIP_UNLESS(model_path && text && fixture, "no demo model, text or reference perplexity");
  const json expected = read_json(*fixture)["windows_1024_score_t_ge_512"];
  const std::vector<double> losses = expected["per_window_mean_nll"];
  std::ifstream file(*text, std::ios::binary);
  const std::string content(std::istreambuf_iterator<char>(file), {});
  const std::vector<int32_t> ids = Tokenizer::load(model_path->string())->encode(content, false);
  Transformer model(load(*model_path), Compute::kFp32);
  double sum = 0.0;
  for (size_t window = 0; window < num_windows; ++window) {
    INFO("window " << window);
    const double loss = window_loss(model, ids, window);
    CHECK(std::abs(loss - losses[window]) <= 1e-5 * losses[window]);
    sum += loss;
  }
  if (num_windows == losses.size()) {
    const double ppl = std::exp(sum / static_cast<double>(num_windows));
    CHECK(ppl == Approx(expected["ppl"].get<double>()).epsilon(1e-5));
  }
}

}  // namespace

TEST_CASE("SmolLM2 perplexity of two windows agrees with the reference", "[model]") {
  check_perplexity(2);
}

TEST_CASE("SmolLM2 perplexity of all windows agrees with the reference", "[.slow]") {
  check_perplexity(16);
}
