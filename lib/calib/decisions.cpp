#include <algorithm>
#include <cmath>
#include <memory>

#include "base/error.h"
#include "base/parallel.h"
#include "calib/layer_fit.h"
#include "linalg/eigen.h"
#include "model/rope.h"

namespace oscar {
namespace {

// A rotation is exchanged for another one only when it is at least this much better and the
// difference exceeds its standard error: every exchange costs the shared rotation.
constexpr double kWorthwhile = 0.01;
constexpr double kScaleMargin = 2.0;  // log-8: s_max = twice the largest scale seen

struct Candidate {
  std::string name;
  StoredForm form;
};

// One side's outcome for a head.
struct Outcome {
  HeadDecision decision;
  const float* rotation = nullptr;
  bool centered = false;
  bool by_position = false;  // keys: position-aware centering does better than the mean
  double largest_scale = 0.0;
  std::vector<double> multipliers;  // of the start range; empty = no feedback encoder
};

struct Paired {
  double difference = 0.0, standard_error = 0.0;
};
Paired paired(const std::vector<double>& a, const std::vector<double>& b, double energy) {
  Paired result;
  double sum_sq = 0.0;
  const auto n = static_cast<double>(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = energy > 0.0 ? (a[i] - b[i]) / energy : 0.0;
    result.difference += difference;
    sum_sq += difference * difference;
  }
  const double spread = std::max(0.0, sum_sq - result.difference * result.difference / n);
  result.standard_error = n > 1.0 ? std::sqrt(spread * n / (n - 1.0)) : 0.0;
  return result;
}

std::shared_ptr<const EncoderMetric> encoder_metric(const TensorF& metric, size_t head,
                                                    const float* rotation) {
  const size_t dim = metric.extent(1);
  TensorD m({dim, dim});
  std::copy_n(metric.at(head), dim * dim, m.values.begin());
  return std::make_shared<EncoderMetric>(
      make_encoder_metric(congruence(m, rotation).data(), static_cast<int>(dim)));
}

class HeadDecider {
 public:
  HeadDecider(const DecisionInputs& inputs, const BundleLayer& layer, size_t head)
      : inputs_(inputs),
        layer_(layer),
        head_(head),
        contest_(*inputs.contest, *inputs.energy, head) {}

  Outcome keys() const {
    const float* mean = layer_.k_mean.empty() ? nullptr : layer_.k_mean.at(head_);
    std::vector<Candidate> candidates;
    for (const auto& [name, rotation] : rotations(true))
      candidates.push_back({name, form(true, rotation, mean)});
    Outcome outcome = choose(candidates, errors_of(candidates, true, {}), 0, true, mean);
    if (!layer_.k_position_mean.empty()) compare_with_position(outcome);
    return outcome;
  }

  // First between means under the layer's own rotation (lowest error: the wrong choice is expensive
  // either way), as far as the recipe leaves the choice; then between rotations of that kind.
  Outcome values() const {
    const float* mean = inputs_.v_mean.at(head_);
    const auto all = rotations(false);
    std::vector<Candidate> candidates;
    const auto add = [&](size_t rotation, bool centered) {
      candidates.push_back({all[rotation].first + (centered ? "+mean" : ""),
                            form(false, all[rotation].second, centered ? mean : nullptr)});
    };
    const ValueCentering centering = inputs_.recipe->value_centering;
    if (centering != ValueCentering::kAlways) add(0, false);
    if (centering != ValueCentering::kNever) add(0, true);
    std::vector<ContestError> errors = errors_of(candidates, false, {});
    const size_t start = errors.size() == 2 && errors[1].sum() < errors[0].sum() ? 1 : 0;
    const bool centered = candidates[start].form.mean != nullptr;
    for (size_t rotation = 1; rotation < all.size(); ++rotation) add(rotation, centered);
    errors = errors_of(candidates, false, std::move(errors));
    return choose(candidates, errors, start, false, nullptr);
  }

 private:
  std::vector<std::pair<std::string, const float*>> rotations(bool keys) const {
    const TensorF& base = keys ? layer_.k_rotation : layer_.v_rotation;
    const bool shared = base.extent(0) == 1;
    std::vector<std::pair<std::string, const float*>> result{
        {shared ? "shared" : "per-head", base.at(shared ? 0 : head_)}};
    for (const RotationCandidate& candidate : inputs_.rotations) {
      const TensorF& rotation = keys ? candidate.k : candidate.v;
      result.emplace_back(candidate.name, rotation.at(rotation.extent(0) == 1 ? 0 : head_));
    }
    return result;
  }

  StoredForm form(bool keys, const float* rotation, const float* mean) const {
    const int dim = static_cast<int>(inputs_.contest->geometry.head_dim);
    StoredForm result{
        .rotation = rotation, .mean = mean, .codec = contest_codec(*inputs_.recipe, keys, dim)};
    if (result.codec.encoder == Encoder::kFeedback)
      result.metric = encoder_metric(keys ? layer_.k_metric : layer_.v_metric, head_, rotation);
    return result;
  }

  ContestError error(bool keys, const StoredForm& stored) const {
    return keys ? contest_.key_error(stored) : contest_.value_error(stored);
  }

