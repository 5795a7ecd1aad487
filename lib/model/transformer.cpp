#include "model/transformer.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/parallel.h"
#include "model/attention.h"
#include "model/norms.h"
#include "model/rope.h"

namespace oscar {
namespace {

constexpr size_t kFfnTokens = 2048;  // tokens whose gate and up activations are held at a time
constexpr size_t kFewTokensPerChunk = 16;  // chunks this short are spread over the threads

// Activations of one forward pass; rows are the tokens of all chunks, one chunk after another.
struct Activations {
  size_t tokens = 0;
  std::vector<float> x;         // [tokens, hidden] residual stream
  std::vector<float> normed;    // [tokens, hidden]
  std::vector<float> q, o;      // [tokens, num_heads, head_dim]
  std::vector<float> k, v;      // [tokens, num_kv_heads, head_dim]
  std::vector<float> lse;       // [tokens, num_heads], only when observed
  std::vector<float> gate, up;  // [min(tokens, kFfnTokens), intermediate]

  Activations(const ModelConfig& config, size_t num_tokens, bool observed)
      : tokens(num_tokens),
        x(num_tokens * config.hidden_size),
        normed(num_tokens * config.hidden_size),
        q(num_tokens * config.num_heads * config.head_dim),
        o(q.size()),
        k(num_tokens * config.num_kv_heads * config.head_dim),
        v(k.size()),
        lse(observed ? num_tokens * config.num_heads : 0),
        gate(std::min(num_tokens, kFfnTokens) * config.intermediate_size),
        up(gate.size()) {}
};

struct Chunk {
  KvCache* cache;
  size_t first_row;       // of its tokens in the activations
  size_t first_position;  // of its first token in the sequence
  size_t num_tokens;
};

const float* data_or_null(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

}  // namespace

struct Transformer::State {
  std::shared_ptr<const ModelWeights> weights;
  Compute compute;
  RopeTable rope;  // positions from 0 on, as many as were needed so far

  const ModelConfig& config() const { return weights->config; }

  void multiply(std::initializer_list<MatmulJob> jobs, const float* x, size_t tokens) const {
    weight_matmul({jobs.begin(), jobs.size()}, x, tokens, compute);
  }

