// Properties of the forward pass on a small random model: batches, chunks, threads, bad input.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "base/random.h"
#include "model/small_model.h"
#include "model/transformer.h"
#include "support/compare.h"

using namespace oscar;
using namespace oscar_test;

namespace {

// Hidden states of a sequence that is given in chunks of the listed sizes.
std::vector<float> run(Transformer& model, const std::vector<int32_t>& tokens,
                       const std::vector<size_t>& chunk_sizes) {
  KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
  std::vector<float> states;
  size_t begin = 0;
  for (const size_t size : chunk_sizes) {
    const SequenceChunk chunk{std::span(tokens).subspan(begin, size), &cache};
    const std::vector<float> part = model.forward({&chunk, 1});
    states.insert(states.end(), part.begin(), part.end());
    begin += size;
  }
  REQUIRE(begin == tokens.size());
  CHECK(cache.length() == tokens.size());
  return states;
}

class Recorder : public LayerObserver {
 public:
  struct Call {
    size_t layer, sequence, first_position, num_tokens;
    float first_query, last_value;
  };
  void on_layer(const LayerActivations& a) override {
    REQUIRE(a.o != nullptr);
    REQUIRE(a.lse != nullptr);
    const size_t last = a.num_tokens * 2 * 64 - 1;
    calls.push_back({a.layer, a.sequence, a.first_position, a.num_tokens, a.q[0], a.v[last]});
  }
  std::vector<Call> calls;
};

}  // namespace

TEST_CASE("hidden states do not depend on thread count or chunking") {
  const SmallModel small;
  Transformer model = small.transformer();
  const std::vector<int32_t> tokens = random_tokens(90, 3);
  set_num_threads(1);
  const std::vector<float> whole = run(model, tokens, {90});
  set_num_threads(3);
  CHECK(run(model, tokens, {90}) == whole);
  // Chunks of more than kGemvTokens tokens use the same products: the same bits.
  CHECK(run(model, tokens, {30, 9, 51}) == whole);
  // Shorter ones read the stored blocks directly and differ by rounding.
  std::vector<size_t> singles(90, 1);
  const std::vector<float> decoded = run(model, tokens, singles);
  CHECK_CLOSE(decoded.data(), whole.data(), whole.size(),
              {.absolute = 1e-5, .min_cosine = 1.0 - 1e-9});
  set_num_threads(0);
}

TEST_CASE("hidden states do not depend on batch mates") {
  const SmallModel small;
  Transformer model = small.transformer();
  const std::vector<int32_t> a = random_tokens(40, 4), b = random_tokens(70, 5);
  const std::vector<float> alone_a = run(model, a, {40}), alone_b = run(model, b, {50, 20});
  KvCache cache_a(model.config(), reference_arm(HighPrecision::kFp32));
  KvCache cache_b(model.config(), reference_arm(HighPrecision::kFp32));
  const SequenceChunk first{std::span(b).subspan(0, 50), &cache_b};
  model.forward({&first, 1});
  // Different positions, one batch.
  const SequenceChunk batch[2] = {{a, &cache_a}, {std::span(b).subspan(50, 20), &cache_b}};
  Recorder recorder;
  const std::vector<float> states = model.forward(batch, &recorder);
  const size_t hidden = model.config().hidden_size;
  REQUIRE(states.size() == 60 * hidden);
  CHECK_CLOSE(states.data(), alone_a.data(), alone_a.size(), {});
  CHECK_CLOSE(states.data() + 40 * hidden, alone_b.data() + 50 * hidden, 20 * hidden, {});

  REQUIRE(recorder.calls.size() == 6);
  for (size_t i = 0; i < 6; ++i) {
    CHECK(recorder.calls[i].layer == i / 2);
    CHECK(recorder.calls[i].sequence == i % 2);
    CHECK(recorder.calls[i].first_position == (i % 2 == 0 ? 0 : 50));
    CHECK(recorder.calls[i].num_tokens == (i % 2 == 0 ? 40 : 20));
  }
  std::vector<float> logits(60 * model.config().vocab_size), row(model.config().vocab_size);
  model.logits(states.data(), 60, logits.data());
  model.logits(states.data() + 59 * hidden, 1, row.data());
  CHECK_CLOSE(row.data(), logits.data() + 59 * row.size(), row.size(), {.absolute = 1e-5});
}

