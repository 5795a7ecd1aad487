#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace oscar {
namespace {

// Llama 3: long wavelengths are divided by the factor, short ones kept, a linear blend between.
double llama3_frequency(const RopeConfig& rope, double frequency) {
  const double length = rope.original_context_length;
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  if (wavelength < length / rope.high_freq_factor) return frequency;
  if (wavelength > length / rope.low_freq_factor) return frequency / rope.factor;
  const double blend =
      (length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return frequency * ((1.0 - blend) / rope.factor + blend);
}

struct YarnRamp {
  double low, high;
};
// Pair numbers between which YaRN goes from kept to divided frequencies.
YarnRamp yarn_ramp(const RopeConfig& rope) {
  const auto width = static_cast<double>(rope.rotary_dim);
  const auto pair_of = [&](double rotations) {
    return width * std::log(rope.original_context_length / (2.0 * std::numbers::pi * rotations)) /
           (2.0 * std::log(rope.theta));
  };
  YarnRamp ramp{pair_of(rope.beta_fast), pair_of(rope.beta_slow)};
  if (rope.truncate) ramp = {std::floor(ramp.low), std::ceil(ramp.high)};
  ramp.low = std::max(ramp.low, 0.0);
  ramp.high = std::min(ramp.high, width - 1.0);
  if (ramp.low == ramp.high) ramp.high += 0.001;
  return ramp;
}

}  // namespace

std::vector<double> rope_frequencies(const RopeConfig& rope) {
  OSCAR_CHECK(rope.rotary_dim % 2 == 0, "RoPE: rotary width ", rope.rotary_dim, " is odd");
  const size_t pairs = rope.rotary_dim / 2;
  OSCAR_CHECK(rope.frequency_divisors.empty() || rope.frequency_divisors.size() == pairs,
              "RoPE: ", rope.frequency_divisors.size(), " frequency divisors, expected ", pairs);
  const bool yarn = rope.scaling == "yarn";
  const YarnRamp ramp = yarn ? yarn_ramp(rope) : YarnRamp{0.0, 1.0};
  std::vector<double> frequencies(pairs);
  for (size_t i = 0; i < pairs; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(rope.rotary_dim);
    double frequency = std::pow(rope.theta, exponent);
    if (rope.scaling == "linear") {
      frequency /= rope.factor;
    } else if (rope.scaling == "llama3") {
      frequency = llama3_frequency(rope, frequency);
    } else if (yarn) {
      const double t =
          std::clamp((static_cast<double>(i) - ramp.low) / (ramp.high - ramp.low), 0.0, 1.0);
      frequency = frequency * (1.0 - t) + frequency / rope.factor * t;
    } else {
      OSCAR_CHECK(rope.scaling == "none", "RoPE: unknown scaling ", rope.scaling);
    }
    if (!rope.frequency_divisors.empty()) {
      frequency /= static_cast<double>(rope.frequency_divisors[i]);
    }
    frequencies[i] = frequency;
  }
  return frequencies;
}

RopeTable make_rope_table(const RopeConfig& rope, size_t first_position, size_t num_positions) {
  const std::vector<double> frequencies = rope_frequencies(rope);
  RopeTable table;
  table.first_position = first_position;
  table.num_positions = num_positions;
  table.rotary_dim = rope.rotary_dim;
  table.cos.resize(num_positions * frequencies.size());
  table.sin.resize(table.cos.size());
  for (size_t p = 0; p < num_positions; ++p) {
    const auto position = static_cast<double>(first_position + p);
    for (size_t i = 0; i < frequencies.size(); ++i) {
      const double angle = position * frequencies[i];
      const size_t at = p * frequencies.size() + i;
      table.cos[at] = static_cast<float>(std::cos(angle) * rope.attention_factor);
      table.sin[at] = static_cast<float>(std::sin(angle) * rope.attention_factor);
    }
  }
  return table;
}

namespace {

// Calls turn(low, high, cos, sin, half) for every head of every token.
template <class Turn>
void for_each_pair_row(const RopeTable& table, const RopeRows& rows, const Turn& turn) {
  OSCAR_CHECK(
      rows.first_position >= table.first_position &&
          rows.first_position + rows.num_tokens <= table.first_position + table.num_positions,
      "RoPE: positions ", rows.first_position, "..+", rows.num_tokens,
      " are outside the table, which has ", table.first_position, "..+", table.num_positions);
  OSCAR_CHECK(table.rotary_dim <= rows.head_dim, "RoPE: rotary width ", table.rotary_dim,
              " exceeds the head width ", rows.head_dim);
  const size_t half = table.rotary_dim / 2;
  for (size_t t = 0; t < rows.num_tokens; ++t) {
    const size_t entry = (rows.first_position - table.first_position + t) * half;
    for (size_t h = 0; h < rows.num_heads; ++h) {
      float* const low = rows.rows + t * rows.token_stride + h * rows.head_dim;
      turn(low, low + half, table.cos.data() + entry, table.sin.data() + entry, half);
    }
  }
}

}  // namespace

void apply_rope(const RopeTable& table, const RopeRows& rows) {
  for_each_pair_row(table, rows,
                    [](float* __restrict low, float* __restrict high, const float* __restrict cos,
                       const float* __restrict sin, size_t half) {
                      for (size_t i = 0; i < half; ++i) {
                        const float a = low[i], b = high[i];
                        low[i] = a * cos[i] - b * sin[i];
                        high[i] = b * cos[i] + a * sin[i];
                      }
                    });
}

void undo_rope(const RopeTable& table, const RopeRows& rows) {
  for_each_pair_row(table, rows,
                    [](float* __restrict low, float* __restrict high, const float* __restrict cos,
                       const float* __restrict sin, size_t half) {
                      for (size_t i = 0; i < half; ++i) {
                        const float a = low[i], b = high[i];
                        // The table's cos and sin carry the attention factor.
                        const float norm = cos[i] * cos[i] + sin[i] * sin[i];
                        low[i] = (a * cos[i] + b * sin[i]) / norm;
                        high[i] = (b * cos[i] - a * sin[i]) / norm;
                      }
                    });
}

}  // namespace oscar