  // The errors of all candidates, the first of them already known.
  std::vector<ContestError> errors_of(const std::vector<Candidate>& candidates, bool keys,
                                      std::vector<ContestError> known) const {
    for (size_t i = known.size(); i < candidates.size(); ++i)
      known.push_back(error(keys, candidates[i].form));
    return known;
  }

  Outcome choose(const std::vector<Candidate>& candidates, const std::vector<ContestError>& errors,
                 size_t start, bool keys, const float* mean) const {
    Outcome outcome;
    HeadDecision& decision = outcome.decision;
    const double energy = contest_.output_energy();
    for (size_t i = 0; i < candidates.size(); ++i) {
      const Paired difference = paired(errors[i].per_query, errors[0].per_query, energy);
      decision.entries.push_back({candidates[i].name, energy > 0.0 ? errors[i].sum() / energy : 0.0,
                                  difference.difference, difference.standard_error});
    }
    decision.chosen = best_of(candidates, errors, start, energy);
    const Candidate& chosen = candidates[decision.chosen];
    outcome.rotation = chosen.form.rotation;
    outcome.centered = !keys && chosen.form.mean != nullptr;
    StoredForm stored = chosen.form;
    stored.codec = arm_codec(*inputs_.recipe, keys, stored.codec.head_dim);
    const ContestError final_error = choose_multipliers(stored, keys, energy, outcome);
    outcome.largest_scale = final_error.largest_scale;
    compare_with_centered(final_error, keys, mean, energy, decision);
    return outcome;
  }

  // The best candidate with the mean of `start`: another rotation must be worth it.
  static size_t best_of(const std::vector<Candidate>& candidates,
                        const std::vector<ContestError>& errors, size_t start, double energy) {
    size_t best = start;
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (candidates[i].form.mean != candidates[start].form.mean) continue;
      const Paired difference = paired(errors[i].per_query, errors[start].per_query, energy);
      const bool worthwhile = errors[i].sum() < (1.0 - kWorthwhile) * errors[start].sum() &&
                              -difference.difference > difference.standard_error;
      if (worthwhile && errors[i].sum() < errors[best].sum()) best = i;
    }
    return best;
  }

  // The arm's encoder, and the same with each set of multipliers that competes.
  ContestError choose_multipliers(StoredForm& stored, bool keys, double energy,
                                  Outcome& outcome) const {
    ContestError best = error(keys, stored);
    if (stored.codec.encoder != Encoder::kFeedback) return best;
    outcome.multipliers = stored.codec.feedback.multipliers;
    if (inputs_.recipe->multiplier_sets.empty()) return best;
    HeadDecision& decision = outcome.decision;
    const ContestError own = best;
    const auto add = [&](const ContestError& measured, const Paired& difference) {
      decision.multipliers.push_back({multipliers_text(stored.codec.feedback.multipliers),
                                      energy > 0.0 ? measured.sum() / energy : 0.0,
                                      difference.difference, difference.standard_error});
    };
    add(own, {});
    for (const std::vector<double>& set : inputs_.recipe->multiplier_sets) {
      stored.codec.feedback.multipliers = set;
      const ContestError measured = error(keys, stored);
      const Paired difference = paired(measured.per_query, own.per_query, energy);
      add(measured, difference);
      const bool worthwhile = measured.sum() < (1.0 - kWorthwhile) * own.sum() &&
                              -difference.difference > difference.standard_error;
      if (!worthwhile || measured.sum() >= best.sum()) continue;
      best = measured;
      outcome.multipliers = set;
      decision.chosen_multipliers = decision.multipliers.size() - 1;
    }
    return best;
  }

  // The recipe `centered` on the same rows: shared rotation, round to nearest, clip.
  void compare_with_centered(const ContestError& chosen, bool keys, const float* mean,
                             double energy, HeadDecision& decision) const {
    const TensorF& rotation = keys ? layer_.k_rotation : layer_.v_rotation;
    StoredForm plain{.rotation = rotation.at(rotation.extent(0) == 1 ? 0 : head_), .mean = mean};
    plain.codec.clip_ratio = keys ? layer_.k_clip : layer_.v_clip;
    const ContestError reference = error(keys, plain);
    const Paired difference = paired(chosen.per_query, reference.per_query, energy);
    decision.error = energy > 0.0 ? chosen.sum() / energy : 0.0;
    decision.centered_error = energy > 0.0 ? reference.sum() / energy : 0.0;
    decision.centered_difference = difference.difference;
    decision.centered_se = difference.standard_error;
  }