TEST_CASE("an observer sees the same without the rest of the last layer") {
  const SmallModel small;
  Transformer model = small.transformer();
  const std::vector<int32_t> tokens = random_tokens(40, 4);
  Recorder whole, observed;
  KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
  KvCache other(model.config(), reference_arm(HighPrecision::kFp32));
  const SequenceChunk chunk{tokens, &cache}, same{tokens, &other};
  model.forward({&chunk, 1}, &whole);
  model.observe({&same, 1}, observed);
  REQUIRE(observed.calls.size() == whole.calls.size());
  for (size_t i = 0; i < whole.calls.size(); ++i) {
    CHECK(observed.calls[i].layer == whole.calls[i].layer);
    CHECK(observed.calls[i].first_query == whole.calls[i].first_query);
    CHECK(observed.calls[i].last_value == whole.calls[i].last_value);
  }
  CHECK(other.length() == 40);
}

TEST_CASE("many short chunks of different sequences decode as if alone") {
  const SmallModel small;
  Transformer model = small.transformer();
  const size_t sequences = 12, steps = 3;  // 12 tokens a step: the panel path
  std::vector<std::vector<int32_t>> tokens;
  std::vector<KvCache> caches;
  for (size_t s = 0; s < sequences; ++s) {
    tokens.push_back(random_tokens(steps, 100 + s));
    caches.emplace_back(model.config(), reference_arm(HighPrecision::kFp32));
  }
  const size_t hidden = model.config().hidden_size;
  std::vector<std::vector<float>> states(sequences);
  for (size_t step = 0; step < steps; ++step) {
    std::vector<SequenceChunk> batch;
    for (size_t s = 0; s < sequences; ++s)
      batch.push_back({std::span(tokens[s]).subspan(step, 1), &caches[s]});
    const std::vector<float> out = model.forward(batch);
    for (size_t s = 0; s < sequences; ++s)
      states[s].insert(states[s].end(), out.begin() + static_cast<long>(s * hidden),
                       out.begin() + static_cast<long>((s + 1) * hidden));
  }
  for (size_t s = 0; s < sequences; ++s) {
    const std::vector<float> alone = run(model, tokens[s], {1, 1, 1});
    CHECK_CLOSE(states[s].data(), alone.data(), alone.size(),
                {.absolute = 1e-5, .min_cosine = 1.0 - 1e-9});
  }
}

TEST_CASE("bad batches are refused before anything is appended") {
  const SmallModel small;
  Transformer model = small.transformer();
  KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
  const std::vector<int32_t> good = {1, 2, 3}, high = {1, 131}, negative = {-1}, none;
  const auto forward = [&](std::vector<SequenceChunk> chunks) { return model.forward(chunks); };
  CHECK_THROWS_WITH(forward({{high, &cache}}), Catch::Contains("0..130, got 131"));
  CHECK_THROWS_WITH(forward({{negative, &cache}}), Catch::Contains("got -1"));
  CHECK_THROWS_AS(forward({{none, &cache}}), Error);
  CHECK_THROWS_AS(forward({{good, nullptr}}), Error);
  CHECK_THROWS_AS(forward({{good, &cache}, {good, &cache}}), Error);
  CHECK_THROWS_AS(forward({}), Error);
  CHECK(cache.length() == 0);
}

TEST_CASE("tokens beyond the model's context are refused before anything is stored") {
  SmallModel small;
  small.weights.config.context_length = 12;
  Transformer model = small.transformer();
  KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
  const std::vector<int32_t> tokens = random_tokens(13, 8);
  const auto feed = [&](size_t count) {
    const SequenceChunk chunk{std::span(tokens).first(count), &cache};
    return model.forward({&chunk, 1});
  };
  CHECK_THROWS_WITH(feed(13), Catch::Contains("0 tokens and 13 new ones") &&
                                  Catch::Contains("context is 12 tokens"));
  CHECK(cache.length() == 0);
  feed(11);
  feed(1);
  CHECK_THROWS_WITH(feed(1), Catch::Contains("12 tokens and 1 new"));
  CHECK(cache.length() == 12);
}

TEST_CASE("non-finite activations are reported with their layer") {
  SmallModel small;
  const float infinity = std::numeric_limits<float>::infinity();
  const auto spoil = [&](const WeightMatrix& matrix) {
    for (const auto& values : small.storage)
      if (reinterpret_cast<const uint8_t*>(values->data()) == matrix.bytes) (*values)[5] = infinity;
  };
  const std::vector<int32_t> tokens = {1, 2, 3};
  SECTION("down projection") {
    spoil(small.weights.layers[1].down);
    Transformer model = small.transformer();
    KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
    const SequenceChunk chunk{tokens, &cache};
    CHECK_THROWS_WITH(model.forward({&chunk, 1}), Catch::Contains("layer 1 output"));
  }
  SECTION("values") {
    spoil(small.weights.layers[2].v);
    Transformer model = small.transformer();
    KvCache cache(model.config(), reference_arm(HighPrecision::kFp32));
    const SequenceChunk chunk{tokens, &cache};
    CHECK_THROWS_WITH(model.forward({&chunk, 1}), Catch::Contains("layer 2 values"));
  }
}
