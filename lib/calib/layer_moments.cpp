#include "calib/layer_moments.h"

#include <algorithm>

#include "base/error.h"

namespace oscar {
namespace {

// Heads [h] of one kind as a tensor [h, D, D]; empty when no head has rows.
Moment stack(const std::vector<const GramSum*>& heads) {
  Moment moment;
  if (heads.empty() || heads[0]->count() == 0.0) return moment;
  const size_t dim = heads[0]->dim();
  moment.sum = TensorD({heads.size(), dim, dim});
  moment.count = heads[0]->count();
  for (size_t h = 0; h < heads.size(); ++h) {
    const TensorD sum = heads[h]->sum();
    std::copy(sum.values.begin(), sum.values.end(), moment.sum.at(h));
  }
  return moment;
}

Moment stack(const std::vector<GramSum>& heads) {
  std::vector<const GramSum*> pointers;
  for (const GramSum& head : heads) pointers.push_back(&head);
  return stack(pointers);
}

Moment stack(const LayerStatistics& statistics, GramSum HeadStatistics::*kind) {
  std::vector<const GramSum*> pointers;
  for (size_t h = 0; h < statistics.geometry().num_kv_heads; ++h)
    pointers.push_back(&(statistics.head(h).*kind));
  return stack(pointers);
}

Moment stack(const LayerStatistics& statistics, RowSum HeadStatistics::*kind) {
  Moment moment;
  const HeadGeometry& geometry = statistics.geometry();
  moment.count = (statistics.head(0).*kind).count();
  if (moment.count == 0.0) return moment;
  moment.sum = TensorD({geometry.num_kv_heads, geometry.head_dim});
  for (size_t h = 0; h < geometry.num_kv_heads; ++h) {
    const std::vector<double>& sum = (statistics.head(h).*kind).sum();
    std::copy(sum.begin(), sum.end(), moment.sum.at(h));
  }
  return moment;
}

// The sum of the RoPE table's rows, padded to D, once for every head.
Moment stack_rope(const LayerStatistics& statistics) {
  Moment moment;
  const HeadGeometry& geometry = statistics.geometry();
  const RowSum& rows = statistics.rope_rows();
  moment.count = rows.count();
  if (moment.count == 0.0) return moment;
  moment.sum = TensorD({geometry.num_kv_heads, geometry.head_dim});
  for (size_t h = 0; h < geometry.num_kv_heads; ++h)
    std::copy(rows.sum().begin(), rows.sum().end(), moment.sum.at(h));
  return moment;
}

TensorF rows_of(const std::vector<float>& values, size_t tokens, size_t heads, size_t dim) {
  TensorF rows({tokens, heads, dim});
  OSCAR_CHECK(rows.size() == values.size(), "moments: rows of ", tokens, " tokens have ",
              values.size(), " values");
  rows.values = values;
  return rows;
}

// Head h of a stored sum; null when the kind is absent.
const Moment* find(const MomentsLayer& moments, const char* name) {
  const auto found = moments.sums.find(name);
  return found == moments.sums.end() || found->second.sum.empty() ? nullptr : &found->second;
}

GramSum gram_of(const Moment& moment, size_t head, double count) {
  const size_t dim = moment.sum.extent(1);
  TensorD sum({dim, dim});
  std::copy_n(moment.sum.at(head), dim * dim, sum.values.begin());
  return GramSum::from(sum, count);
}

std::vector<GramSum> grams_of(const Moment* moment) {
  std::vector<GramSum> grams;
  if (moment == nullptr) return grams;
  for (size_t h = 0; h < moment->sum.extent(0); ++h)
    grams.push_back(gram_of(*moment, h, moment->count));
  return grams;
}

void restore_statistics(const MomentsLayer& moments, LayerStatistics& statistics) {
  if (const Moment* rope = find(moments, "rope_sum");
      rope != nullptr && statistics.rope() != nullptr)
    statistics.restore_rope_rows(RowSum::from(
        {rope->sum.at(0), rope->sum.at(0) + statistics.rope()->rotary_dim}, rope->count));
  const std::pair<const char*, GramSum HeadStatistics::*> grams[] = {
      {"queries", &HeadStatistics::queries},
      {"keys", &HeadStatistics::keys},
      {"values", &HeadStatistics::values},
      {"outputs", &HeadStatistics::outputs}};
  const std::pair<const char*, RowSum HeadStatistics::*> sums[] = {
      {"key_sum", &HeadStatistics::key_mean},
      {"value_sum", &HeadStatistics::value_mean},
      {"key_position_sum", &HeadStatistics::key_position_mean}};
  for (size_t h = 0; h < statistics.geometry().num_kv_heads; ++h) {
    for (const auto& [name, kind] : grams)
      if (const Moment* moment = find(moments, name))
        statistics.head(h).*kind = gram_of(*moment, h, moment->count);
    for (const auto& [name, kind] : sums)
      if (const Moment* moment = find(moments, name))
        statistics.head(h).*kind = RowSum::from(
            {moment->sum.at(h), moment->sum.at(h) + moment->sum.extent(1)}, moment->count);
  }
}

}  // namespace

MomentsLayer to_moments(const LayerMoments& layer) {
  MomentsLayer result;
  const HeadGeometry& geometry = layer.calibration.geometry();
  const size_t heads = geometry.num_kv_heads, dim = geometry.head_dim;
  const auto store = [&](const char* name, Moment moment) {
    if (!moment.sum.empty()) result.sums.emplace(name, std::move(moment));
  };
  store("queries", stack(layer.calibration, &HeadStatistics::queries));
  store("keys", stack(layer.calibration, &HeadStatistics::keys));
  store("values", stack(layer.calibration, &HeadStatistics::values));
  store("outputs", stack(layer.calibration, &HeadStatistics::outputs));
  store("key_sum", stack(layer.calibration, &HeadStatistics::key_mean));
  store("value_sum", stack(layer.calibration, &HeadStatistics::value_mean));
  store("key_position_sum", stack(layer.calibration, &HeadStatistics::key_position_mean));
  if (layer.calibration.has_position_means()) store("rope_sum", stack_rope(layer.calibration));
  store("logit_metric", stack(layer.metrics.logit_sums()));
  store("output_metric", stack(layer.metrics.output_sums()));
  store("held_out_queries", stack(layer.held_out_queries));
  if (!layer.proxy.empty()) {
    Moment proxy = stack(layer.proxy);
    proxy.count = layer.calibration.tokens();
    result.weight_sums = TensorD({heads});
    for (size_t h = 0; h < heads; ++h) result.weight_sums.values[h] = layer.proxy[h].count();
    store("proxy", std::move(proxy));
  }
  if (layer.energy != nullptr) {
    result.output_energy = TensorD({layer.energy->size(), dim, dim});
    for (size_t h = 0; h < layer.energy->size(); ++h)
      std::copy((*layer.energy)[h].values.begin(), (*layer.energy)[h].values.end(),
                result.output_energy.at(h));
  }
  if (layer.held_out && layer.held_out->num_tokens > 0) {
    const HeldOutSample& sample = *layer.held_out;
    result.rows.emplace("held_out_k", rows_of(sample.k, sample.num_tokens, heads, dim));
    result.rows.emplace("held_out_v", rows_of(sample.v, sample.num_tokens, heads, dim));
  }
  if (layer.contest && layer.contest->num_tokens > 0) {
    const ContestData& contest = *layer.contest;
    const size_t queries = contest.query_tokens.size();
    result.rows.emplace("contest_k", rows_of(contest.k, contest.num_tokens, heads, dim));
    result.rows.emplace("contest_v", rows_of(contest.v, contest.num_tokens, heads, dim));
    result.rows.emplace("contest_q", rows_of(contest.q, queries, geometry.num_heads, dim));
    result.contest_tokens = Tensor<int64_t>({queries});
    for (size_t i = 0; i < queries; ++i)
      result.contest_tokens.values[i] = static_cast<int64_t>(contest.query_tokens[i]);
  }
  return result;
}

LayerMoments from_moments(const MomentsLayer& moments, const HeadGeometry& geometry,
                          const ContestOptions& windows, std::shared_ptr<const RopeTable> rope) {
  if (find(moments, "rope_sum") == nullptr) rope = nullptr;
  LayerMoments layer;
  layer.calibration = LayerStatistics(geometry, {.outputs = find(moments, "outputs") != nullptr,
                                                 .mean_from_position = windows.sink,
                                                 .rope = rope});
  restore_statistics(moments, layer.calibration);
  layer.held_out_queries = grams_of(find(moments, "held_out_queries"));
  if (layer.held_out_queries.empty())
    layer.held_out_queries.assign(geometry.num_kv_heads, GramSum(geometry.head_dim));
  layer.metrics = LayerMetrics::from(geometry, {.sink = windows.sink, .recent = windows.recent},
                                     grams_of(find(moments, "logit_metric")),
                                     grams_of(find(moments, "output_metric")));
  if (const Moment* proxy = find(moments, "proxy"))
    for (size_t h = 0; h < geometry.num_kv_heads; ++h)
      layer.proxy.push_back(gram_of(*proxy, h, moments.weight_sums.values[h]));
  if (!moments.output_energy.empty()) {
    auto energy = std::make_shared<OutputEnergy>();
    for (size_t h = 0; h < moments.output_energy.extent(0); ++h)
      energy->push_back(gram_of({moments.output_energy, 0.0}, h, 1.0).sum());
    layer.energy = std::move(energy);
  }
  const auto rows = [&](const char* name) { return moments.rows.find(name); };
  const auto end = moments.rows.end();
  if (rows("held_out_k") != end)
    layer.held_out = {rows("held_out_k")->second.extent(0), rows("held_out_k")->second.values,
                      rows("held_out_v")->second.values};
  if (rows("contest_k") != end) {
    ContestData contest;
    contest.geometry = geometry;
    contest.options = windows;
    contest.num_tokens = rows("contest_k")->second.extent(0);
    contest.k = rows("contest_k")->second.values;
    contest.v = rows("contest_v")->second.values;
    contest.q = rows("contest_q")->second.values;
    for (const int64_t token : moments.contest_tokens.values)
      contest.query_tokens.push_back(static_cast<size_t>(token));
    layer.contest = std::move(contest);
  }
  return layer;
}

}  // namespace oscar
