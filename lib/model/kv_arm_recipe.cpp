#include "model/kv_arm_recipe.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>

#include "base/error.h"

namespace oscar {
namespace {

using Centering = SideRecipe::Centering;

void both(ArmRecipe& arm, const std::function<void(SideRecipe&)>& change) {
  change(arm.k);
  change(arm.v);
}

void set_rotation(ArmRecipe& arm, RotationKind kind) {
  both(arm, [kind](SideRecipe& side) { side.rotation = kind; });
}

void set_bits(ArmRecipe& arm, int bits) {
  both(arm, [bits](SideRecipe& side) { side.codec.bits = bits; });
}

// The published recipe: the bundle's rotations, order-statistic clip, round to nearest.
void oscar(ArmRecipe& arm) {
  set_rotation(arm, RotationKind::kBundle);
  both(arm, [](SideRecipe& side) { side.clip_from_bundle = true; });
}

// Error feedback in the bundle's metric, with the unbiased gain.
void use_feedback(SideRecipe& side, const FeedbackOptions& options) {
  side.codec.encoder = Encoder::kFeedback;
  side.codec.feedback = options;
  side.codec.gain = GainRule::kMetric;
  side.multipliers_where_decided = true;
  side.clip_from_bundle = false;  // the encoder has a start of its own
  side.codec.clip_ratio = 0.0;
  side.codec.clip_rule = ClipRule::kOrderStatistic;
}

void kivi(ArmRecipe& arm) {
  constexpr int kKiviGroup = 32;  // KIVI-2, published setting
  arm.k.codec.axis = GroupAxis::kTokens;
  both(arm, [](SideRecipe& side) {
    side.codec.group = kKiviGroup;
    side.codec.meta = MetaFormat::kScaleMinFp16;
  });
}

struct NamedRecipe {
  std::string name;
  std::function<void(ArmRecipe&)> apply;
};

const std::vector<NamedRecipe>& named_recipes() {
  static const std::vector<NamedRecipe> recipes = {
      {"bf16", [](ArmRecipe& arm) { arm.quantized = false; }},
      {"fp32",
       [](ArmRecipe& arm) {
         arm.quantized = false;
         arm.high_precision = HighPrecision::kFp32;
       }},
      {"naive", [](ArmRecipe& arm) { arm.windows.sink = arm.windows.recent = 0; }},
      {"naive-windows", [](ArmRecipe&) {}},
      {"quarot",
       [](ArmRecipe& arm) {
         set_rotation(arm, RotationKind::kHadamard);
         arm.windows.sink = arm.windows.recent = 0;
       }},
      {"hadamard",
       [](ArmRecipe& arm) {
         set_rotation(arm, RotationKind::kHadamard);
         arm.k.codec.clip_ratio = 0.96;
         arm.v.codec.clip_ratio = 0.92;
       }},
      {"kivi", kivi},
      {"int4",
       [](ArmRecipe& arm) {
         set_rotation(arm, RotationKind::kHadamard);
         set_bits(arm, 4);
       }},
      {"int8",
       [](ArmRecipe& arm) {
         set_rotation(arm, RotationKind::kHadamard);
         set_bits(arm, 8);
       }},
      {"oscar", oscar},
      {"oscar-centered",
       [](ArmRecipe& arm) {
         oscar(arm);
         arm.k.centering = Centering::kAlways;
       }},
      {"oscar-light",
       [](ArmRecipe& arm) {
         oscar(arm);
         arm.k.centering = Centering::kAlways;
         use_feedback(arm.k, {});
         arm.v.clip_from_bundle = false;
         arm.v.codec.clip_ratio = 0.92;
         arm.v.codec.gain = GainRule::kPlain;
       }},
      {"oscar-lean",
       [](ArmRecipe& arm) {
         oscar(arm);
         arm.k.centering = Centering::kAlways;
         arm.v.centering = Centering::kWhereDecided;
         both(arm, [](SideRecipe& side) { use_feedback(side, {}); });
       }},
      {"oscar-best",
       [](ArmRecipe& arm) {
         oscar(arm);
         arm.k.centering = Centering::kAlways;
         arm.v.centering = Centering::kWhereDecided;
         both(arm, [](SideRecipe& side) {
           use_feedback(side, best_feedback());
           side.log8_where_known = true;
         });
       }},
  };
  return recipes;
}

// A suffix on its way to the recipe: its key, its value and how to complain about it.
struct Suffix {
  std::string arm, text, key, value;

