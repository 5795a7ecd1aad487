#include <catch2/catch.hpp>
#include <cmath>

#include "base/error.h"
#include "base/float16.h"
#include "base/random.h"
#include "gpu/device_buffer.h"
#include "kernels/rotate_rows.h"
#include "support/compare.h"

using namespace oscar;
using namespace oscar_test;

namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

struct RotateCase {
  int64_t tokens = 77;
  int heads = 6, head_dim = 128, num_rotations = 1, num_means = 1;
  ElementType input = ElementType::kBf16, output = ElementType::kFp32;
  bool transposed = false, mean = false, two_terms = true, in_place = false;
  bool portable = false;
  double mean_size = 3.0;
};

size_t size_of(ElementType type) { return type == ElementType::kFp32 ? 4 : 2; }

void put(std::vector<uint8_t>& bytes, size_t index, ElementType type, float value) {
  if (type == ElementType::kFp32) {
    std::memcpy(&bytes[4 * index], &value, 4);
    return;
  }
  const uint16_t bits = type == ElementType::kBf16 ? float_to_bf16(value) : float_to_fp16(value);
  std::memcpy(&bytes[2 * index], &bits, 2);
}
float get(const std::vector<uint8_t>& bytes, size_t index, ElementType type) {
  if (type == ElementType::kFp32) {
    float value = 0;
    std::memcpy(&value, &bytes[4 * index], 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, &bytes[2 * index], 2);
  return type == ElementType::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

// A random orthogonal matrix: a product of Householder reflections.
std::vector<float> random_rotation(int dim, Random& random) {
  const auto n = at(dim);
  std::vector<double> r(n * n, 0.0);
  for (size_t i = 0; i < n; ++i) r[i * n + i] = 1.0;
  for (int reflection = 0; reflection < 3; ++reflection) {
    std::vector<double> u(n);
    double norm = 0;
    for (double& x : u) {
      x = random.normal();
      norm += x * x;
    }
    for (size_t i = 0; i < n; ++i) {
      double dot = 0;
      for (size_t j = 0; j < n; ++j) dot += r[i * n + j] * u[j];
      for (size_t j = 0; j < n; ++j) r[i * n + j] -= 2.0 * dot / norm * u[j];
    }
  }
  return {r.begin(), r.end()};
}

// Worst relative error of a row against float64.
double worst_error(const RotateCase& c) {
  Random random(static_cast<uint64_t>(c.head_dim) + 5);
  const int dim = c.head_dim;
  const int64_t head_stride = c.in_place ? dim : dim + 8;
  const int64_t token_stride = c.heads * head_stride + (c.in_place ? 0 : 24);
  const int64_t out_head_stride = c.in_place ? head_stride : dim + 16;
  const int64_t out_token_stride = c.in_place ? token_stride : c.heads * out_head_stride + 8;
  std::vector<float> rotation;
  for (int i = 0; i < c.num_rotations; ++i) {
    const std::vector<float> r = random_rotation(dim, random);
    rotation.insert(rotation.end(), r.begin(), r.end());
  }
  std::vector<float> mean(at(c.num_means) * at(dim));
  for (float& x : mean) x = static_cast<float>(c.mean_size * random.normal());
  const size_t count = at(c.tokens * token_stride);
  std::vector<uint8_t> input(count * size_of(c.input), 0xFF);
  for (int64_t token = 0; token < c.tokens; ++token) {
    for (int head = 0; head < c.heads; ++head) {
      const int m = head / (c.heads / c.num_means);
      for (int d = 0; d < dim; ++d) {
        const float offset = c.mean ? mean[at(m * dim + d)] : 0.0F;
        put(input, at(token * token_stride + head * head_stride + d), c.input,
            offset + static_cast<float>(random.normal()));
      }
    }
  }
  const DeviceBuffer<uint8_t> d_input(input);
  const DeviceBuffer<uint8_t> d_output(at(c.tokens * out_token_stride) * size_of(c.output));
  const DeviceBuffer<float> d_rotation(rotation), d_mean(mean);
  RotateParams p;
  p.num_tokens = c.tokens;
  p.num_heads = c.heads;
  p.head_dim = dim;
  p.input = d_input.get();
  p.input_type = c.input;
  p.input_token_stride = token_stride;
  p.input_head_stride = head_stride;
  p.output = c.in_place ? d_input.get() : d_output.get();
  p.output_type = c.output;
  p.output_token_stride = out_token_stride;
  p.output_head_stride = out_head_stride;
  p.rotation = d_rotation.get();
  p.num_rotations = c.num_rotations;
  p.transposed = c.transposed;
  p.mean = c.mean ? d_mean.get() : nullptr;
  p.num_means = c.num_means;
  p.two_terms = c.two_terms;
  p.portable = c.portable;
  rotate_rows(p, nullptr);
  cuda_ok(cudaDeviceSynchronize());
  const std::vector<uint8_t> output = (c.in_place ? d_input : d_output).download();
  double worst = 0;
  std::vector<double> x(at(dim));
  for (int64_t token = 0; token < c.tokens; ++token) {
    for (int head = 0; head < c.heads; ++head) {
      const float* r = rotation.data() + at(head / (c.heads / c.num_rotations)) * at(dim) * at(dim);
      const int m = head / (c.heads / c.num_means);
      for (int d = 0; d < dim; ++d) {
        const float value = get(input, at(token * token_stride + head * head_stride + d), c.input);
        x[at(d)] = static_cast<double>(value) -
                   (c.mean ? static_cast<double>(mean[at(m * dim + d)]) : 0.0);
      }
      double error = 0, norm = 0;
      for (int d = 0; d < dim; ++d) {
        double sum = 0;
        for (int k = 0; k < dim; ++k)
          sum += x[at(k)] * static_cast<double>(c.transposed ? r[d * dim + k] : r[k * dim + d]);
        const double actual = static_cast<double>(
            get(output, at(token * out_token_stride + head * out_head_stride + d), c.output));
        error += (actual - sum) * (actual - sum);
        norm += sum * sum;
      }
      const double relative = std::sqrt(error / norm);
      if (!(relative <= worst)) worst = relative;  // NaN sticks
    }
    // Padding keeps its poison.
    for (int64_t i = 0; i < out_token_stride; ++i) {
      if (i / out_head_stride < c.heads && i % out_head_stride < dim) continue;
      REQUIRE(std::isnan(get(output, at(token * out_token_stride + i), c.output)));
    }
  }
  return worst;
}

// Errors by cause: two terms carry 16 bits, one term carries bf16's 8 or fp16's 11, and the output
// rounds once.
double tolerance(const RotateCase& c) {
  const auto bf16 = static_cast<double>(kBf16Epsilon), fp16 = static_cast<double>(kFp16Epsilon);
  const double term = c.input == ElementType::kFp16 ? fp16 : bf16;
  const double products = c.two_terms ? bf16 * bf16 : term;
  const double output = c.output == ElementType::kBf16   ? bf16
                        : c.output == ElementType::kFp16 ? fp16
                                                         : 0.0;
  return products + output;
}
// Both kernels; where the device has no wgmma they are the same.
void check(RotateCase c) {
  for (const bool portable : {false, true}) {
    c.portable = portable;
    const double worst = worst_error(c);
    INFO("D " << c.head_dim << ", input " << static_cast<int>(c.input) << ", output "
              << static_cast<int>(c.output) << ", mean " << c.mean << ", two terms " << c.two_terms
              << ", transposed " << c.transposed << ", in place " << c.in_place << ", portable "
              << portable << ": worst relative error " << worst << ", allowed " << tolerance(c));
    CHECK(worst <= tolerance(c));
  }
}

}  // namespace

TEST_CASE("rotate: head dims, types, terms and means against float64", "[gpu][rotate]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      for (const bool mean : {false, true}) {
        for (const bool two_terms : {false, true}) {
          RotateCase c;
          c.head_dim = head_dim;
          c.input = type;
          c.mean = mean;
          c.two_terms = two_terms;
          c.transposed = two_terms != mean;
          check(c);
        }
      }
    }
  }
}

