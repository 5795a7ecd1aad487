// Random activations, a transparent codec and a float64 reference for the cache and attention
// tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/float16.h"
#include "base/random.h"
#include "model/attention.h"
#include "model/attention_kernels.h"
#include "model/rope.h"
#include "model/rotate.h"

namespace oscar_test {

using namespace oscar;

// Rounds every value to a multiple of 1/4 in [-16, 15.75]: one byte a value, nothing else, so that
// each test knows what the packed form of a row is.
class QuarterCodec : public Codec {
 public:
  QuarterCodec(size_t head_dim, size_t token_block) : block_(token_block) {
    spec_.head_dim = static_cast<int>(head_dim);
    spec_.bits = 8;
  }
  const CodecSpec& spec() const override { return spec_; }
  int token_block() const override { return static_cast<int>(block_); }
  size_t bytes_per_block() const override { return block_ * width(); }
  void encode(const float* rows, size_t row_stride, size_t num_blocks, uint8_t* out,
              EncodeStats* stats) const override {
    for (size_t r = 0; r < num_blocks * block_; ++r) {
      for (size_t d = 0; d < width(); ++d) {
        const float code = std::nearbyint(rows[r * row_stride + d] * 4.0F);
        out[r * width() + d] = static_cast<uint8_t>(std::clamp(code, -64.0F, 63.0F) + 64.0F);
      }
    }
    if (stats != nullptr) stats->rows += num_blocks * block_;
  }
  void decode(const uint8_t* encoded, size_t num_blocks, float* rows,
              size_t row_stride) const override {
    for (size_t r = 0; r < num_blocks * block_; ++r) {
      for (size_t d = 0; d < width(); ++d) {
        rows[r * row_stride + d] = (static_cast<float>(encoded[r * width() + d]) - 64.0F) * 0.25F;
      }
    }
  }

 private:
  size_t width() const { return static_cast<size_t>(spec_.head_dim); }
  CodecSpec spec_;
  size_t block_;
};

struct Geometry {
  size_t num_kv_heads = 1, group = 1, head_dim = 64, num_layers = 1;
  ModelConfig config() const {
    ModelConfig result;
    result.architecture = "llama";
    result.num_layers = num_layers;
    result.num_kv_heads = num_kv_heads;
    result.num_heads = num_kv_heads * group;
    result.head_dim = head_dim;
    return result;
  }
};

struct Rows {
  size_t num_tokens = 0;
  std::vector<float> q, k, v;
};

inline std::vector<float> random_values(size_t count, uint64_t seed, float scale = 1.0F) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = scale * static_cast<float>(random.normal());
  return values;
}

inline Rows random_rows(const Geometry& g, size_t num_tokens, uint64_t seed) {
  const size_t kv = num_tokens * g.num_kv_heads * g.head_dim;
  return {num_tokens, random_values(kv * g.group, seed, 1.5F), random_values(kv, seed + 1, 1.5F),
          random_values(kv, seed + 2)};
}

// Orthogonal, not symmetric: random rows after Gram-Schmidt in double.
inline TensorF random_rotation(size_t heads, size_t width, uint64_t seed) {
  TensorF rotation({heads, width, width});
  for (size_t h = 0; h < heads; ++h) {
    const std::vector<float> start = random_values(width * width, seed + h);
    std::vector<double> m(start.begin(), start.end());
    for (size_t i = 0; i < width; ++i) {
      for (size_t j = 0; j <= i; ++j) {
        double product = 0.0;
        for (size_t d = 0; d < width; ++d) product += m[i * width + d] * m[j * width + d];
        for (size_t d = 0; d < width; ++d) {
          if (j < i) m[i * width + d] -= product * m[j * width + d];
          if (j == i) m[i * width + d] /= std::sqrt(product);
        }
      }
    }
    std::transform(m.begin(), m.end(), rotation.at(h),
                   [](double x) { return static_cast<float>(x); });
  }
  return rotation;
}

struct ArmShape {
  WindowSpec windows = {};
  size_t key_block = 1, value_block = 1;
  bool rotated = false, per_head = false, centered = false;
  HighPrecision high_precision = HighPrecision::kBf16;
};

