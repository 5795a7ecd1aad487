#include "eval/simulate_head.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/float16.h"
#include "eval/arm_summary.h"
#include "model/rope.h"
#include "model/weight_matmul.h"

namespace oscar {
namespace {

// y [rows, outputs] = x [rows, inputs] * w [outputs, inputs]^T, float32.
void multiply_transposed(const float* x, size_t rows, const float* w, size_t outputs, size_t inputs,
                         float* y) {
  WeightMatrix matrix;
  matrix.name = "simulate";
  matrix.rows = outputs;
  matrix.columns = inputs;
  matrix.bytes = reinterpret_cast<const uint8_t*>(w);
  const MatmulJob job{&matrix, nullptr, y};
  weight_matmul({&job, 1}, x, rows, Compute::kFp32);
}

std::vector<float> transposed(const float* x, size_t rows, size_t columns) {
  std::vector<float> result(rows * columns);
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) result[j * rows + i] = x[i * columns + j];
  }
  return result;
}

// One side of one head as the cache gives it back, in the model's coordinates.
struct StoredSide {
  std::vector<float> high;       // [T, D] through the high-precision type
  std::vector<float> quantized;  // [T, D] through the codec; rows never quantized equal `high`
  size_t token_block = 1;
};

// Values of one head with the dims outside, ready to be the right side of a product.
struct StoredValues {
  std::vector<float> high, quantized;              // [D, T]
  std::vector<float> high_error, quantized_error;  // [D, T], minus the exact values
};

// What a side subtracts from its rows: a mean, and (keys) a mean before RoPE, turned to the
// position of each row.
class Center {
 public:
  Center(const SideArm* side, const HeadInput& input, const RopeConfig& rope)
      : dim_(input.head_dim) {
    if (side == nullptr) return;
    mean_ = side->mean_of(input.kv_head);
    if (const float* b = side->position_mean_of(input.kv_head); b != nullptr) {
      for (size_t t = 0; t < input.num_tokens; ++t) rows_.insert(rows_.end(), b, b + dim_);
      apply_rope(make_rope_table(rope, 0, input.num_tokens), {.rows = rows_.data(),
                                                              .num_tokens = input.num_tokens,
                                                              .num_heads = 1,
                                                              .head_dim = dim_,
                                                              .token_stride = dim_});
    }
  }
  // rows [num_tokens, D] += sign * center.
  void add(float sign, size_t num_tokens, std::vector<float>& rows) const {
    for (size_t t = 0; t < num_tokens && mean_ != nullptr; ++t) {
      for (size_t d = 0; d < dim_; ++d) rows[t * dim_ + d] += sign * mean_[d];
    }
    for (size_t i = 0; i < rows_.size(); ++i) rows[i] += sign * rows_[i];
  }

 private:
  size_t dim_;
  const float* mean_ = nullptr;  // [D]
  std::vector<float> rows_;      // [num_tokens, D] or empty
};

void undo_rotation(std::vector<float>& rows, const float* rotation, const Center& center,
                   size_t num_tokens, size_t head_dim) {
  if (rotation != nullptr) {
    std::vector<float> plain(rows.size());
    multiply_transposed(rows.data(), num_tokens, rotation, head_dim, head_dim, plain.data());
    rows.swap(plain);
  }
  center.add(1.0F, num_tokens, rows);
}

StoredSide store_side(const float* rows, const HeadInput& input, const KvArm& arm,
                      const SideArm* side) {
  const size_t tokens = input.num_tokens, dim = input.head_dim;
  StoredSide stored;
  const float* rotation = side == nullptr ? nullptr : side->rotation_of(input.kv_head);
  const Center center(side, input, arm.rope);
  std::vector<float> kept(rows, rows + tokens * dim);
  center.add(-1.0F, tokens, kept);
  if (rotation != nullptr) {
    const std::vector<float> matrix = transposed(rotation, dim, dim);
    std::vector<float> rotated(kept.size());
    multiply_transposed(kept.data(), tokens, matrix.data(), dim, dim, rotated.data());
    kept.swap(rotated);
  }
  std::vector<float> coded;
  if (side != nullptr && arm.quantized) {
    const Codec& codec = side->codec(input.kv_head);
    stored.token_block = static_cast<size_t>(codec.token_block());
    const size_t count = quantized_tokens(arm.windows, tokens, stored.token_block);
    const size_t blocks = count / stored.token_block;
    coded = kept;
    if (blocks > 0) {
      std::vector<uint8_t> bytes(blocks * codec.bytes_per_block());
      float* first = coded.data() + arm.windows.sink * dim;
      codec.encode(first, dim, blocks, bytes.data(), nullptr);
      codec.decode(bytes.data(), blocks, first, dim);
    }
  }
  if (arm.high_precision == HighPrecision::kBf16) round_to_bf16(kept.data(), kept.size());
  undo_rotation(kept, rotation, center, tokens, dim);
  stored.high = std::move(kept);
  if (!coded.empty()) {
    undo_rotation(coded, rotation, center, tokens, dim);
    stored.quantized = std::move(coded);
  }
  return stored;
}

