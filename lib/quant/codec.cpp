// Row codec: batches of rows through the encoders, packing, decoding.
#include "quant/codec.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "quant/codec_impl.h"

namespace oscar {
namespace {

// Code bytes of all lanes, [byte][lane].
template <int kLanes>
void pack_lanes(const RowFormat& format, const uint8_t* codes, uint8_t* packed) {
  const int per_byte = format.codes_per_byte();
  const int bytes = static_cast<int>(format.code_bytes());
  const bool consecutive = format.order == PackOrder::kConsecutive;
  const int step = consecutive ? 1 : format.head_dim / per_byte;
  for (int j = 0; j < bytes; ++j) {
    const uint8_t* first = codes + (consecutive ? j * per_byte : j) * kLanes;
    uint8_t* out = packed + j * kLanes;
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = first[lane];
    for (int n = 1; n < per_byte; ++n)
      for (int lane = 0; lane < kLanes; ++lane)
        out[lane] = static_cast<uint8_t>(out[lane] |
                                         (first[n * step * kLanes + lane] << (n * format.bits)));
  }
}

class RowCodec final : public Codec {
 public:
  RowCodec(const CodecSpec& spec, std::shared_ptr<const EncoderMetric> metric,
           const LaneKernels& kernels) {
    encoder_.spec = spec;
    if (spec.group == 0) encoder_.spec.group = spec.head_dim;
    encoder_.format = {spec.head_dim, encoder_.spec.group, spec.bits, spec.meta, spec.order};
    encoder_.rule = make_meta_rule(spec);
    encoder_.kernels = &kernels;
    encoder_.metric = std::move(metric);
    if (encoder_.metric != nullptr) {
      const bool sweeps = spec.encoder == Encoder::kFeedback && spec.feedback.sweeps > 0;
      encoder_.panels = make_metric_panels(*encoder_.metric, sweeps);
    }
  }
  const CodecSpec& spec() const override { return encoder_.spec; }
  int token_block() const override { return 1; }
  size_t bytes_per_block() const override { return encoder_.format.row_bytes(); }

  void encode(const float* rows, size_t row_stride, size_t num_blocks, uint8_t* out,
              EncodeStats* stats) const override {
    static thread_local RowBatch batch;
    EncodeStats counted;
    counted.rows = num_blocks;
    batch.resize(encoder_);
    batch.stats = &counted;
    batch.row_stride = row_stride;
    const auto lanes = static_cast<size_t>(encoder_.kernels->lanes);
    for (size_t first = 0; first < num_blocks; first += lanes) {
      batch.first_row = first;
      batch.count = static_cast<int>(std::min(lanes, num_blocks - first));
      batch.period = period_of(batch.count);
      batch.rows = rows + first * row_stride;
      encode_batch(batch);
      write_batch(batch, out + first * encoder_.format.row_bytes());
    }
    if (stats != nullptr) stats->add(counted);
  }

  void decode(const uint8_t* encoded, size_t num_blocks, float* rows,
              size_t row_stride) const override {
    const RowFormat& format = encoder_.format;
    if (format.bits == 8) return decode_bytes(encoded, num_blocks, rows, row_stride);
    const auto num_levels = static_cast<size_t>(format.max_code() + 1);
    const auto groups = static_cast<size_t>(format.num_groups());
    float few[64];
    std::vector<float> many(groups * num_levels > 64 ? groups * num_levels : 0);
    float* levels = many.empty() ? few : many.data();
    DecodeArgs args{.codes = encoded,
                    .levels = levels,
                    .head_dim = format.head_dim,
                    .group = format.group,
                    .bits = format.bits,
                    .order = format.order,
                    .row = rows};
    for (size_t block = 0; block < num_blocks; ++block) {
      for (size_t g = 0; g < groups; ++g) {
        const StoredPair pair =
            read_pair(encoder_.rule, args.codes + format.pair_offset(static_cast<int>(g)));
        for (size_t code = 0; code < num_levels; ++code)
          levels[g * num_levels + code] = level(encoder_.rule, pair, static_cast<int>(code));
      }
      encoder_.kernels->decode_row(args);
      args.codes += format.row_bytes();
      args.row += row_stride;
    }
  }

 private:
  // A few rows alone would leave most lanes idle: encoders that try candidates repeat them.
  int period_of(int count) const {
    int period = encoder_.kernels->lanes;
    while (tries_candidates(encoder_.spec) && count <= period / 2) period /= 2;
    return period;
  }

  void encode_batch(RowBatch& batch) const {
    const CodecSpec& spec = encoder_.spec;
    const int bad = encoder_.kernels->load_rows(batch.rows, batch.row_stride, batch.count,
                                                batch.period, spec.head_dim, batch.x.data());
    OSCAR_CHECK(bad < 0, "codec: row ", batch.first_row + static_cast<size_t>(bad),
                " holds a NaN or an infinity");
    if (spec.encoder == Encoder::kFeedback) {
      encode_feedback(encoder_, batch);
    } else if (spec.levels != Levels::kUniform) {
      encode_lloyd(encoder_, batch);
    } else {
      encode_rtn(encoder_, batch);
    }
    if (spec.gain != GainRule::kNone) fold_gain(encoder_, batch);
  }