inline std::shared_ptr<KvArm> make_test_arm(const Geometry& g, const ArmShape& shape) {
  auto arm = std::make_shared<KvArm>();
  arm->name = "test";
  arm->quantized = true;
  arm->windows = shape.windows;
  arm->high_precision = shape.high_precision;
  for (size_t layer = 0; layer < g.num_layers; ++layer) {
    LayerArm item;
    item.k.codecs = {std::make_shared<QuarterCodec>(g.head_dim, shape.key_block)};
    item.v.codecs = {std::make_shared<QuarterCodec>(g.head_dim, shape.value_block)};
    if (shape.rotated) {
      const size_t copies = shape.per_head ? g.num_kv_heads : 1;
      item.k.rotation = random_rotation(copies, g.head_dim, 100 + layer);
      item.v.rotation = random_rotation(copies, g.head_dim, 200 + layer);
    }
    if (shape.centered) {
      item.k.mean = TensorF({g.num_kv_heads, g.head_dim});
      item.k.mean.values = random_values(item.k.mean.size(), 300 + layer, 3.0F);
      item.v.mean = TensorF({g.num_kv_heads, g.head_dim});
      item.v.mean.values = random_values(item.v.mean.size(), 400 + layer, 3.0F);
    }
    arm->layers.push_back(std::move(item));
  }
  return arm;
}

inline std::shared_ptr<KvArm> make_reference_arm(HighPrecision type) {
  auto arm = std::make_shared<KvArm>();
  arm->name = type == HighPrecision::kBf16 ? "bf16" : "fp32";
  arm->high_precision = type;
  return arm;
}

struct Outputs {
  std::vector<float> o, lse;
};

// Appends the rows of layer 0 in calls of the given sizes (the last takes the rest).
inline Outputs run(KvCache& cache, const Geometry& g, const Rows& rows, size_t first, size_t last,
                   const std::vector<size_t>& calls, size_t layer = 0,
                   Compute compute = Compute::kFp32) {
  const size_t kv = g.num_kv_heads * g.head_dim;
  Outputs out;
  out.o.resize((last - first) * kv * g.group);
  out.lse.resize((last - first) * g.num_kv_heads * g.group);
  size_t begin = first;
  for (size_t call = 0; begin < last; ++call) {
    const size_t count = std::min(last - begin, call < calls.size() ? calls[call] : last - begin);
    append_and_attend(cache, layer, count, rows.q.data() + begin * kv * g.group,
                      rows.k.data() + begin * kv, rows.v.data() + begin * kv,
                      out.o.data() + (begin - first) * kv * g.group,
                      out.lse.data() + (begin - first) * g.num_kv_heads * g.group, compute);
    begin += count;
  }
  return out;
}

// RoPE_t(b) of positions [0, num_tokens): [num_tokens, D], empty without position-aware centering.
inline std::vector<float> turned_means(const Geometry& g, const KvArm& arm, const SideArm* side,
                                       size_t num_tokens, size_t head) {
  std::vector<float> rows;
  if (side == nullptr || side->position_mean.empty()) return rows;
  const float* mean = side->position_mean_of(head);
  for (size_t t = 0; t < num_tokens; ++t) rows.insert(rows.end(), mean, mean + g.head_dim);
  apply_rope(make_rope_table(arm.rope, 0, num_tokens), {.rows = rows.data(),
                                                        .num_tokens = num_tokens,
                                                        .num_heads = 1,
                                                        .head_dim = g.head_dim,
                                                        .token_stride = g.head_dim});
  return rows;
}

// The stored form of all rows of one side (centered, rotated, rounded to the high-precision type)
// and what the codec makes of it: [tokens, D] of one head.
struct StoredRows {
  std::vector<float> high, dequantized;
};

inline StoredRows stored_rows(const Geometry& g, const std::vector<float>& values,
                              size_t num_tokens, size_t head, const KvArm& arm,
                              const SideArm* side) {
  const size_t width = padded_width(g.head_dim);
  std::vector<float> padded(side != nullptr && !side->rotation.empty() ? g.head_dim * width : 0);
  for (size_t i = 0; i < padded.size() / width; ++i) {
    std::copy_n(side->rotation_of(head) + i * g.head_dim, g.head_dim, padded.data() + i * width);
  }
  std::vector<float> rotated(num_tokens * width);
  std::vector<float> centered = values;
  const std::vector<float> turned = turned_means(g, arm, side, num_tokens, head);
  for (size_t i = 0; i < turned.size(); ++i) {
    const size_t t = i / g.head_dim;
    centered[(t * g.num_kv_heads + head) * g.head_dim + i % g.head_dim] -= turned[i];
  }
  rotate_rows(centered.data() + head * g.head_dim, g.num_kv_heads * g.head_dim, num_tokens,
              g.head_dim, side == nullptr ? nullptr : side->mean_of(head),
              padded.empty() ? nullptr : padded.data(), rotated.data());
  StoredRows rows;
  for (size_t t = 0; t < num_tokens; ++t) {
    for (size_t d = 0; d < g.head_dim; ++d) {
      const float x = rotated[t * width + d];
      rows.high.push_back(arm.high_precision == HighPrecision::kBf16 ? round_to_bf16(x) : x);
      const float code = std::clamp(std::nearbyint(rows.high.back() * 4.0F), -64.0F, 63.0F);
      rows.dequantized.push_back(code * 0.25F);
    }
  }
  return rows;
}

