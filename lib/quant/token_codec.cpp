// Codec whose groups run over tokens: one pair per channel of a block of tokens (KIVI keys).
#include <cmath>

#include "base/error.h"
#include "quant/codec_impl.h"

namespace oscar {
namespace {

class TokenCodec final : public Codec {
 public:
  TokenCodec(const CodecSpec& spec, const LaneKernels& kernels)
      : spec_(spec), rule_(make_meta_rule(spec)), kernels_(&kernels) {
    // For unpacking a row counts as one group whose levels are the codes themselves.
    format_ = {{spec.head_dim, spec.head_dim, spec.bits, spec.meta, spec.order}, spec.group};
  }
  const CodecSpec& spec() const override { return spec_; }
  int token_block() const override { return spec_.group; }
  size_t bytes_per_block() const override { return format_.block_bytes(); }

  void encode(const float* rows, size_t row_stride, size_t num_blocks, uint8_t* out,
              EncodeStats* stats) const override {
    EncodeStats counted;
    const auto tokens = static_cast<size_t>(format_.tokens);
    for (size_t block = 0; block < num_blocks; ++block)
      encode_block(rows + block * tokens * row_stride, row_stride, block * tokens,
                   out + block * format_.block_bytes(), counted);
    counted.rows = num_blocks * tokens;
    if (stats != nullptr) stats->add(counted);
  }

  void decode(const uint8_t* encoded, size_t num_blocks, float* rows,
              size_t row_stride) const override {
    const int size = spec_.head_dim;
    std::vector<StoredPair> pairs(static_cast<size_t>(size));
    float codes_as_levels[16];
    for (int code = 0; code < 16; ++code) codes_as_levels[code] = static_cast<float>(code);
    for (size_t block = 0; block < num_blocks; ++block) {
      for (int d = 0; d < size; ++d)
        pairs[static_cast<size_t>(d)] = read_pair(rule_, encoded + format_.pair_offset(d));
      for (int token = 0; token < format_.tokens; ++token) {
        const uint8_t* codes = encoded + format_.codes_offset(token);
        if (spec_.bits == 8) {
          for (int d = 0; d < size; ++d) rows[d] = static_cast<float>(codes[d]);
        } else {
          kernels_->decode_row({.codes = codes,
                                .levels = codes_as_levels,
                                .head_dim = size,
                                .group = size,
                                .bits = spec_.bits,
                                .order = spec_.order,
                                .row = rows});
        }
        for (int d = 0; d < size; ++d)
          rows[d] = level(rule_, pairs[static_cast<size_t>(d)], static_cast<int>(rows[d]));
        rows += row_stride;
      }
      encoded += format_.block_bytes();
    }
  }

 private:
  void encode_block(const float* rows, size_t row_stride, size_t first_row, uint8_t* out,
                    EncodeStats& stats) const {
    const auto size = static_cast<size_t>(spec_.head_dim);
    const auto tokens = static_cast<size_t>(format_.tokens);
    std::vector<float> minimum(rows, rows + size), maximum(rows, rows + size);
    for (size_t token = 0; token < tokens; ++token) {
      const float* row = rows + token * row_stride;
      for (size_t d = 0; d < size; ++d) {
        OSCAR_CHECK(std::isfinite(row[d]), "codec: row ", first_row + token,
                    " holds a NaN or an infinity");
        minimum[d] = row[d] < minimum[d] ? row[d] : minimum[d];
        maximum[d] = row[d] > maximum[d] ? row[d] : maximum[d];
      }
    }
    std::vector<float> scale(size), low(size);
    for (size_t d = 0; d < size; ++d) {
      const StoredPair pair =
          choose_pair(minimum[d], maximum[d], first_row, scale[d], low[d], stats);
      write_pair(rule_, pair, out + format_.pair_offset(static_cast<int>(d)));
    }
    const auto top = static_cast<float>(rule_.max_code);
    for (size_t token = 0; token < tokens; ++token) {
      const float* row = rows + token * row_stride;
      uint8_t* bytes = out + format_.codes_offset(static_cast<int>(token));
      for (size_t j = 0; j < format_.row.code_bytes(); ++j) bytes[j] = 0;
      for (size_t d = 0; d < size; ++d) {
        const float position = (row[d] - low[d]) / scale[d] + 0.5F;
        const float clamped = position > 0.0F ? (position < top ? position : top) : 0.0F;
        const int dim = static_cast<int>(d);
        uint8_t& byte = bytes[format_.row.code_byte(dim)];
        byte =
            static_cast<uint8_t>(byte | (static_cast<int>(clamped) << format_.row.code_shift(dim)));
      }
    }
  }

  // The stored pair of a channel; scale and low choose the codes.
  StoredPair choose_pair(float minimum, float maximum, size_t first_row, float& scale, float& low,
                         EncodeStats& stats) const {
    const float range = maximum - minimum;
    scale = std::fmax(range, 1e-8F) / static_cast<float>(rule_.max_code);
    low = minimum;
    StoredPair pair = round_pair(rule_, scale, minimum, false);
    if (pair.saturated) ++stats.scale_saturated;
    if (!holds_constants(rule_.format) &&
        (range == 0.0F || pair.scale == 0.0F || !std::isfinite(pair.second))) {
      pair = constant_pair(rule_, minimum);
      scale = HUGE_VALF;
      ++stats.meta_fallbacks;
    } else if (codes_follow_stored(rule_.format)) {
      scale = pair.scale > 0.0F ? pair.scale : HUGE_VALF;
      low = low_of(rule_, pair);
    }
    OSCAR_CHECK(usable(pair) || pair.scale == 0.0F, "codec: rows from ", first_row, " (values ",
                minimum, " to ", maximum, " in one channel) do not fit the ",
                meta_bits(rule_.format), "-bit metadata");
    return pair;
  }

  CodecSpec spec_;
  MetaRule rule_;
  TokenBlockFormat format_{};
  const LaneKernels* kernels_;
};

}  // namespace

std::unique_ptr<Codec> make_token_codec(const CodecSpec& spec, const LaneKernels& kernels) {
  return std::make_unique<TokenCodec>(spec, kernels);
}

}  // namespace oscar