  void write_batch(RowBatch& batch, uint8_t* out) const {
    const RowFormat& format = encoder_.format;
    const auto lanes = static_cast<size_t>(encoder_.kernels->lanes);
    uint8_t* packed = batch.packed.data();
    if (lanes == 16) {
      pack_lanes<16>(format, batch.codes.data(), packed);
    } else if (lanes == 8) {
      pack_lanes<8>(format, batch.codes.data(), packed);
    } else {
      pack_lanes<1>(format, batch.codes.data(), packed);
    }
    for (size_t row = 0; row < static_cast<size_t>(batch.count); ++row) {
      uint8_t* bytes = out + row * format.row_bytes();
      for (size_t j = 0; j < format.code_bytes(); ++j) bytes[j] = packed[j * lanes + row];
      for (int g = 0; g < format.num_groups(); ++g)
        write_pair(encoder_.rule, batch.pairs[static_cast<size_t>(g) * lanes + row],
                   bytes + format.pair_offset(g));
    }
  }

  // 8 bits: a byte is a code, in either pack order; too many levels for a table.
  void decode_bytes(const uint8_t* encoded, size_t num_blocks, float* rows,
                    size_t row_stride) const {
    const RowFormat& format = encoder_.format;
    const auto group = static_cast<size_t>(format.group);
    for (size_t block = 0; block < num_blocks; ++block) {
      for (size_t g = 0; g < static_cast<size_t>(format.num_groups()); ++g) {
        const StoredPair pair =
            read_pair(encoder_.rule, encoded + format.pair_offset(static_cast<int>(g)));
        const uint8_t* codes = encoded + g * group;
        float* values = rows + g * group;
        if (encoder_.rule.has_zero) {
          for (size_t d = 0; d < group; ++d)
            values[d] = (static_cast<float>(codes[d]) - pair.second) * pair.scale;
        } else {
          for (size_t d = 0; d < group; ++d)
            values[d] = static_cast<float>(codes[d]) * pair.scale + pair.second;
        }
      }
      encoded += format.row_bytes();
      rows += row_stride;
    }
  }

  RowEncoder encoder_{};
};

}  // namespace

void RowBatch::resize(const RowEncoder& encoder) {
  const auto lanes = static_cast<size_t>(encoder.kernels->lanes);
  const auto size = static_cast<size_t>(encoder.spec.head_dim);
  const auto groups = static_cast<size_t>(encoder.format.num_groups());
  x.resize(size * lanes);
  y.resize(size * lanes);
  codes.resize(size * lanes);
  packed.resize(encoder.format.code_bytes() * lanes);
  row_scratch.resize(2 * size);
  pairs.resize(groups * lanes);
  for (auto* values : {&minimum, &maximum, &scale, &low}) values->resize(groups * lanes);
  for (auto* values : {&threshold, &best_cost, &best_scale, &best_low, &products[0], &products[1],
                       &products[2], &products[3], &products[4]})
    values->resize(lanes);
  best_index.resize(lanes);
  if (!tries_candidates(encoder.spec)) return;
  const FeedbackOptions& options = encoder.spec.feedback;
  const size_t candidates =
      std::max({options.multipliers.size(), options.refit_multipliers.size(), size_t{36}});
  error.resize(size * lanes * kMaxCandidatesAtOnce);
  trial.resize(size * lanes * kMaxCandidatesAtOnce);
  candidate_scale.resize(candidates * lanes);
  candidate_low.resize(candidates * lanes);
  candidate_pairs.resize(candidates * lanes);
}

std::unique_ptr<Codec> make_codec_with(const CodecSpec& spec,
                                       std::shared_ptr<const EncoderMetric> metric,
                                       const LaneKernels& kernels) {
  check(spec);
  if (spec.axis == GroupAxis::kTokens) return make_token_codec(spec, kernels);
  const bool needed = spec.encoder == Encoder::kFeedback || spec.gain == GainRule::kMetric;
  if (!needed) return std::make_unique<RowCodec>(spec, nullptr, kernels);
  OSCAR_CHECK(metric != nullptr, "codec: the ",
              spec.encoder == Encoder::kFeedback ? "feedback encoder" : "metric gain",
              " needs a metric, got none");
  const auto size = static_cast<size_t>(spec.head_dim);
  OSCAR_CHECK(metric->head_dim == spec.head_dim && metric->a.size() == size * size &&
                  metric->l.size() == size * size && metric->pivot.size() == size,
              "codec: metric of head_dim ", metric->head_dim, " (", metric->l.size(),
              " entries) does not fit head_dim ", spec.head_dim);
  if (spec.levels == Levels::kTrellis) return make_trellis_codec(spec, std::move(metric));
  return std::make_unique<RowCodec>(spec, std::move(metric), kernels);
}

std::unique_ptr<Codec> make_codec(const CodecSpec& spec,
                                  std::shared_ptr<const EncoderMetric> metric) {
  return make_codec_with(spec, std::move(metric), lane_kernels());
}

}  // namespace oscar