// Where the packed range of query t ends, on each side, by the words of formats.md 7.4: key j is
// high precision iff j < sink or j > t - recent; with blocks, iff its whole block is not past that.
inline bool reads_dequantized(const WindowSpec& windows, size_t t, size_t j, size_t block) {
  if (j < windows.sink) return false;
  const size_t last_of_block = windows.sink + (j - windows.sink) / block * block + block - 1;
  return last_of_block + windows.recent <= t;
}

// Attention of all rows in double, exact windows (or a reference arm).
struct ReferenceOutputs {
  std::vector<double> o, lse;
};

inline ReferenceOutputs reference_attention(const Geometry& g, const Rows& rows, const KvArm& arm) {
  const size_t num_heads = g.num_kv_heads * g.group;
  const size_t n = rows.num_tokens;
  const size_t dim = g.head_dim;
  ReferenceOutputs result;
  result.o.assign(n * num_heads * dim, 0.0);
  result.lse.assign(n * num_heads, 0.0);
  for (size_t head = 0; head < num_heads; ++head) {
    const size_t kv_head = head / g.group;
    const SideArm* k_side = arm.quantized ? &arm.layers[0].k : nullptr;
    const SideArm* v_side = arm.quantized ? &arm.layers[0].v : nullptr;
    const StoredRows keys = stored_rows(g, rows.k, n, kv_head, arm, k_side);
    const StoredRows values = stored_rows(g, rows.v, n, kv_head, arm, v_side);
    const float* key_rotation = k_side == nullptr ? nullptr : k_side->rotation_of(kv_head);
    const std::vector<float> turned = turned_means(g, arm, k_side, n, kv_head);
    const float* value_rotation = v_side == nullptr ? nullptr : v_side->rotation_of(kv_head);
    for (size_t t = 0; t < n; ++t) {
      const float* query = rows.q.data() + (t * num_heads + head) * dim;
      std::vector<double> q(dim, 0.0);
      for (size_t j = 0; j < dim; ++j) {
        for (size_t i = 0; i < dim && key_rotation != nullptr; ++i) {
          q[j] += static_cast<double>(query[i]) * key_rotation[i * dim + j];
        }
        if (key_rotation == nullptr) q[j] = query[j];
      }
      const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
      std::vector<double> scores(t + 1, 0.0);
      for (size_t j = 0; j <= t; ++j) {
        const bool packed =
            arm.quantized &&
            reads_dequantized(arm.windows, t, j,
                              static_cast<size_t>(k_side->codec(kv_head).token_block()));
        const float* key = (packed ? keys.dequantized : keys.high).data() + j * dim;
        for (size_t d = 0; d < dim; ++d) scores[j] += q[d] * key[d] * scale;
        for (size_t d = 0; d < dim && !turned.empty(); ++d)
          scores[j] += static_cast<double>(query[d]) * turned[j * dim + d] * scale;
      }
      const double maximum = *std::max_element(scores.begin(), scores.end());
      double sum = 0.0;
      for (double& s : scores) sum += s = std::exp(s - maximum);
      std::vector<double> o(dim, 0.0);
      for (size_t j = 0; j <= t; ++j) {
        const bool packed =
            arm.quantized &&
            reads_dequantized(arm.windows, t, j,
                              static_cast<size_t>(v_side->codec(kv_head).token_block()));
        const float* value = (packed ? values.dequantized : values.high).data() + j * dim;
        for (size_t d = 0; d < dim; ++d) o[d] += scores[j] / sum * value[d];
      }
      double* out = result.o.data() + (t * num_heads + head) * dim;
      for (size_t i = 0; i < dim; ++i) {
        for (size_t j = 0; j < dim && value_rotation != nullptr; ++j) {
          out[i] += o[j] * value_rotation[i * dim + j];
        }
        if (value_rotation == nullptr) out[i] = o[i];
        if (v_side != nullptr && v_side->mean_of(kv_head) != nullptr) {
          out[i] += v_side->mean_of(kv_head)[i];
        }
      }
      double constant = 0.0;
      for (size_t d = 0; k_side != nullptr && k_side->mean_of(kv_head) != nullptr && d < dim; ++d) {
        constant += static_cast<double>(query[d]) * k_side->mean_of(kv_head)[d] * scale;
      }
      result.lse[t * num_heads + head] = maximum + std::log(sum) + constant;
    }
  }
  return result;
}

}  // namespace oscar_test
