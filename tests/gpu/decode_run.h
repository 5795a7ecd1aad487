// Runs attend_decode_int2 on a MixedCacheCase and compares it with the float64 oracle.
#pragma once

#include <algorithm>

#include "gpu/mixed_cache_case.h"
#include "kernels/attend_decode_int2.h"
#include "support/compare.h"

namespace oscar_test {

struct DecodeOptions {
  int group = 4, num_query_tokens = 1, sliding_window = 0;
  float softcap = 0.0F;
  bool rotate = false, rotate_per_head = false;
  ElementType q_type = ElementType::kBf16, out_type = ElementType::kFp32;
  float q_size = 1.0F;
  double max_error = 1e-3;  // of ||out - oracle|| / ||oracle||, and of |lse| absolute
  uint64_t seed = 9;
};

// Everything attend_decode_int2 needs, on the device.
struct DecodeRun {
  const MixedCacheCase& cache;
  DecodeOptions options;
  int batch, num_q_heads;
  DecodeSchedule schedule;
  std::vector<double> q;  // [batch, tokens, heads, D], as the kernel reads it
  std::vector<float> rotation;
  std::unique_ptr<DeviceBuffer<uint16_t>> d_q;
  std::unique_ptr<DeviceBuffer<float>> d_rotation, d_lse;
  std::unique_ptr<DeviceBuffer<uint8_t>> d_out, d_workspace;
  std::unique_ptr<DeviceBuffer<DecodeWork>> d_work;

  DecodeRun(const MixedCacheCase& c, const DecodeOptions& o)
      : cache(c),
        options(o),
        batch(static_cast<int>(c.shape.lengths.size())),
        num_q_heads(o.group * c.shape.num_kv_heads) {
    const int dim = c.shape.head_dim;
    Random random(o.seed);
    std::vector<uint16_t> bits(at(batch * o.num_query_tokens * num_q_heads) * at(dim));
    for (uint16_t& x : bits) {
      const float value = o.q_size * static_cast<float>(random.normal());
      x = o.q_type == ElementType::kBf16 ? float_to_bf16(value) : float_to_fp16(value);
      q.push_back(static_cast<double>(o.q_type == ElementType::kBf16 ? bf16_to_float(x)
                                                                     : fp16_to_float(x)));
    }
    d_q = std::make_unique<DeviceBuffer<uint16_t>>(bits);
    if (o.rotate) {
      rotation.resize(at(o.rotate_per_head ? c.shape.num_kv_heads : 1) * at(dim * dim));
      for (float& x : rotation)
        x = static_cast<float>(random.normal() / std::sqrt(static_cast<double>(dim)));
      d_rotation = std::make_unique<DeviceBuffer<float>>(rotation);
    }
    const int columns = decode_columns_per_block(o.group, o.num_query_tokens);
    DecodeProblem problem;
    problem.lengths = c.shape.lengths;
    problem.num_kv_heads = c.shape.num_kv_heads;
    problem.group = o.group;
    problem.num_query_tokens = o.num_query_tokens;
    problem.head_dim = dim;
    problem.sliding_window = o.sliding_window;
    problem.num_ctas = attend_decode_num_ctas(dim, columns);
    schedule = make_decode_schedule(problem);
    d_work = std::make_unique<DeviceBuffer<DecodeWork>>(schedule.work);
    d_workspace = std::make_unique<DeviceBuffer<uint8_t>>(
        attend_decode_workspace_bytes(dim, columns, problem.num_ctas), 0);
    const size_t rows = at(batch * o.num_query_tokens * num_q_heads);
    d_out = std::make_unique<DeviceBuffer<uint8_t>>(rows * at(dim) *
                                                    (o.out_type == ElementType::kFp32 ? 4 : 2));
    d_lse = std::make_unique<DeviceBuffer<float>>(rows);
  }