StoredValues by_dim(const StoredSide& side, const float* exact, size_t tokens, size_t dim) {
  const auto minus_exact = [&](std::vector<float> rows) {
    for (size_t i = 0; i < rows.size(); ++i) rows[i] -= exact[i];
    return rows;
  };
  StoredValues values;
  values.high = transposed(side.high.data(), tokens, dim);
  values.high_error = transposed(minus_exact(side.high).data(), tokens, dim);
  if (side.quantized.empty()) return values;
  values.quantized = transposed(side.quantized.data(), tokens, dim);
  values.quantized_error = transposed(minus_exact(side.quantized).data(), tokens, dim);
  return values;
}

size_t class_of(size_t key, size_t query) {
  if (key < kClassSink) return kSink;
  return key + kClassRecent > query ? kRecent : kHistory;
}

double squared(double x) { return x * x; }

// Keys [sink, end) are read through the codec by the query at t.
size_t end_of_quantized(const KvArm& arm, const StoredSide& side, size_t t) {
  return side.quantized.empty() ? arm.windows.sink
                                : quantized_end(arm.windows, t, side.token_block);
}

void add_row_errors(const float* exact, const StoredSide& stored, const HeadInput& input,
                    const KvArm& arm, bool keys, HeadErrors& errors) {
  const size_t last = input.num_tokens - 1, dim = input.head_dim;
  const size_t end = end_of_quantized(arm, stored, last);
  for (size_t t = 0; t < input.num_tokens; ++t) {
    const bool quantized = t >= arm.windows.sink && t < end;
    const float* row = (quantized ? stored.quantized : stored.high).data() + t * dim;
    double error = 0, signal = 0;
    for (size_t d = 0; d < dim; ++d) {
      const double x = static_cast<double>(exact[t * dim + d]);
      error += squared(static_cast<double>(row[d]) - x);
      signal += squared(x);
    }
    ClassErrors& sums = errors.classes[class_of(t, last)];
    if (keys) sums.elements += static_cast<double>(dim);
    (keys ? sums.k_error : sums.v_error) += error;
    (keys ? sums.k_signal : sums.v_signal) += signal;
  }
}

// Softmax of the first `count` scores, in place; the others become 0.
void softmax_row(float* scores, size_t count, size_t num_tokens) {
  const float max = *std::max_element(scores, scores + count);
  double sum = 0;
  for (size_t j = 0; j < count; ++j) {
    scores[j] = std::exp(scores[j] - max);
    sum += static_cast<double>(scores[j]);
  }
  const float inverse = static_cast<float>(1 / sum);
  for (size_t j = 0; j < count; ++j) scores[j] *= inverse;
  std::fill(scores + count, scores + num_tokens, 0.0F);
}

// A block of query rows of one head, with the exact side of the story.
class QueryBlock {
 public:
  QueryBlock(const HeadInput& input, const float* centered_k, const float* v_by_dim, size_t begin,
             size_t end)
      : input_(input), begin_(begin), rows_((end - begin) * input.group) {
    const size_t tokens = input.num_tokens, dim = input.head_dim;
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
    queries_.assign(input.q + begin * input.group * dim, input.q + end * input.group * dim);
    for (float& value : queries_) value *= scale;
    scores_.resize(rows_ * tokens);
    multiply_transposed(queries_.data(), rows_, centered_k, tokens, dim, scores_.data());
    softmax_ = scores_;
    for (size_t row = 0; row < rows_; ++row) {
      softmax_row(softmax_.data() + row * tokens, position(row) + 1, tokens);
    }
    output_ = weighted_sum(softmax_, v_by_dim);
  }