  std::vector<Chunk> check(std::span<const SequenceChunk> chunks) const;
  void embed(std::span<const SequenceChunk> chunks, Activations& a) const;
  void cover_positions(size_t count);
  void rotate(const std::vector<Chunk>& chunks, size_t num_heads, float* rows) const;
  void attend(size_t layer, const std::vector<Chunk>& chunks, Activations& a,
              LayerObserver* observer) const;
  // Attention of a layer up to its outputs before W_O (a.o), which the observer sees.
  void attention(size_t layer, const std::vector<Chunk>& chunks, Activations& a,
                 LayerObserver* observer) const;
  // The rest of the layer.
  void add_attention_output(size_t layer, Activations& a) const;
  void ffn_block(size_t layer, Activations& a) const;
  // Makes the RoPE table long enough and looks up the embeddings.
  Activations start(std::span<const SequenceChunk> chunks, const std::vector<Chunk>& checked,
                    bool observed);
};

// Validates the batch before anything is written to a cache.
std::vector<Chunk> Transformer::State::check(std::span<const SequenceChunk> chunks) const {
  std::vector<Chunk> checked;
  std::set<const KvCache*> caches;
  size_t row = 0;
  for (const SequenceChunk& chunk : chunks) {
    OSCAR_CHECK(chunk.cache != nullptr, "forward: chunk ", checked.size(), " has no cache");
    OSCAR_CHECK(caches.insert(chunk.cache).second,
                "forward: two chunks of the batch share a cache");
    OSCAR_CHECK(!chunk.tokens.empty(), "forward: chunk ", checked.size(), " has no tokens");
    for (const int32_t token : chunk.tokens) {
      OSCAR_CHECK(token >= 0 && static_cast<size_t>(token) < config().vocab_size,
                  "forward: token id: expected 0..", config().vocab_size - 1, ", got ", token);
    }
    const size_t length = chunk.cache->length() + chunk.tokens.size();
    OSCAR_CHECK(config().context_length == 0 || length <= config().context_length,
                "forward: chunk ", checked.size(), ": ", chunk.cache->length(), " tokens and ",
                chunk.tokens.size(), " new ones, the model's context is ", config().context_length,
                " tokens");
    checked.push_back({chunk.cache, row, chunk.cache->length(), chunk.tokens.size()});
    row += chunk.tokens.size();
  }
  OSCAR_CHECK(!checked.empty(), "forward: the batch is empty");
  return checked;
}

void Transformer::State::embed(std::span<const SequenceChunk> chunks, Activations& a) const {
  std::vector<int32_t> tokens;
  tokens.reserve(a.tokens);
  for (const SequenceChunk& chunk : chunks)
    tokens.insert(tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
  const WeightMatrix& table = weights->embedding;
  parallel_for_ranges(a.tokens, 64, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row)
      dequantize_row(table.type, table.row(static_cast<size_t>(tokens[row])), table.columns,
                     a.x.data() + row * table.columns);
  });
}

// The table grows by a quarter at least, so that decoding seldom computes it anew.
void Transformer::State::cover_positions(size_t count) {
  if (count <= rope.num_positions) return;
  rope = make_rope_table(config().rope, 0, std::max(count, rope.num_positions * 5 / 4));
}

// RoPE on rows [tokens of all chunks, num_heads, head_dim].
void Transformer::State::rotate(const std::vector<Chunk>& chunks, size_t num_heads,
                                float* rows) const {
  const size_t stride = num_heads * config().head_dim;
  for (const Chunk& chunk : chunks) {
    parallel_for_ranges(chunk.num_tokens, 32, [&](size_t begin, size_t end) {
      apply_rope(rope, {.rows = rows + (chunk.first_row + begin) * stride,
                        .num_tokens = end - begin,
                        .num_heads = num_heads,
                        .head_dim = config().head_dim,
                        .token_stride = stride,
                        .first_position = chunk.first_position + begin});
    });
  }
}

void Transformer::State::attend(size_t layer, const std::vector<Chunk>& chunks, Activations& a,
                                LayerObserver* observer) const {
  const size_t q_width = config().num_heads * config().head_dim;
  const size_t kv_width = config().num_kv_heads * config().head_dim;
  const auto run = [&](const Chunk& c) {
    append_and_attend(*c.cache, layer, c.num_tokens, a.q.data() + c.first_row * q_width,
                      a.k.data() + c.first_row * kv_width, a.v.data() + c.first_row * kv_width,
                      a.o.data() + c.first_row * q_width,
                      a.lse.empty() ? nullptr : a.lse.data() + c.first_row * config().num_heads,
                      compute);
  };
  const bool all_short = std::all_of(chunks.begin(), chunks.end(), [](const Chunk& c) {
    return c.num_tokens <= kFewTokensPerChunk;
  });
  if (all_short && chunks.size() >= static_cast<size_t>(num_threads())) {
    parallel_for(chunks.size(), [&](size_t index) { run(chunks[index]); });
  } else {
    for (const Chunk& chunk : chunks) run(chunk);  // parallel inside
  }
  if (observer == nullptr) return;
  for (size_t index = 0; index < chunks.size(); ++index) {
    const Chunk& c = chunks[index];
    observer->on_layer({.layer = layer,
                        .sequence = index,
                        .first_position = c.first_position,
                        .num_tokens = c.num_tokens,
                        .q = a.q.data() + c.first_row * q_width,
                        .k = a.k.data() + c.first_row * kv_width,
                        .v = a.v.data() + c.first_row * kv_width,
                        .o = a.o.data() + c.first_row * q_width,
                        .lse = a.lse.data() + c.first_row * config().num_heads});
  }
}

void Transformer::State::attention(size_t layer, const std::vector<Chunk>& chunks, Activations& a,
                                   LayerObserver* observer) const {
  const ModelConfig& c = config();
  const LayerWeights& w = weights->layers[layer];
  const std::string before =
      layer == 0 ? std::string("embeddings") : cat("layer ", layer - 1, " output");
  rms_norm(a.x.data(), a.tokens, c.hidden_size, w.attention_norm.data(), c.rms_norm_eps, before,
           a.normed.data());
  multiply({{&w.q, data_or_null(w.q_bias), a.q.data()},
            {&w.k, data_or_null(w.k_bias), a.k.data()},
            {&w.v, data_or_null(w.v_bias), a.v.data()}},
           a.normed.data(), a.tokens);
  const std::string name = cat("layer ", layer);
  if (!w.q_norm.empty())
    rms_norm(a.q.data(), a.tokens * c.num_heads, c.head_dim, w.q_norm.data(), c.rms_norm_eps,
             name + " queries", a.q.data());
  if (!w.k_norm.empty())
    rms_norm(a.k.data(), a.tokens * c.num_kv_heads, c.head_dim, w.k_norm.data(), c.rms_norm_eps,
             name + " keys", a.k.data());
  rotate(chunks, c.num_heads, a.q.data());
  rotate(chunks, c.num_kv_heads, a.k.data());
  check_finite(a.q.data(), a.q.size(), name + " queries");
  check_finite(a.k.data(), a.k.size(), name + " keys");
  check_finite(a.v.data(), a.v.size(), name + " values");
  attend(layer, chunks, a, observer);
}

void Transformer::State::add_attention_output(size_t layer, Activations& a) const {
  const LayerWeights& w = weights->layers[layer];
  multiply({{&w.o, data_or_null(w.o_bias), a.x.data(), true}}, a.o.data(), a.tokens);
}

void Transformer::State::ffn_block(size_t layer, Activations& a) const {
  const ModelConfig& c = config();
  const LayerWeights& w = weights->layers[layer];
  rms_norm(a.x.data(), a.tokens, c.hidden_size, w.ffn_norm.data(), c.rms_norm_eps,
           cat("layer ", layer, " attention output"), a.normed.data());
  for (size_t begin = 0; begin < a.tokens; begin += kFfnTokens) {
    const size_t count = std::min(kFfnTokens, a.tokens - begin);
    multiply({{&w.gate, nullptr, a.gate.data()}, {&w.up, nullptr, a.up.data()}},
             a.normed.data() + begin * c.hidden_size, count);
    swiglu(a.gate.data(), a.up.data(), count * c.intermediate_size);
    multiply({{&w.down, nullptr, a.x.data() + begin * c.hidden_size, true}}, a.gate.data(), count);
  }
}

Transformer::Transformer(std::shared_ptr<const ModelWeights> weights, Compute compute) {
  check_compute_supported(compute);
  state_ = std::make_unique<State>(State{std::move(weights), compute, {}});
}
Transformer::~Transformer() = default;

const ModelConfig& Transformer::config() const { return state_->config(); }
const ModelWeights& Transformer::weights() const { return *state_->weights; }

Activations Transformer::State::start(std::span<const SequenceChunk> chunks,
                                      const std::vector<Chunk>& checked, bool observed) {
  const size_t tokens = checked.back().first_row + checked.back().num_tokens;
  size_t positions = 0;
  for (const Chunk& chunk : checked)
    positions = std::max(positions, chunk.first_position + chunk.num_tokens);
  cover_positions(positions);
  Activations a(config(), tokens, observed);
  embed(chunks, a);
  return a;
}

std::vector<float> Transformer::forward(std::span<const SequenceChunk> chunks,
                                        LayerObserver* observer) {
  State& s = *state_;
  const ModelConfig& c = s.config();
  const std::vector<Chunk> checked = s.check(chunks);
  Activations a = s.start(chunks, checked, observer != nullptr);
  for (size_t layer = 0; layer < c.num_layers; ++layer) {
    s.attention(layer, checked, a, observer);
    s.add_attention_output(layer, a);
    s.ffn_block(layer, a);
  }
  rms_norm(a.x.data(), a.tokens, c.hidden_size, s.weights->output_norm.data(), c.rms_norm_eps,
           cat("layer ", c.num_layers - 1, " output"), a.x.data());
  return std::move(a.x);
}

void Transformer::observe(std::span<const SequenceChunk> chunks, LayerObserver& observer) {
  State& s = *state_;
  const std::vector<Chunk> checked = s.check(chunks);
  Activations a = s.start(chunks, checked, true);
  for (size_t layer = 0; layer < s.config().num_layers; ++layer) {
    if (layer > 0) {
      s.add_attention_output(layer - 1, a);
      s.ffn_block(layer - 1, a);
    }
    s.attention(layer, checked, a, &observer);
  }
}

void Transformer::logits(const float* hidden, size_t rows, float* out) {
  state_->multiply({{&state_->weights->output, nullptr, out}}, hidden, rows);
}

}  // namespace oscar