  AttendDecodeParams params() const {
    AttendDecodeParams p;
    p.cache = cache.view();
    p.batch = batch;
    p.num_query_tokens = options.num_query_tokens;
    p.num_q_heads = num_q_heads;
    p.q = d_q->get();
    p.q_type = options.q_type;
    p.q_head_stride = cache.shape.head_dim;
    p.q_token_stride = p.q_head_stride * num_q_heads;
    p.q_seq_stride = p.q_token_stride * options.num_query_tokens;
    p.rotation = d_rotation ? d_rotation->get() : nullptr;
    p.rotation_per_head = options.rotate_per_head;
    p.out = d_out->get();
    p.out_type = options.out_type;
    p.lse_nats = d_lse->get();
    p.softmax_scale = 1.0F / std::sqrt(static_cast<float>(cache.shape.head_dim));
    p.softcap = options.softcap;
    p.sliding_window = options.sliding_window;
    p.work = d_work->get();
    p.num_ctas = attend_decode_num_ctas(cache.shape.head_dim, schedule.columns_per_block);
    p.columns_per_block = schedule.columns_per_block;
    p.workspace = d_workspace->get();
    p.workspace_bytes = d_workspace->bytes();
    p.num_slots = schedule.num_slots;
    p.check_tables = true;
    return p;
  }

  std::vector<float> output() const {
    const std::vector<uint8_t> bytes = d_out->download();
    std::vector<float> values;
    if (options.out_type == ElementType::kFp32) {
      values.resize(bytes.size() / 4);
      std::memcpy(values.data(), bytes.data(), bytes.size());
      return values;
    }
    for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
      uint16_t bits = 0;
      std::memcpy(&bits, bytes.data() + i, 2);
      values.push_back(options.out_type == ElementType::kBf16 ? bf16_to_float(bits)
                                                              : fp16_to_float(bits));
    }
    return values;
  }

  // Worst row error of out and worst lse error against the oracle.
  void check() const {
    const std::vector<float> out = output(), lse = d_lse->download();
    const auto dim = at(cache.shape.head_dim);
    double worst = 0, worst_lse = 0;
    size_t row = 0;
    for (int b = 0; b < batch; ++b) {
      for (int token = 0; token < options.num_query_tokens; ++token) {
        for (int head = 0; head < num_q_heads; ++head, ++row) {
          const int kv_head = head / options.group;
          std::vector<double> query(q.begin() + static_cast<std::ptrdiff_t>(row * dim),
                                    q.begin() + static_cast<std::ptrdiff_t>((row + 1) * dim));
          if (options.rotate) query = rotated(query, kv_head);
          std::vector<double> expected;
          const double expected_lse =
              cache.attend(query, b, kv_head, cache.tokens(b) - options.num_query_tokens + token,
                           1.0 / std::sqrt(static_cast<double>(dim)),
                           static_cast<double>(options.softcap), options.sliding_window, expected);
          double error = 0, norm = 0;
          for (size_t d = 0; d < dim; ++d) {
            const double difference = static_cast<double>(out[row * dim + d]) - expected[d];
            error += difference * difference;
            norm += expected[d] * expected[d];
          }
          error = std::sqrt(error / norm);
          if (!(error <= worst)) worst = error;  // NaN sticks
          const double lse_error = std::abs(static_cast<double>(lse[row]) - expected_lse);
          if (!(lse_error <= worst_lse)) worst_lse = lse_error;
        }
      }
    }
    INFO("D " << dim << ", group " << options.group << ", query tokens " << options.num_query_tokens
              << ", window " << options.sliding_window << ", softcap " << options.softcap
              << ", batch " << batch << ": worst relative error " << worst << ", worst lse error "
              << worst_lse);
    CHECK(worst <= options.max_error);
    CHECK(worst_lse <= 1e-3);
    worst_error() = std::max(worst_error(), worst);
  }
  // Largest error any check of this process saw.
  static double& worst_error() {
    static double value = 0;
    return value;
  }

  void run_and_check() const {
    d_out->poison();
    d_lse->poison();
    attend_decode_int2(params(), nullptr);
    cuda_ok(cudaDeviceSynchronize());
    check();
  }

 private:
  std::vector<double> rotated(const std::vector<double>& query, int kv_head) const {
    const size_t dim = query.size();
    const float* r = rotation.data() + (options.rotate_per_head ? at(kv_head) * dim * dim : 0);
    std::vector<double> result(dim, 0.0);
    for (size_t i = 0; i < dim; ++i) {
      for (size_t j = 0; j < dim; ++j) result[j] += query[i] * static_cast<double>(r[i * dim + j]);
    }
    return result;
  }
};

}  // namespace oscar_test
