// Helpers of the codec tests: hex, rows of random numbers, random metrics, one-row round trips.
#pragma once

#include <catch2/catch.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "quant/codec.h"
#include "quant/codec_impl.h"

namespace oscar_test {

inline std::string hex(const uint8_t* bytes, size_t count) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += digits[bytes[i] >> 4];
    text += digits[bytes[i] & 15];
  }
  return text;
}

inline std::vector<float> normal_rows(uint64_t seed, size_t rows, size_t head_dim,
                                      double outlier = 0.0) {
  oscar::Random random(seed);
  std::vector<float> values(rows * head_dim);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(random.normal());
    if (outlier > 0.0 && i % head_dim == 3) values[i] += static_cast<float>(outlier);
  }
  return values;
}

// A = B^T B of random rows with decaying energies: far from diagonal. evenness adds that multiple
// of the mean of the diagonal to the diagonal.
inline std::shared_ptr<const oscar::EncoderMetric> random_metric(uint64_t seed, int head_dim,
                                                                 double evenness = 0.0) {
  oscar::Random random(seed);
  const auto size = static_cast<size_t>(head_dim);
  std::vector<double> mix(size * size), m(size * size, 0.0);
  for (size_t i = 0; i < size; ++i)
    for (size_t j = 0; j < size; ++j)
      mix[i * size + j] = random.normal() / (1.0 + static_cast<double>(i) / 4.0);
  for (size_t k = 0; k < size; ++k)
    for (size_t i = 0; i < size; ++i)
      for (size_t j = 0; j < size; ++j) m[i * size + j] += mix[k * size + i] * mix[k * size + j];
  double trace = 0.0;
  for (size_t i = 0; i < size; ++i) trace += m[i * size + i];
  for (size_t i = 0; i < size; ++i) m[i * size + i] += evenness * trace / head_dim;
  return std::make_shared<oscar::EncoderMetric>(oscar::make_encoder_metric(m.data(), head_dim));
}

struct RoundTrip {
  std::vector<uint8_t> bytes;
  std::vector<float> values;
  oscar::EncodeStats stats;
};

inline RoundTrip round_trip(const oscar::Codec& codec, const std::vector<float>& rows) {
  const auto width = static_cast<size_t>(codec.spec().head_dim);
  const size_t blocks = rows.size() / width / static_cast<size_t>(codec.token_block());
  RoundTrip result;
  result.bytes.resize(blocks * codec.bytes_per_block());
  result.values.resize(rows.size());
  codec.encode(rows.data(), width, blocks, result.bytes.data(), &result.stats);
  codec.decode(result.bytes.data(), blocks, result.values.data(), width);
  return result;
}

inline RoundTrip round_trip(const oscar::CodecSpec& spec, const std::vector<float>& rows) {
  return round_trip(*oscar::make_codec(spec), rows);
}

// The versions of the inner loops that this machine runs.
inline std::vector<const oscar::LaneKernels*> all_kernels() {
  std::vector<const oscar::LaneKernels*> found;
  for (const char* name : {"scalar", "avx2", "avx512"})
    if (const oscar::LaneKernels* kernels = oscar::lane_kernels(name)) found.push_back(kernels);
  return found;
}

}  // namespace oscar_test