TEST_CASE("rotate: matrices and means a head, output types, row counts", "[gpu][rotate]") {
  if (!has_gpu()) return;
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    RotateCase c;
    c.output = type;
    c.num_rotations = 3;
    c.num_means = 2;
    c.mean = true;
    check(c);
    c.num_rotations = 6;
    c.mean = false;
    c.transposed = true;
    check(c);
  }
  for (const int64_t tokens : {1, 2, 15, 16, 17, 255, 256, 257, 3000}) {
    RotateCase c;
    c.tokens = tokens;
    c.heads = 1;
    c.head_dim = tokens % 2 == 0 ? 256 : 64;
    check(c);
  }
}

TEST_CASE("rotate: in place", "[gpu][rotate]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp32}) {
      RotateCase c;
      c.head_dim = head_dim;
      c.tokens = 700;
      c.in_place = true;
      c.input = c.output = type;
      check(c);
    }
  }
}

TEST_CASE("rotate: reduced set for the sanitizers", "[gpu][rotate][sanitize]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 256}) {
    RotateCase c;
    c.head_dim = head_dim;
    c.tokens = 50;
    c.num_rotations = 2;
    check(c);
    c.mean = true;
    c.transposed = true;
    check(c);
  }
}

TEST_CASE("rotate: the check sees a wrong matrix, bad input is refused", "[gpu][rotate]") {
  if (!has_gpu()) return;
  RotateCase one_term;
  one_term.two_terms = false;
  const double error = worst_error(one_term);
  one_term.two_terms = true;
  CHECK(error > tolerance(one_term));

  const DeviceBuffer<uint16_t> rows(4 * 128, 0), out(4 * 128);
  const DeviceBuffer<float> rotation(128 * 128, 0);
  RotateParams good;
  good.num_tokens = 2;
  good.num_heads = 2;
  good.head_dim = 128;
  good.input = rows.get();
  good.output = out.get();
  good.input_token_stride = good.output_token_stride = 256;
  good.input_head_stride = good.output_head_stride = 128;
  good.rotation = rotation.get();
  rotate_rows(good, nullptr);
  cuda_ok(cudaDeviceSynchronize());
  const auto refused = [&](auto change) {
    RotateParams p = good;
    change(p);
    CHECK_THROWS_AS(rotate_rows(p, nullptr), Error);
  };
  refused([](RotateParams& p) { p.head_dim = 100; });
  refused([](RotateParams& p) { p.num_tokens = 0; });
  refused([](RotateParams& p) { p.num_rotations = 3; });
  refused([](RotateParams& p) { p.num_means = 0; });
  refused([](RotateParams& p) { p.input = nullptr; });
  refused([](RotateParams& p) { p.output = static_cast<uint8_t*>(p.output) + 2; });
  refused([](RotateParams& p) { p.rotation = nullptr; });
  refused([](RotateParams& p) { p.input_token_stride = 250; });
  refused([&](RotateParams& p) { p.output = rows.get() + 8; });  // overlaps
  refused([&](RotateParams& p) {                                 // in place with another type
    p.output = rows.get();
    p.output_type = ElementType::kFp32;
  });
  static std::vector<uint16_t> host(1024);
  refused([](RotateParams& p) { p.output = host.data(); });
}