  [[noreturn]] void refuse(const std::string& expected) const {
    fail("arm ", arm, ": suffix \"", text, "\": expected ", expected);
  }
  double number(double low, double high) const {
    double result = 0.0;
    const char* end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, result);
    if (error != std::errc{} || stop != end || !(result >= low && result <= high)) {
      refuse(cat(key, "=number from ", low, " to ", high));
    }
    return result;
  }
  int integer(int low, int high) const {
    const double result = number(low, high);
    if (result != static_cast<int>(result)) refuse(cat(key, "=integer"));
    return static_cast<int>(result);
  }
};

MetaFormat parse_meta(const Suffix& suffix) {
  static const std::map<std::string, MetaFormat> formats = {
      {"fp16", MetaFormat::kScaleMinFp16},
      {"log8", MetaFormat::kLog8},
      {"symmetric", MetaFormat::kSymmetricFp16},
      {"scale-zero-fp32", MetaFormat::kScaleZeroFp32},
      {"scale-zero-bf16", MetaFormat::kScaleZeroBf16},
      {"scale-zero-fp16", MetaFormat::kScaleZeroFp16},
      {"vllm", MetaFormat::kScaleMinFp16First}};
  const auto found = formats.find(suffix.value);
  if (found == formats.end()) {
    suffix.refuse(
        "meta=fp16, log8, symmetric, scale-zero-fp32, scale-zero-bf16, scale-zero-fp16 or vllm");
  }
  return found->second;
}

// A number names a set for the clip start; factors may be listed.
std::vector<double> multipliers_of(const Suffix& suffix) {
  if (suffix.value.find_first_of("./") != std::string::npos) {
    const auto set = parse_multipliers(suffix.value);
    if (!set) suffix.refuse(suffix.key + "=factors from 0.1 to 10, such as 0.9/1/1.15");
    return *set;
  }
  switch (suffix.integer(1, 5)) {
    case 1:
      return {1.0};
    case 3:
      return {0.85, 1.15, 1.5};
    case 5:
      return FeedbackOptions{}.multipliers;
    default:
      suffix.refuse("multipliers=1, 3, 5 or a list such as 0.9/1/1.15");
  }
}

void set_clip(SideRecipe& side, double ratio, ClipRule rule) {
  side.clip_from_bundle = false;
  side.codec.clip_ratio = ratio;
  side.codec.clip_rule = rule;
}

using SideChange = std::function<void(SideRecipe&, const Suffix&)>;

const std::map<std::string, SideChange>& side_suffixes() {
  static const std::map<std::string, SideChange> table = {
      {"no-centering", [](SideRecipe& s, const Suffix&) { s.centering = Centering::kNever; }},
      {"centered", [](SideRecipe& s, const Suffix&) { s.centering = Centering::kAlways; }},
      {"position", [](SideRecipe& s, const Suffix&) { s.centering = Centering::kPosition; }},
      {"no-rotation", [](SideRecipe& s, const Suffix&) { s.rotation = RotationKind::kIdentity; }},
      {"h-only", [](SideRecipe& s, const Suffix&) { s.rotation = RotationKind::kHadamard; }},
      {"block-hadamard", [](SideRecipe& s, const Suffix&) { s.block_hadamard = true; }},
      {"rtn",
       [](SideRecipe& s, const Suffix&) {
         s.clip_from_bundle |=
             s.codec.encoder == Encoder::kFeedback && s.rotation == RotationKind::kBundle;
         s.codec.encoder = Encoder::kRtn;
       }},
      {"feedback",
       [](SideRecipe& s, const Suffix&) {
         s.codec.encoder = Encoder::kFeedback;
         set_clip(s, 0.0, ClipRule::kOrderStatistic);  // the encoder has a start of its own
       }},
      {"no-feedback", [](SideRecipe& s, const Suffix&) { s.codec.feedback.feedback = false; }},
      {"identity-metric", [](SideRecipe& s, const Suffix&) { s.identity_metric = true; }},
      {"damping", [](SideRecipe& s, const Suffix& x) { s.damping = x.number(0.0, 10.0); }},
      {"no-gain", [](SideRecipe& s, const Suffix&) { s.codec.gain = GainRule::kNone; }},
      {"plain-gain", [](SideRecipe& s, const Suffix&) { s.codec.gain = GainRule::kPlain; }},
      {"metric-gain", [](SideRecipe& s, const Suffix&) { s.codec.gain = GainRule::kMetric; }},
      {"grid-start",
       [](SideRecipe& s, const Suffix&) { s.codec.feedback.start = StartRange::kGrid; }},
      {"metric-grid-start",
       [](SideRecipe& s, const Suffix&) { s.codec.feedback.start = StartRange::kMetricGrid; }},
      {"clip-start",
       [](SideRecipe& s, const Suffix&) { s.codec.feedback.start = StartRange::kClip; }},
      {"sweeps",
       [](SideRecipe& s, const Suffix& x) { s.codec.feedback.sweeps = x.integer(0, 16); }},
      {"refits",
       [](SideRecipe& s, const Suffix& x) { s.codec.feedback.refits = x.integer(0, 16); }},
      {"refit-multipliers",
       [](SideRecipe& s, const Suffix& x) {
         s.codec.feedback.refit_multipliers = multipliers_of(x);
       }},
      {"multipliers",
       [](SideRecipe& s, const Suffix& x) {
         s.codec.feedback.multipliers = multipliers_of(x);
         s.multipliers_where_decided = false;
       }},
      {"trellis",
       [](SideRecipe& s, const Suffix&) {
         s.codec.levels = Levels::kTrellis;
         s.codec.feedback.start = StartRange::kClip;  // the only one it has
         s.codec.feedback.multipliers = FeedbackOptions{}.multipliers;
         s.multipliers_where_decided = false;
       }},
      {"no-clip",
       [](SideRecipe& s, const Suffix&) { set_clip(s, 0.0, ClipRule::kOrderStatistic); }},
      {"grid-clip", [](SideRecipe& s, const Suffix&) { set_clip(s, 0.0, ClipRule::kRangeGrid); }},
      {"clip", [](SideRecipe& s,
                  const Suffix& x) { set_clip(s, x.number(0.0, 1.0), ClipRule::kOrderStatistic); }},
      {"bits", [](SideRecipe& s, const Suffix& x) { s.codec.bits = x.integer(2, 8); }},
      {"group", [](SideRecipe& s, const Suffix& x) { s.codec.group = x.integer(4, 1 << 16); }},
      {"meta",
       [](SideRecipe& s, const Suffix& x) {
         s.codec.meta = parse_meta(x);
         s.log8_where_known = false;
       }},
  };
  return table;
}

using ArmChange = std::function<void(ArmRecipe&, const Suffix&)>;

const std::map<std::string, ArmChange>& arm_suffixes() {
  static const std::map<std::string, ArmChange> table = {
      {"no-v-centering",
       [](ArmRecipe& arm, const Suffix&) { arm.v.centering = Centering::kNever; }},
      {"no-windows",
       [](ArmRecipe& arm, const Suffix&) { arm.windows.sink = arm.windows.recent = 0; }},
      {"sink",
       [](ArmRecipe& arm, const Suffix& x) {
         arm.windows.sink = static_cast<size_t>(x.integer(0, 1 << 30));
       }},
      {"recent",
       [](ArmRecipe& arm, const Suffix& x) {
         arm.windows.recent = static_cast<size_t>(x.integer(0, 1 << 30));
       }},
      {"exact", [](ArmRecipe& arm, const Suffix&) { arm.windows.mode = WindowMode::kExact; }},
      {"serving", [](ArmRecipe& arm, const Suffix&) { arm.windows.mode = WindowMode::kServing; }},
      {"fp32-windows",
       [](ArmRecipe& arm, const Suffix&) { arm.high_precision = HighPrecision::kFp32; }},
  };
  return table;
}

void apply(ArmRecipe& arm, const std::string& arm_name, const std::string& text) {
  Suffix suffix{arm_name, text, text.substr(0, text.find('=')), ""};
  if (suffix.key.size() < text.size()) suffix.value = text.substr(suffix.key.size() + 1);
  bool on_k = true;
  bool on_v = true;
  if (suffix.key.starts_with("k.") || suffix.key.starts_with("v.")) {
    on_k = suffix.key[0] == 'k';
    on_v = !on_k;
    suffix.key = suffix.key.substr(2);
  }
  const auto side = side_suffixes().find(suffix.key);
  const auto whole = arm_suffixes().find(suffix.key);
  if (side != side_suffixes().end()) {
    if (!arm.quantized) suffix.refuse("no codec suffix on a reference arm");
    if (on_k) side->second(arm.k, suffix);
    if (on_v) side->second(arm.v, suffix);
  } else if (whole != arm_suffixes().end() && on_k && on_v) {
    whole->second(arm, suffix);
  } else {
    std::string known;
    for (const auto& [key, change] : side_suffixes()) known += key + " ";
    for (const auto& [key, change] : arm_suffixes()) known += key + " ";
    suffix.refuse("one of: " + known.substr(0, known.size() - 1));
  }
}

}  // namespace