  void add_errors(const KvArm& arm, const StoredSide& k, const StoredSide& v,
                  const StoredValues& values, const std::vector<float>& k_mean,
                  const float* v_by_dim, HeadErrors& errors) const {
    const std::vector<float> arm_softmax = score_arm(arm, k, k_mean, errors);
    const std::vector<float> both = mixed_sum(arm, v, values.high, values.quantized, arm_softmax);
    const std::vector<float> keys_only = weighted_sum(arm_softmax, v_by_dim);
    std::vector<float> values_only(rows_ * input_.head_dim, 0.0F);
    for (size_t token_class = 0; token_class < kNumClasses; ++token_class) {
      add_value_class(arm, v, values, token_class, values_only, errors);
    }
    for (size_t row = 0; row < rows_; ++row) {
      double error = 0, error_k = 0, error_v = 0, signal = 0;
      for (size_t d = 0; d < input_.head_dim; ++d) {
        const size_t i = row * input_.head_dim + d;
        const double exact = static_cast<double>(output_[i]);
        error += squared(static_cast<double>(both[i]) - exact);
        error_k += squared(static_cast<double>(keys_only[i]) - exact);
        error_v += squared(static_cast<double>(values_only[i]));
        signal += squared(exact);
      }
      errors.output_error.push_back(error);
      errors.output_error_k.push_back(error_k);
      errors.output_error_v.push_back(error_v);
      errors.output_signal.push_back(signal);
    }
  }

 private:
  size_t position(size_t row) const { return input_.queries[begin_ + row / input_.group]; }

  std::vector<float> weighted_sum(const std::vector<float>& weights, const float* v_by_dim) const {
    std::vector<float> sum(rows_ * input_.head_dim);
    multiply_transposed(weights.data(), rows_, v_by_dim, input_.head_dim, input_.num_tokens,
                        sum.data());
    return sum;
  }

  // Softmax of the arm's scores; adds its logit errors.
  std::vector<float> score_arm(const KvArm& arm, const StoredSide& k,
                               const std::vector<float>& k_mean, HeadErrors& errors) const {
    const size_t tokens = input_.num_tokens, dim = input_.head_dim;
    const auto scores_of = [&](std::vector<float> rows) {
      for (size_t i = 0; i < rows.size(); ++i) rows[i] -= k_mean[i % dim];
      std::vector<float> scores(rows_ * tokens);
      multiply_transposed(queries_.data(), rows_, rows.data(), tokens, dim, scores.data());
      return scores;
    };
    std::vector<float> mixed = scores_of(k.high);
    if (!k.quantized.empty()) {
      const std::vector<float> coded = scores_of(k.quantized);
      for (size_t row = 0; row < rows_; ++row) {
        const size_t end = end_of_quantized(arm, k, position(row));
        for (size_t j = arm.windows.sink; j < end; ++j) {
          mixed[row * tokens + j] = coded[row * tokens + j];
        }
      }
    }
    for (size_t row = 0; row < rows_; ++row) {
      const size_t t = position(row);
      for (size_t j = 0; j <= t; ++j) {
        const size_t i = row * tokens + j;
        const double e2 = squared(static_cast<double>(mixed[i]) - static_cast<double>(scores_[i]));
        const double p = static_cast<double>(softmax_[i]);
        ClassErrors& sums = errors.classes[class_of(j, t)];
        sums.pairs += 1;
        sums.logit_error += e2;
        sums.mass += p;
        sums.logit_error_weighted += p * e2;
      }
      softmax_row(mixed.data() + row * tokens, t + 1, tokens);
    }
    return mixed;
  }

  // Sum of the weights times the values each query really reads: `coded` where its key is
  // quantized, else `high` (both [D, T]; coded may be empty).
  std::vector<float> mixed_sum(const KvArm& arm, const StoredSide& v,
                               const std::vector<float>& high, const std::vector<float>& coded,
                               std::vector<float> weights) const {
    if (coded.empty()) return weighted_sum(weights, high.data());
    const size_t tokens = input_.num_tokens;
    std::vector<float> coded_weights(weights.size(), 0.0F);
    for (size_t row = 0; row < rows_; ++row) {
      const size_t end = end_of_quantized(arm, v, position(row));
      for (size_t j = arm.windows.sink; j < end; ++j) {
        std::swap(coded_weights[row * tokens + j], weights[row * tokens + j]);
      }
    }
    std::vector<float> sum = weighted_sum(weights, high.data());
    const std::vector<float> rest = weighted_sum(coded_weights, coded.data());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += rest[i];
    return sum;
  }

