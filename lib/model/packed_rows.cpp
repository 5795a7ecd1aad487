#include "model/packed_rows.h"

#include <algorithm>
#include <vector>

namespace oscar {

struct PackedRowReader::Metadata {
  std::vector<float> scale, second;  // [groups, kKeyBlock]
};

PackedRowReader::PackedRowReader(const Codec& codec) : codec_(&codec) {
  const CodecSpec& spec = codec.spec();
  const int group = spec.group == 0 ? spec.head_dim : spec.group;
  const AttentionKernels& kernels = attention_kernels();
  if (codec.token_block() != 1 || spec.axis != GroupAxis::kChannels || group <= 0) return;
  format_ = {spec.head_dim, group, spec.bits, spec.meta, spec.order};
  fast_ = spec.bits == 2 && spec.order == PackOrder::kConsecutive &&
          spec.levels == Levels::kUniform && group % 16 == 0 && spec.head_dim % group == 0 &&
          format_.row_bytes() == codec.bytes_per_block() && kernels.dequantize_rows != nullptr;
  if (fast_) rule_ = make_meta_rule(spec);
}

PackedRows PackedRowReader::expand(const uint8_t* bytes, size_t num_rows,
                                   Metadata& metadata) const {
  const auto groups = static_cast<size_t>(format_.num_groups());
  const size_t row_bytes = format_.row_bytes();
  metadata.scale.resize(groups * kKeyBlock);
  metadata.second.resize(groups * kKeyBlock);
  const bool halves = format_.meta == MetaFormat::kScaleMinFp16 ||
                      format_.meta == MetaFormat::kScaleMinFp16First ||
                      format_.meta == MetaFormat::kScaleZeroFp16;
  for (size_t g = 0; g < groups; ++g) {
    const uint8_t* pairs = bytes + format_.pair_offset(static_cast<int>(g));
    float* scale = metadata.scale.data() + g * kKeyBlock;
    float* second = metadata.second.data() + g * kKeyBlock;
    if (halves) {
      attention_kernels().expand_half_pairs(pairs, row_bytes, num_rows, scale, second);
      continue;
    }
    for (size_t r = 0; r < num_rows; ++r) {
      const StoredPair pair = read_pair(rule_, pairs + r * row_bytes);
      scale[r] = pair.scale;
      second[r] = pair.second;
    }
  }
  return {.bytes = bytes,
          .row_bytes = row_bytes,
          .num_rows = num_rows,
          .head_dim = static_cast<size_t>(format_.head_dim),
          .group = static_cast<size_t>(format_.group),
          .scale = metadata.scale.data(),
          .second = metadata.second.data(),
          .has_zero = rule_.has_zero};
}

void PackedRowReader::rows(const uint8_t* bytes, size_t num_blocks, float* out,
                           size_t out_stride) const {
  if (!fast_) return codec_->decode(bytes, num_blocks, out, out_stride);
  thread_local Metadata metadata;
  for (size_t first = 0; first < num_blocks; first += kKeyBlock) {
    const size_t count = std::min(kKeyBlock, num_blocks - first);
    attention_kernels().dequantize_rows(
        expand(bytes + first * format_.row_bytes(), count, metadata), out + first * out_stride,
        out_stride);
  }
}

void PackedRowReader::panel(const uint8_t* bytes, size_t num_rows, float* panel,
                            size_t column) const {
  thread_local Metadata metadata;
  attention_kernels().dequantize_panel(expand(bytes, num_rows, metadata), panel, column);
}

}  // namespace oscar