bool ArmRecipe::needs_bundle() const {
  const auto side_needs = [](const SideRecipe& side) {
    return side.rotation == RotationKind::kBundle || side.centering != Centering::kNever ||
           side.clip_from_bundle || side.log8_where_known || side.codec.meta == MetaFormat::kLog8 ||
           (side.needs_metric() && !side.identity_metric);
  };
  return quantized && (side_needs(k) || side_needs(v));
}

ArmRecipe parse_arm(const std::string& name, const ArmOptions& options) {
  ArmRecipe arm;
  arm.windows = options.windows;
  both(arm, [&](SideRecipe& side) {
    side.codec.group = options.group;
    side.codec.meta = options.meta;
  });
  const std::string base = name.substr(0, name.find(':'));
  const std::vector<NamedRecipe>& recipes = named_recipes();
  const auto found = std::find_if(recipes.begin(), recipes.end(),
                                  [&](const NamedRecipe& recipe) { return recipe.name == base; });
  if (found == recipes.end()) {
    std::string known;
    for (const std::string& each : arm_names()) known += (known.empty() ? "" : ", ") + each;
    fail("arm ", name, ": unknown, expected one of ", known, " (with suffixes after colons)");
  }
  found->apply(arm);
  for (size_t begin = base.size(); begin < name.size();) {
    const size_t end = std::min(name.find(':', begin + 1), name.size());
    apply(arm, name, name.substr(begin + 1, end - begin - 1));
    begin = end;
  }
  OSCAR_CHECK(arm.v.centering != Centering::kPosition, "arm ", name,
              ": values have no position, expected k.position");
  return arm;
}

std::vector<std::string> arm_names() {
  std::vector<std::string> names;
  for (const NamedRecipe& recipe : named_recipes()) names.push_back(recipe.name);
  return names;
}

bool arm_needs_bundle(const std::string& name) { return parse_arm(name, {}).needs_bundle(); }

}  // namespace oscar
