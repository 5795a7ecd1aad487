#include "eval/arm_summary.h"

#include <algorithm>

#include "base/error.h"
#include "quant/byte_accounting.h"

namespace oscar {
namespace {

double high_precision_bits(const KvArm& arm) {
  return arm.high_precision == HighPrecision::kFp32 ? 32.0 : 16.0;
}

double side_bits(const KvArm& arm, const SideArm& side, size_t tokens) {
  double bits = 0;
  for (const auto& codec : side.codecs) {
    const size_t quantized =
        quantized_tokens(arm.windows, tokens, static_cast<size_t>(codec->token_block()));
    bits += (static_cast<double>(tokens - quantized) * high_precision_bits(arm) +
             static_cast<double>(quantized) * nominal_bits(codec->spec())) /
            static_cast<double>(tokens);
  }
  return bits / static_cast<double>(side.codecs.size());
}

std::string encoder_name(const CodecSpec& spec) {
  std::string name = spec.encoder == Encoder::kFeedback ? "feedback" : "rtn";
  if (spec.levels != Levels::kUniform) name += "+lloyd";
  if (spec.gain == GainRule::kPlain) name += "+gain";
  if (spec.gain == GainRule::kMetric) name += "+metric-gain";
  return name;
}

}  // namespace

size_t quantized_tokens(const WindowSpec& windows, size_t tokens, size_t token_block) {
  if (tokens <= windows.sink) return 0;
  return quantized_end(windows, tokens - 1, token_block) - windows.sink;
}

double bits_per_element(const KvArm& arm, size_t tokens) {
  OSCAR_CHECK(tokens > 0, "bits per element: the cache is empty");
  if (!arm.quantized) return high_precision_bits(arm);
  double bits = 0;
  for (const LayerArm& layer : arm.layers) {
    const Codec &k = layer.k.codec(0), &v = layer.v.codec(0);
    if (k.token_block() == 1 && v.token_block() == 1) {
      CacheFormat format = cache_format(k.spec(), v.spec(), arm.windows.sink, arm.windows.recent);
      format.high_bits = static_cast<int>(high_precision_bits(arm));
      bits += nominal_bits_per_element(format, tokens);
      continue;
    }
    // Blocks of tokens: an incomplete block waits in high precision.
    bits += (side_bits(arm, layer.k, tokens) + side_bits(arm, layer.v, tokens)) / 2;
  }
  return bits / static_cast<double>(arm.layers.size());
}

ArmSummary summarize(const KvArm& arm) {
  ArmSummary summary;
  summary.name = arm.name;
  summary.quantized = arm.quantized;
  summary.windows = arm.windows;
  summary.bits_nominal = arm.quantized ? arm.bits_nominal : high_precision_bits(arm);
  summary.bundle_sha256 = arm.bundle_sha256;
  summary.codec = arm.high_precision == HighPrecision::kFp32 ? "fp32" : "bf16";
  if (!arm.quantized || arm.layers.empty()) return summary;
  const CodecSpec& k = arm.layers[0].k.codec(0).spec();
  const CodecSpec& v = arm.layers[0].v.codec(0).spec();
  summary.codec = cat("int", k.bits);
  const auto group = [](const CodecSpec& spec) {
    const std::string count = std::to_string(spec.group == 0 ? spec.head_dim : spec.group);
    return spec.axis == GroupAxis::kTokens ? count + " tokens" : count;
  };
  summary.group = group(k) == group(v) ? group(k) : group(k) + " / " + group(v);
  summary.meta_bits = meta_bits(k.meta);
  summary.clip_k = k.clip_ratio;
  summary.clip_v = v.clip_ratio;
  summary.encoder_k = encoder_name(k);
  summary.encoder_v = encoder_name(v);
  for (const LayerArm& layer : arm.layers) {
    summary.centered_k =
        summary.centered_k || !layer.k.mean.empty() || !layer.k.position_mean.empty();
    summary.centered_v = summary.centered_v || !layer.v.mean.empty();
  }
  return summary;
}

std::string to_string(const WindowSpec& windows) { return cat(windows.sink, "/", windows.recent); }

std::string mode_name(WindowMode mode) { return mode == WindowMode::kExact ? "exact" : "serving"; }

}  // namespace oscar
