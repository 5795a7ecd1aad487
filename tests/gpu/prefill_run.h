// Runs attend_prefill on a MixedCacheCase plus new tokens and compares it with float64.
#pragma once

#include <algorithm>

#include "gpu/mixed_cache_case.h"
#include "kernels/attend_prefill.h"
#include "support/compare.h"

namespace oscar_test {

struct PrefillOptions {
  PrefillPath path = PrefillPath::kPortable;
  int group = 4, sliding_window = 0;
  float softcap = 0.0F, q_size = 1.0F;
  ElementType out_type = ElementType::kFp32;
  bool lse = true;
  // Of ||out - oracle|| / ||oracle|| with the oracle's INT2 values rounded to bf16 as the kernel
  // rounds them: what remains is one rounding of the weights.
  double max_error = static_cast<double>(kBf16Epsilon);
  double max_lse_error = 1e-4;
  // The same with the values as they are stored: two more roundings, of keys and values, that a row
  // may meet in its few heavy keys.
  double max_stored_error = 4.0 * static_cast<double>(kBf16Epsilon);
  int max_rows = 300;  // compared, of a (sequence, query head) at most this many over all heads
  uint64_t seed = 21;
};

inline bool hopper_here() {
  int major = 0, minor = 0;
  cuda_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  cuda_ok(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  return major == 9 && minor == 0;
}
inline std::vector<PrefillPath> prefill_paths() {
  if (hopper_here()) return {PrefillPath::kPortable, PrefillPath::kHopper};
  return {PrefillPath::kPortable};
}

struct PrefillRun {
  const MixedCacheCase& cache;
  std::vector<int> new_tokens;  // of each sequence
  PrefillOptions options;
  int dim, num_kv_heads, num_q_heads;
  int64_t num_tokens = 0;
  // Element strides, with padding.
  int64_t q_head, q_token, kv_head, kv_token, out_head, out_token;
  std::vector<PrefillWork> work;
  std::vector<uint16_t> q, k, v;
  std::unique_ptr<DeviceBuffer<uint16_t>> d_q, d_k, d_v;
  std::unique_ptr<DeviceBuffer<uint8_t>> d_out;
  std::unique_ptr<DeviceBuffer<float>> d_lse;
  std::unique_ptr<DeviceBuffer<PrefillWork>> d_work;

  PrefillRun(const MixedCacheCase& c, std::vector<int> tokens, const PrefillOptions& o)
      : cache(c),
        new_tokens(std::move(tokens)),
        options(o),
        dim(c.shape.head_dim),
        num_kv_heads(c.shape.num_kv_heads),
        num_q_heads(o.group * c.shape.num_kv_heads),
        q_head(dim),
        q_token(num_q_heads * q_head + 16),
        kv_head(dim + 8),
        kv_token(num_kv_heads * kv_head + 8),
        out_head(dim + 8),
        out_token(num_q_heads * out_head + 8) {
    for (const int n : new_tokens) num_tokens += n;
    PrefillProblem problem;
    problem.lengths = c.shape.lengths;
    problem.new_tokens = new_tokens;
    problem.num_kv_heads = num_kv_heads;
    problem.group = o.group;
    problem.sliding_window = o.sliding_window;
    problem.rows_per_tile = attend_prefill_rows_per_tile(o.path);
    work = make_prefill_schedule(problem);
    Random random(o.seed);
    q = random_rows(q_token, q_head, num_q_heads, o.q_size, random);
    k = random_rows(kv_token, kv_head, num_kv_heads, c.shape.key_scale, random);
    v = random_rows(kv_token, kv_head, num_kv_heads, c.shape.value_scale, random);
    d_q = std::make_unique<DeviceBuffer<uint16_t>>(q);
    d_k = std::make_unique<DeviceBuffer<uint16_t>>(k);
    d_v = std::make_unique<DeviceBuffer<uint16_t>>(v);
    d_out = std::make_unique<DeviceBuffer<uint8_t>>(at(num_tokens * out_token) * element_size());
    d_lse = std::make_unique<DeviceBuffer<float>>(at(num_tokens * num_q_heads));
    d_work = std::make_unique<DeviceBuffer<PrefillWork>>(work);
  }
  size_t element_size() const { return options.out_type == ElementType::kFp32 ? 4 : 2; }

  AttendPrefillParams params() const {
    AttendPrefillParams p;
    p.cache = cache.view();
    p.num_q_heads = num_q_heads;
    p.num_tokens = num_tokens;
    p.q = d_q->get();
    p.q_token_stride = q_token;
    p.q_head_stride = q_head;
    p.k = d_k->get();
    p.v = d_v->get();
    p.kv_token_stride = kv_token;
    p.kv_head_stride = kv_head;
    p.out = d_out->get();
    p.out_type = options.out_type;
    p.out_token_stride = out_token;
    p.out_head_stride = out_head;
    p.lse_nats = options.lse ? d_lse->get() : nullptr;
    p.softmax_scale = 1.0F / std::sqrt(static_cast<float>(dim));
    p.softcap = options.softcap;
    p.sliding_window = options.sliding_window;
    p.work = d_work->get();
    p.num_work = static_cast<int>(work.size());
    p.path = options.path;
    p.check_tables = true;
    return p;
  }

  double element(const std::vector<uint8_t>& bytes, int64_t index) const {
    if (options.out_type == ElementType::kFp32) {
      float value = 0;
      std::memcpy(&value, &bytes[at(index) * 4], 4);
      return static_cast<double>(value);
    }
    uint16_t bits = 0;
    std::memcpy(&bits, &bytes[at(index) * 2], 2);
    return static_cast<double>(options.out_type == ElementType::kBf16 ? bf16_to_float(bits)
                                                                      : fp16_to_float(bits));
  }

  // Worst relative error of the compared rows, and worst lse error.
  std::pair<double, double> errors(bool rounded = true) const {
    const std::vector<uint8_t> out = d_out->download();
    const std::vector<float> lse = d_lse->download();
    check_padding(out);
    double worst = 0, worst_lse = 0;
    int64_t first = 0;
    for (size_t seq = 0; seq < new_tokens.size(); ++seq) {
      const int rows = new_tokens[seq] * num_q_heads;
      const int step = std::max(1, rows / (rounded ? options.max_rows : options.max_rows / 4));
      for (int row = 0; row < rows; row += row + step < rows ? step : std::max(1, rows - 1 - row)) {
        const int token = row / num_q_heads, head = row % num_q_heads;
        std::vector<double> expected;
        const double expected_lse = attend(seq, first, token, head, rounded, expected);
        double error = 0, norm = 0;
        for (int d = 0; d < dim; ++d) {
          const double difference =
              element(out, (first + token) * out_token + head * out_head + d) - expected[at(d)];
          error += difference * difference;
          norm += expected[at(d)] * expected[at(d)];
        }
        error = std::sqrt(error / norm);
        if (!(error <= worst)) worst = error;  // NaN sticks
        if (!options.lse) continue;
        const double lse_error = std::abs(
            static_cast<double>(lse[at((first + token) * num_q_heads + head)]) - expected_lse);
        if (!(lse_error <= worst_lse)) worst_lse = lse_error;
      }
      first += new_tokens[seq];
    }
    return {worst, worst_lse};
  }
  void run_and_check() const {
    d_out->poison();
    d_lse->poison();
    attend_prefill(params(), nullptr);
    cuda_ok(cudaDeviceSynchronize());
    const auto [worst, worst_lse] = errors();
    INFO("path " << static_cast<int>(options.path) << ", D " << dim << ", group " << options.group
                 << ", window " << options.sliding_window << ", softcap " << options.softcap
                 << ", sequences " << new_tokens.size() << ", new tokens " << num_tokens
                 << ": worst relative error " << worst << ", worst lse error " << worst_lse);
    CHECK(worst <= options.max_error);
    CHECK(worst_lse <= options.max_lse_error);
    const auto [stored, stored_lse] = errors(false);
    INFO("against the stored values: " << stored << ", lse " << stored_lse);
    CHECK(stored <= options.max_stored_error);
    worst_errors() = {std::max(worst_errors().first, worst),
                      std::max(worst_errors().second, stored)};
  }
  // Largest errors any check of this process saw, against rounded and stored values.
  static std::pair<double, double>& worst_errors() {
    static std::pair<double, double> value;
    return value;
  }

 private:
  // [num_tokens, heads, D] with padding that is NaN.
  std::vector<uint16_t> random_rows(int64_t token_stride, int64_t head_stride, int heads,
                                    float size, Random& random) const {
    std::vector<uint16_t> rows(at(num_tokens * token_stride), 0xFFFF);
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int head = 0; head < heads; ++head) {
        for (int d = 0; d < dim; ++d)
          rows[at(token * token_stride + head * head_stride + d)] =
              float_to_bf16(size * static_cast<float>(random.normal()));
      }
    }
    return rows;
  }
  // Attention of one query row in float64; first: the sequence's first new token.
  double attend(size_t seq, int64_t first, int token, int head, bool rounded,
                std::vector<double>& out) const {
    const int kv = head / options.group, cached = cache.tokens(static_cast<int>(seq));
    const int position = cached + token;
    const int begin =
        options.sliding_window > 0 ? std::max(0, position - options.sliding_window + 1) : 0;
    const auto cap = static_cast<double>(options.softcap);
    const uint16_t* query = &q[at((first + token) * q_token + head * q_head)];
    std::vector<double> scores;
    std::vector<float> row(at(dim));
    const auto load = [&](const std::vector<float>& old, const std::vector<uint16_t>& fresh,
                          int key) {
      if (key < cached) {
        const size_t offset = cache.row(static_cast<int>(seq), kv, key);
        std::copy_n(old.begin() + static_cast<std::ptrdiff_t>(offset), dim, row.begin());
        if (rounded) round_to_bf16(row.data(), row.size());  // BF16 rows stay as they are
      } else {
        const uint16_t* bits = &fresh[at((first + key - cached) * kv_token + kv * kv_head)];
        for (int d = 0; d < dim; ++d) row[at(d)] = bf16_to_float(bits[d]);
      }
    };
    double high = -INFINITY;
    for (int key = begin; key <= position; ++key) {
      load(cache.k[seq], k, key);
      double dot = 0;
      for (int d = 0; d < dim; ++d)
        dot += static_cast<double>(bf16_to_float(query[d])) * static_cast<double>(row[at(d)]);
      dot /= std::sqrt(static_cast<double>(dim));
      if (cap > 0) dot = cap * std::tanh(dot / cap);
      scores.push_back(dot);
      high = std::max(high, dot);
    }
    out.assign(at(dim), 0.0);
    double sum = 0;
    for (int key = begin; key <= position; ++key) {
      load(cache.v[seq], v, key);
      const double p = std::exp(scores[at(key - begin)] - high);
      sum += p;
      for (int d = 0; d < dim; ++d) out[at(d)] += p * static_cast<double>(row[at(d)]);
    }
    for (double& x : out) x /= sum;
    return high + std::log(sum);
  }
  // Padding keeps its poison and every element was written.
  void check_padding(const std::vector<uint8_t>& out) const {
    size_t padding_lost = 0, not_written = 0;
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int64_t i = 0; i < out_token; ++i) {
        const bool inside = i / out_head < num_q_heads && i % out_head < dim;
        const bool poisoned = std::isnan(element(out, token * out_token + i));
        padding_lost += !inside && !poisoned;
        not_written += inside && poisoned;
      }
    }
    CHECK(padding_lost == 0);
    CHECK(not_written == 0);
  }
};

}  // namespace oscar_test