  // Error of the output through the values of one class, real softmax; adds it to values_only.
  void add_value_class(const KvArm& arm, const StoredSide& v, const StoredValues& values,
                       size_t token_class, std::vector<float>& values_only,
                       HeadErrors& errors) const {
    const size_t tokens = input_.num_tokens;
    std::vector<float> weights(softmax_.size(), 0.0F);
    for (size_t row = 0; row < rows_; ++row) {
      const size_t t = position(row);
      for (size_t j = 0; j <= t; ++j) {
        if (class_of(j, t) == token_class) weights[row * tokens + j] = softmax_[row * tokens + j];
      }
    }
    const std::vector<float> error =
        mixed_sum(arm, v, values.high_error, values.quantized_error, std::move(weights));
    for (size_t i = 0; i < error.size(); ++i) {
      values_only[i] += error[i];
      errors.classes[token_class].v_output_error += squared(static_cast<double>(error[i]));
    }
  }

  const HeadInput& input_;
  size_t begin_, rows_;
  std::vector<float> queries_;  // [rows, D], scaled
  std::vector<float> scores_;   // [rows, T] of the exact keys (minus their mean)
  std::vector<float> softmax_;  // [rows, T]
  std::vector<float> output_;   // [rows, D]
};

}  // namespace

const char* class_name(size_t token_class) {
  constexpr const char* kNames[] = {"sink", "recent", "history"};
  return kNames[token_class];
}

void ClassErrors::add(const ClassErrors& other) {
  elements += other.elements;
  k_error += other.k_error;
  k_signal += other.k_signal;
  v_error += other.v_error;
  v_signal += other.v_signal;
  pairs += other.pairs;
  logit_error += other.logit_error;
  mass += other.mass;
  logit_error_weighted += other.logit_error_weighted;
  v_output_error += other.v_output_error;
}

void HeadErrors::add(const HeadErrors& other) {
  for (size_t c = 0; c < kNumClasses; ++c) classes[c].add(other.classes[c]);
  const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(output_error, other.output_error);
  append(output_error_k, other.output_error_k);
  append(output_error_v, other.output_error_v);
  append(output_signal, other.output_signal);
}

std::vector<HeadErrors> simulate_head(const HeadInput& input, const std::vector<const KvArm*>& arms,
                                      size_t layer) {
  const size_t tokens = input.num_tokens, dim = input.head_dim;
  OSCAR_CHECK(tokens > 0 && !input.queries.empty() && input.queries.back() < tokens,
              "simulate: no query inside the sequence of ", tokens, " tokens");
  // Softmax ignores a constant key; without it the float32 logits keep their digits.
  std::vector<double> sums(dim, 0.0);
  for (size_t i = 0; i < tokens * dim; ++i) sums[i % dim] += static_cast<double>(input.k[i]);
  std::vector<float> k_mean(dim);
  for (size_t d = 0; d < dim; ++d) {
    k_mean[d] = static_cast<float>(sums[d] / static_cast<double>(tokens));
  }
  std::vector<float> centered_k(input.k, input.k + tokens * dim);
  for (size_t i = 0; i < centered_k.size(); ++i) centered_k[i] -= k_mean[i % dim];
  const std::vector<float> v_by_dim = transposed(input.v, tokens, dim);

  std::vector<HeadErrors> errors(arms.size());
  std::vector<StoredSide> stored_k, stored_v;
  std::vector<StoredValues> values;
  for (size_t i = 0; i < arms.size(); ++i) {
    const KvArm& arm = *arms[i];
    const LayerArm* sides = arm.quantized ? &arm.layers.at(layer) : nullptr;
    stored_k.push_back(store_side(input.k, input, arm, sides == nullptr ? nullptr : &sides->k));
    stored_v.push_back(store_side(input.v, input, arm, sides == nullptr ? nullptr : &sides->v));
    values.push_back(by_dim(stored_v[i], input.v, tokens, dim));
    add_row_errors(input.k, stored_k[i], input, arm, true, errors[i]);
    add_row_errors(input.v, stored_v[i], input, arm, false, errors[i]);
  }
  const size_t block = std::max<size_t>(1, 128 / input.group);
  for (size_t begin = 0; begin < input.queries.size(); begin += block) {
    const size_t end = std::min(input.queries.size(), begin + block);
    const QueryBlock queries(input, centered_k.data(), v_by_dim.data(), begin, end);
    for (size_t i = 0; i < arms.size(); ++i) {
      queries.add_errors(*arms[i], stored_k[i], stored_v[i], values[i], k_mean, v_by_dim.data(),
                         errors[i]);
    }
  }
  return errors;
}

}  // namespace oscar
