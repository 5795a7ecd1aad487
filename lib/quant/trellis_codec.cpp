// Experimental: trellis-coded codes. A stored code is still 2 bits (u = bit 0, w = bit 1), but the
// value is one of 8 levels, level = 4 w + 2 (u_i ^ u_{i+1} ^ u_{i+3}) + u_{i+2}: the 8-state
// amplitude-modulation trellis of Ungerboeck (parity check 13, 04 octal) in feed-forward form, run
// from the last dim to the first, bits past the end 0. Each state offers every other level, so the
// steps are half as wide as the choice at hand. The encoder is the Viterbi algorithm with one
// error-feedback path per state (per-survivor processing), so the metric is honoured.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "quant/clip.h"
#include "quant/codec_impl.h"

namespace oscar {
namespace {

constexpr int kStates = 8;  // state = u_{i+1} + 2 u_{i+2} + 4 u_{i+3}

int level_of(int state, int u, int w) {
  return 4 * w + 2 * (u ^ (state & 1) ^ (state >> 2)) + ((state >> 1) & 1);
}
int next_state(int state, int u) { return ((state << 1) | u) & (kStates - 1); }

// One path through the trellis: errors and codes of the dims decided so far.
struct Survivor {
  double cost = std::numeric_limits<double>::infinity();
  std::vector<float> error;    // [D]
  std::vector<uint8_t> codes;  // [D]
};
using Survivors = std::array<Survivor, kStates>;

// sum_k a_k b_k in eight interleaved parts, which the compiler can keep in vectors.
float dot(const float* a, const float* b, size_t count) {
  float parts[8] = {};
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (size_t k = 0; k < 8; ++k) parts[k] += a[i + k] * b[i + k];
  float sum = ((parts[0] + parts[4]) + (parts[1] + parts[5])) +
              ((parts[2] + parts[6]) + (parts[3] + parts[7]));
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

class TrellisCodec final : public Codec {
 public:
  TrellisCodec(const CodecSpec& spec, std::shared_ptr<const EncoderMetric> metric)
      : spec_(spec), rule_(make_meta_rule(spec)), metric_(std::move(metric)) {
    spec_.group = spec.head_dim;
    format_ = {spec.head_dim, spec.head_dim, spec.bits, spec.meta, spec.order};
    const auto size = static_cast<size_t>(spec.head_dim);
    columns_.resize(size * size);
    for (size_t i = 0; i < size; ++i)
      for (size_t j = 0; j < size; ++j) columns_[i * size + j] = metric_->l[j * size + i];
  }
  const CodecSpec& spec() const override { return spec_; }
  int token_block() const override { return 1; }
  size_t bytes_per_block() const override { return format_.row_bytes(); }

  void encode(const float* rows, size_t row_stride, size_t num_blocks, uint8_t* out,
              EncodeStats* stats) const override {
    EncodeStats counted;
    counted.rows = num_blocks;
    Survivors paths, spare;
    const auto size = static_cast<size_t>(spec_.head_dim);
    for (auto* set : {&paths, &spare})
      for (Survivor& survivor : *set) {
        survivor.error.resize(size);
        survivor.codes.resize(size);
      }
    for (size_t row = 0; row < num_blocks; ++row)
      encode_row(rows + row * row_stride, row, out + row * format_.row_bytes(), paths, spare,
                 counted);
    if (stats != nullptr) stats->add(counted);
  }

  void decode(const uint8_t* encoded, size_t num_blocks, float* rows,
              size_t row_stride) const override {
    for (size_t row = 0; row < num_blocks; ++row) {
      const uint8_t* bytes = encoded + row * format_.row_bytes();
      const StoredPair pair = read_pair(rule_, bytes + format_.pair_offset(0));
      float levels[8];
      for (int index = 0; index < 8; ++index) levels[index] = level(rule_, pair, index);
      int state = 0;
      for (int d = spec_.head_dim - 1; d >= 0; --d) {
        const int code = (bytes[format_.code_byte(d)] >> format_.code_shift(d)) & 3;
        rows[row * row_stride + static_cast<size_t>(d)] =
            levels[level_of(state, code & 1, code >> 1)];
        state = next_state(state, code & 1);
      }
    }
  }

 private:
  // Cheapest row so far.
  struct Best {
    double cost = std::numeric_limits<double>::infinity();
    StoredPair pair;
    std::vector<uint8_t> codes;
  };

  void encode_row(const float* x, size_t row, uint8_t* out, Survivors& paths, Survivors& spare,
                  EncodeStats& stats) const {
    const auto size = static_cast<size_t>(spec_.head_dim);
    for (size_t d = 0; d < size; ++d)
      OSCAR_CHECK(std::isfinite(x[d]), "codec: row ", row, " holds a NaN or an infinity");
    std::vector<float> scratch(size);
    const float threshold = clip_threshold(ClipRule::kOrderStatistic, spec_.feedback.start_clip, x,
                                           spec_.head_dim, scratch.data());
    const auto [lowest, highest] = std::minmax_element(x, x + size);
    const float low = std::max(*lowest, -threshold), high = std::min(*highest, threshold);
    float scale = (high - low) / 7.0F, middle = 0.5F * (low + high);
    Best best;
    for (int round = 0; round <= spec_.feedback.refits; ++round) {
      if (round > 0 && !refit(x, best, scale, middle)) break;
      for (const double factor :
           round == 0 ? spec_.feedback.multipliers : spec_.feedback.refit_multipliers) {
        const StoredPair pair = centered_pair(rule_, static_cast<float>(factor) * scale, middle);
        if (std::isfinite(pair.scale) && std::isfinite(pair.second))
          search(x, pair, paths, spare, best);
      }
    }
    OSCAR_CHECK(std::isfinite(best.cost), "codec: row ", row, " (values ", *lowest, " to ",
                *highest, ") does not fit the ", meta_bits(rule_.format), "-bit metadata");
    if (best.pair.scale == 0.0F &&
        !holds_constants(rule_.format)) {  // all levels were the middle: level 0 stands for it
      best.pair.scale = 1.0F;
      std::fill(best.codes.begin(), best.codes.end(), uint8_t{0});
      ++stats.meta_fallbacks;
    }
    if (best.pair.saturated) ++stats.scale_saturated;
    if (spec_.gain != GainRule::kNone) fold_gain(x, best, stats);
    write(best, out);
  }

  // Viterbi over the dims, last to first; replaces best when the cheapest path is cheaper.
  void search(const float* x, const StoredPair& pair, Survivors& paths, Survivors& spare,
              Best& best) const {
    const auto size = static_cast<size_t>(spec_.head_dim);
    float levels[8];
    for (int index = 0; index < 8; ++index)  // a scale of 0: the middle at every code
      levels[index] = pair.scale > 0.0F || holds_constants(rule_.format)
                          ? level(rule_, pair, index)
                          : (rule_.has_zero ? -pair.second : pair.second);
    for (Survivor& survivor : paths) survivor.cost = std::numeric_limits<double>::infinity();
    paths[0].cost = 0.0;
    for (size_t i = size; i-- > 0;) {
      float target[kStates];
      for (int state = 0; state < kStates; ++state)
        target[state] =
            x[i] + dot(columns_.data() + i * size + i + 1,
                       paths[static_cast<size_t>(state)].error.data() + i + 1, size - i - 1);
      for (int next = 0; next < kStates; ++next)
        extend(x[i], i, next, target, levels, paths, spare[static_cast<size_t>(next)]);
      paths.swap(spare);
    }
    const Survivor& winner =
        *std::min_element(paths.begin(), paths.end(),
                          [](const Survivor& a, const Survivor& b) { return a.cost < b.cost; });
    if (!(winner.cost < best.cost)) return;
    best.cost = winner.cost;
    best.pair = pair;
    best.codes = winner.codes;
  }

  // The cheaper of the two ways into state `next` at dim i.
  void extend(float x, size_t i, int next, const float* target, const float* levels,
              const Survivors& paths, Survivor& out) const {
    const int u = next & 1;
    const double weight = static_cast<double>(metric_->pivot[i]);
    size_t from = 0;
    int code = 0;
    float value = levels[0];
    out.cost = std::numeric_limits<double>::infinity();
    for (const int state : {next >> 1, (next >> 1) | 4}) {
      const auto previous = static_cast<size_t>(state);
      if (!std::isfinite(paths[previous].cost)) continue;
      const float low = levels[level_of(state, u, 0)], high = levels[level_of(state, u, 1)];
      const int w = target[state] - low > high - target[state] ? 1 : 0;
      const double residual = static_cast<double>(target[state] - (w == 1 ? high : low));
      const double cost = paths[previous].cost + weight * residual * residual;
      if (!(cost < out.cost)) continue;
      out.cost = cost;
      from = previous;
      code = u | (w << 1);
      value = w == 1 ? high : low;
    }
    if (!std::isfinite(out.cost)) return;
    const auto tail = out.error.size() - i - 1;
    std::memcpy(out.error.data() + i + 1, paths[from].error.data() + i + 1, tail * sizeof(float));
    std::memcpy(out.codes.data() + i + 1, paths[from].codes.data() + i + 1, tail);
    out.error[i] = x - value;
    out.codes[i] = static_cast<uint8_t>(code);
  }

  // Level numbers of a row of codes.
  std::vector<float> level_numbers(const std::vector<uint8_t>& codes) const {
    std::vector<float> numbers(codes.size());
    int state = 0;
    for (size_t i = codes.size(); i-- > 0;) {
      const int u = codes[i] & 1;
      numbers[i] = static_cast<float>(level_of(state, u, codes[i] >> 1));
      state = next_state(state, u);
    }
    return numbers;
  }

  // v L, in double.
  std::vector<double> through_factor(const std::vector<float>& v) const {
    std::vector<double> result(v.size(), 0.0);
    for (size_t i = 0; i < v.size(); ++i)
      for (size_t j = i; j < v.size(); ++j)
        result[i] += static_cast<double>(columns_[i * v.size() + j]) * static_cast<double>(v[j]);
    return result;
  }
  double product(const std::vector<double>& a, const std::vector<double>& b) const {
    double sum = 0.0;
    for (size_t i = 0; i < a.size(); ++i)
      sum += static_cast<double>(metric_->pivot[i]) * a[i] * b[i];
    return sum;
  }

  // Least-squares scale and middle in the metric for the best codes; false when singular.
  bool refit(const float* x, const Best& best, float& scale, float& middle) const {
    if (best.codes.empty()) return false;
    const std::vector<double> row = through_factor({x, x + best.codes.size()});
    const std::vector<double> numbers = through_factor(level_numbers(best.codes));
    const std::vector<double> ones = through_factor(std::vector<float>(best.codes.size(), 1.0F));
    const double cc = product(numbers, numbers), c1 = product(numbers, ones);
    const double oo = product(ones, ones), xc = product(row, numbers), x1 = product(row, ones);
    const double determinant = cc * oo - c1 * c1;
    if (!(determinant > 1e-6 * cc * oo)) return false;
    const double fitted = (xc * oo - x1 * c1) / determinant;
    if (!(fitted > 0.0)) return false;
    scale = static_cast<float>(fitted);
    middle = static_cast<float>((x1 * cc - xc * c1) / determinant + 3.5 * fitted);
    return true;
  }

  void fold_gain(const float* x, Best& best, EncodeStats& stats) const {
    std::vector<float> row(x, x + best.codes.size()), values = level_numbers(best.codes);
    for (float& value : values) value = level(rule_, best.pair, static_cast<int>(value));
    double xx = 0.0, xy = 0.0;
    if (spec_.gain == GainRule::kMetric) {
      const std::vector<double> a = through_factor(row), b = through_factor(values);
      xx = product(a, a);
      xy = product(a, b);
    } else {
      for (size_t d = 0; d < row.size(); ++d) {
        xx += static_cast<double>(row[d]) * static_cast<double>(row[d]);
        xy += static_cast<double>(row[d]) * static_cast<double>(values[d]);
      }
    }
    best.pair = multiply_pair(rule_, best.pair, unbiased_gain(xx, xy, stats));
  }

  void write(const Best& best, uint8_t* out) const {
    std::memset(out, 0, format_.code_bytes());
    for (int d = 0; d < spec_.head_dim; ++d) {
      uint8_t& byte = out[format_.code_byte(d)];
      byte = static_cast<uint8_t>(byte |
                                  (best.codes[static_cast<size_t>(d)] << format_.code_shift(d)));
    }
    write_pair(rule_, best.pair, out + format_.pair_offset(0));
  }

  CodecSpec spec_;
  MetaRule rule_;
  RowFormat format_{};
  std::shared_ptr<const EncoderMetric> metric_;
  std::vector<float> columns_;  // L transposed
};

}  // namespace

std::unique_ptr<Codec> make_trellis_codec(const CodecSpec& spec,
                                          std::shared_ptr<const EncoderMetric> metric) {
  return std::make_unique<TrellisCodec>(spec, std::move(metric));
}

}  // namespace oscar
