// Checks of a codec specification and its nominal size.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "quant/codec.h"

namespace oscar {
namespace {

void check_multipliers(const char* name, const std::vector<double>& multipliers) {
  OSCAR_CHECK(!multipliers.empty() && multipliers.size() <= 64, "codec: feedback.", name,
              " must name 1 to 64 factors, got ", multipliers.size());
  for (const double factor : multipliers)
    OSCAR_CHECK(factor > 0.0 && factor < 100.0, "codec: feedback.", name,
                " must be in (0, 100), got ", factor);
}

void check_feedback(const CodecSpec& spec) {
  const FeedbackOptions& options = spec.feedback;
  OSCAR_CHECK(spec.group == 0 || spec.group == spec.head_dim,
              "codec: the feedback encoder needs one group per row, got group ", spec.group,
              " at head_dim ", spec.head_dim);
  OSCAR_CHECK(spec.clip_ratio == 0.0,
              "codec: clip_ratio belongs to the rtn encoder (the feedback encoder starts at "
              "feedback.start_clip), expected 0, got ",
              spec.clip_ratio);
  OSCAR_CHECK(options.start_clip > 0.0 && options.start_clip <= 1.0,
              "codec: feedback.start_clip must be in (0, 1], got ", options.start_clip);
  check_multipliers("multipliers", options.multipliers);
  check_multipliers("refit_multipliers", options.refit_multipliers);
  OSCAR_CHECK(options.sweeps >= 0 && options.sweeps <= 100,
              "codec: feedback.sweeps must be 0 to 100, got ", options.sweeps);
  OSCAR_CHECK(options.refits >= 0 && options.refits <= 100,
              "codec: feedback.refits must be 0 to 100, got ", options.refits);
}

void check_range_grid(const CodecSpec& spec) {
  OSCAR_CHECK(spec.encoder == Encoder::kRtn && spec.levels == Levels::kUniform,
              "codec: the range grid as clip rule needs the rtn encoder and uniform levels (the "
              "feedback encoder has feedback.start)");
  OSCAR_CHECK(spec.clip_ratio == 0.0, "codec: the range grid has no clip ratio, expected 0, got ",
              spec.clip_ratio);
  OSCAR_CHECK(spec.group == 0 || spec.group == spec.head_dim,
              "codec: the range grid needs one group per row, got group ", spec.group,
              " at head_dim ", spec.head_dim);
}

void check_token_axis(const CodecSpec& spec) {
  OSCAR_CHECK(spec.group >= 1, "codec: groups over tokens need group >= 1 token, got ", spec.group);
  OSCAR_CHECK(spec.clip_ratio == 0.0 && spec.clip_rule != ClipRule::kRangeGrid,
              "codec: groups over tokens have no clip, got clip_ratio ", spec.clip_ratio);
  OSCAR_CHECK(spec.gain == GainRule::kNone && spec.encoder == Encoder::kRtn &&
                  spec.levels == Levels::kUniform,
              "codec: groups over tokens need the rtn encoder, uniform levels and no gain");
}

}  // namespace

FeedbackOptions best_feedback() {
  FeedbackOptions options;
  options.start = StartRange::kGrid;
  options.multipliers = {0.9, 1.0, 1.1, 1.22};
  options.refits = 1;
  options.sweeps = 2;
  return options;
}

void check(const CodecSpec& spec) {
  OSCAR_CHECK(spec.bits == 2 || spec.bits == 4 || spec.bits == 8,
              "codec: bits must be 2, 4 or 8, got ", spec.bits);
  OSCAR_CHECK(spec.head_dim >= 4 && spec.head_dim % 4 == 0 && spec.head_dim <= 4096,
              "codec: head_dim must be a multiple of 4 in [4, 4096], got ", spec.head_dim);
  OSCAR_CHECK(spec.clip_ratio >= 0.0 && spec.clip_ratio <= 1.0,
              "codec: clip_ratio must be in [0, 1], got ", spec.clip_ratio);
  if (spec.meta == MetaFormat::kLog8)
    OSCAR_CHECK(spec.log8_scale_max > 0.0F && std::isfinite(spec.log8_scale_max) &&
                    spec.log8_scale_max >= 1e-30F,
                "codec: log8 metadata need a positive finite log8_scale_max, got ",
                spec.log8_scale_max);
  if (spec.axis == GroupAxis::kTokens) {
    check_token_axis(spec);
    return;
  }
  OSCAR_CHECK(spec.group >= 0 && (spec.group == 0 || spec.head_dim % spec.group == 0),
              "codec: group must divide head_dim ", spec.head_dim, ", got ", spec.group);
  if (spec.encoder == Encoder::kFeedback) check_feedback(spec);
  if (spec.clip_rule == ClipRule::kRangeGrid) check_range_grid(spec);
  if (spec.levels == Levels::kTrellis) {
    OSCAR_CHECK(spec.bits == 2 && spec.encoder == Encoder::kFeedback,
                "codec: the trellis needs 2 bits and the feedback encoder, got bits ", spec.bits);
    OSCAR_CHECK(spec.feedback.sweeps == 0 && spec.feedback.feedback &&
                    spec.feedback.start == StartRange::kClip,
                "codec: the trellis has no sweeps, no grid start and always feeds the error back");
  } else if (spec.levels != Levels::kUniform) {
    OSCAR_CHECK(spec.bits == 2, "codec: Lloyd-Max levels need 2 bits, got ", spec.bits);
    OSCAR_CHECK(spec.group == 0 || spec.group == spec.head_dim,
                "codec: Lloyd-Max levels need one group per row, got group ", spec.group,
                " at head_dim ", spec.head_dim);
    OSCAR_CHECK(spec.encoder == Encoder::kRtn, "codec: Lloyd-Max levels need the rtn encoder");
    OSCAR_CHECK(spec.meta != MetaFormat::kLog8, "codec: Lloyd-Max levels cannot use log8 metadata");
  }
}

double nominal_bits(const CodecSpec& spec) {
  const int group = spec.group == 0 ? spec.head_dim : spec.group;
  return static_cast<double>(spec.bits) +
         static_cast<double>(meta_values(spec.meta) * meta_bits(spec.meta)) / group;
}

std::optional<std::vector<double>> parse_multipliers(const std::string& text) {
  std::vector<double> multipliers;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('/', begin), text.size());
    double factor = 0.0;
    const auto [stop, error] = std::from_chars(text.data() + begin, text.data() + end, factor);
    if (error != std::errc{} || stop != text.data() + end || !(factor >= 0.1 && factor <= 10.0))
      return std::nullopt;
    multipliers.push_back(factor);
    begin = end + 1;
  }
  return multipliers;
}

std::string multipliers_text(const std::vector<double>& multipliers) {
  std::string text;
  for (const double factor : multipliers) text += cat(text.empty() ? "" : "/", factor);
  return text;
}

std::string describe(const EncodeStats& stats) {
  std::string text;
  const auto add = [&](size_t count, const char* what) {
    if (count == 0) return;
    text += cat(text.empty() ? "" : ", ", count, " of ", stats.rows, " rows ", what);
  };
  add(stats.gain_clamped, "with the gain at its clamp");
  add(stats.scale_saturated, "with a scale above the largest one stored");
  add(stats.meta_fallbacks, "stored as constants");
  return text;
}

}  // namespace oscar