  // Position-aware centering under the chosen rotation; log-8 constants must hold for both.
  void compare_with_position(Outcome& outcome) const {
    const size_t dim = inputs_.contest->geometry.head_dim, tokens = inputs_.contest->num_tokens;
    std::vector<float> rows;
    for (size_t t = 0; t < tokens; ++t)
      rows.insert(rows.end(), layer_.k_position_mean.at(head_),
                  layer_.k_position_mean.at(head_) + dim);
    apply_rope(*inputs_.rope, {.rows = rows.data(),
                               .num_tokens = tokens,
                               .num_heads = 1,
                               .head_dim = dim,
                               .token_stride = dim});
    StoredForm stored = form(true, outcome.rotation, layer_.k_position_offset.at(head_));
    stored.position_rows = rows.data();
    const ContestError position = error(true, stored);
    const double energy = contest_.output_energy();
    outcome.decision.position_error = energy > 0.0 ? position.sum() / energy : 0.0;
    outcome.by_position =
        outcome.decision.position_error < outcome.decision.entries[outcome.decision.chosen].error;
    if (outcome.by_position)
      outcome.largest_scale = std::max(outcome.largest_scale, position.largest_scale);
  }

  const DecisionInputs& inputs_;
  const BundleLayer& layer_;
  size_t head_;
  HeadContest contest_;
};

// The chosen rotations: still shared when every head kept the shared one.
void store_rotations(const std::vector<Outcome>& outcomes, TensorF& rotation) {
  const bool kept = std::all_of(outcomes.begin(), outcomes.end(), [&](const Outcome& outcome) {
    return outcome.rotation == rotation.at(0);
  });
  if (kept && rotation.extent(0) == 1) return;
  const size_t dim = rotation.extent(1);
  TensorF chosen({outcomes.size(), dim, dim});
  for (size_t h = 0; h < outcomes.size(); ++h)
    std::copy_n(outcomes[h].rotation, dim * dim, chosen.at(h));
  rotation = std::move(chosen);
}

TensorF scale_constants(const std::vector<Outcome>& outcomes) {
  TensorF constants({outcomes.size()});
  for (size_t h = 0; h < outcomes.size(); ++h) {
    const double largest = outcomes[h].largest_scale;
    constants.values[h] = static_cast<float>(kScaleMargin * (largest > 0.0 ? largest : 1.0));
  }
  return constants;
}

// The heads' sets [Hkv, n], padded with zeros; empty when every head keeps the arm's.
TensorF multiplier_sets(const std::vector<Outcome>& outcomes) {
  size_t longest = 0;
  bool any_other = false;
  for (const Outcome& outcome : outcomes) {
    longest = std::max(longest, outcome.multipliers.size());
    any_other |= outcome.decision.chosen_multipliers > 0;
  }
  if (!any_other) return {};
  TensorF sets({outcomes.size(), longest}, 0.0F);
  for (size_t h = 0; h < outcomes.size(); ++h)
    std::transform(outcomes[h].multipliers.begin(), outcomes[h].multipliers.end(), sets.at(h),
                   [](double factor) { return static_cast<float>(factor); });
  return sets;
}

}  // namespace

LayerComparison minus_centered(const std::vector<HeadDecision>& decisions) {
  LayerComparison comparison;
  const auto heads = static_cast<double>(decisions.size());
  double variance = 0.0;
  for (const HeadDecision& decision : decisions) {
    comparison.difference += decision.centered_difference / heads;
    variance += decision.centered_se * decision.centered_se / (heads * heads);
  }
  comparison.standard_error = std::sqrt(variance);
  return comparison;
}

LayerComparison sum(const LayerComparison& keys, const LayerComparison& values) {
  return {keys.difference + values.difference,
          std::hypot(keys.standard_error, values.standard_error)};
}

void decide_by_contest(const DecisionInputs& inputs, BundleLayer& layer, LayerReport& report) {
  const size_t heads = inputs.contest->geometry.num_kv_heads;
  std::vector<Outcome> k(heads), v(heads);
  std::vector<std::unique_ptr<const HeadDecider>> deciders(heads);
  parallel_for(heads, [&](size_t head) {
    deciders[head] = std::make_unique<const HeadDecider>(inputs, layer, head);
  });
  parallel_for(2 * heads, [&](size_t item) {
    const size_t head = item / 2;
    if (item % 2 == 0)
      k[head] = deciders[head]->keys();
    else
      v[head] = deciders[head]->values();
  });
  TensorF v_mean(inputs.v_mean.shape, 0.0F);
  bool any_centered = false;
  for (size_t h = 0; h < heads; ++h) {
    if (v[h].centered) {
      std::copy_n(inputs.v_mean.at(h), inputs.v_mean.extent(1), v_mean.at(h));
      any_centered = true;
    }
    if (!layer.k_position_mean.empty() && !k[h].by_position) {
      const size_t dim = layer.k_mean.extent(1);
      std::fill_n(layer.k_position_mean.at(h), dim, 0.0F);
      std::copy_n(layer.k_mean.at(h), dim, layer.k_position_offset.at(h));
    }
    report.k_decisions.push_back(k[h].decision);
    report.v_decisions.push_back(v[h].decision);
  }
  if (any_centered) layer.v_mean = std::move(v_mean);
  if (inputs.recipe->log8) {
    layer.k_scale_max = scale_constants(k);
    layer.v_scale_max = scale_constants(v);
  }
  layer.k_multipliers = multiplier_sets(k);
  layer.v_multipliers = multiplier_sets(v);
  store_rotations(k, layer.k_rotation);
  store_rotations(v, layer.v_rotation);
}

}  // namespace oscar
