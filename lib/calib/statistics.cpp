#include "calib/statistics.h"

#include <algorithm>

#include "base/error.h"
#include "base/parallel.h"

namespace oscar {

RowBlock group_rows(const HeadGeometry& geometry, const float* q, size_t kv_head, size_t begin,
                    size_t end) {
  const size_t group = geometry.group_size(), dim = geometry.head_dim;
  const size_t stride = geometry.num_heads * dim;
  return {q + begin * stride + kv_head * group * dim, end - begin, stride, group};
}

RowBlock head_rows(const HeadGeometry& geometry, const float* k, size_t kv_head, size_t begin,
                   size_t end) {
  const size_t dim = geometry.head_dim, stride = geometry.num_kv_heads * dim;
  return {k + begin * stride + kv_head * dim, end - begin, stride, 1};
}

LayerStatistics::LayerStatistics(const HeadGeometry& geometry, const StatisticsOptions& options)
    : geometry_(geometry), options_(options) {
  const size_t dim = geometry.head_dim;
  for (size_t h = 0; h < geometry.num_kv_heads; ++h)
    heads_.push_back({GramSum(dim), GramSum(dim), GramSum(dim), GramSum(dim), RowSum(dim),
                      RowSum(dim), RowSum(dim)});
  if (options_.rope != nullptr) rope_rows_ = RowSum(options_.rope->rotary_dim);
}

void LayerStatistics::add(const LayerActivations& activations, size_t begin, size_t end) {
  OSCAR_CHECK(begin <= end && end <= activations.num_tokens, "statistics of tokens [", begin, ", ",
              end, ") of ", activations.num_tokens);
  OSCAR_CHECK(!options_.outputs || activations.o != nullptr, "layer ", activations.layer,
              ": the exact value covariance needs attention outputs");
  const size_t first_mean_position =
      std::max(options_.mean_from_position, activations.first_position) -
      activations.first_position;
  const size_t mean_begin = std::clamp(first_mean_position, begin, end);
  if (options_.rope != nullptr) add_rope_rows(activations.first_position, mean_begin, end);
  // Work items by kind, the heavy ones (query groups) first.
  const size_t num_heads = geometry_.num_kv_heads;
  enum Kind : size_t { kQueries, kOutputs, kKeys, kValues, kNumKinds };
  parallel_for(kNumKinds * num_heads, [&](size_t item) {
    const size_t h = item % num_heads;
    HeadStatistics& head = heads_[h];
    switch (static_cast<Kind>(item / num_heads)) {
      case kQueries:
        head.queries.add(group_rows(geometry_, activations.q, h, begin, end));
        break;
      case kOutputs:
        if (options_.outputs) head.outputs.add(group_rows(geometry_, activations.o, h, begin, end));
        break;
      case kKeys:
        head.keys.add(head_rows(geometry_, activations.k, h, begin, end));
        head.key_mean.add(head_rows(geometry_, activations.k, h, mean_begin, end));
        if (options_.rope != nullptr) add_position_mean(activations, h, mean_begin, end);
        break;
      case kValues:
        head.values.add(head_rows(geometry_, activations.v, h, begin, end));
        head.value_mean.add(head_rows(geometry_, activations.v, h, mean_begin, end));
        break;
      case kNumKinds:
        break;
    }
  });
}

void LayerStatistics::add_position_mean(const LayerActivations& activations, size_t kv_head,
                                        size_t begin, size_t end) {
  const size_t dim = geometry_.head_dim, count = end - begin;
  const RowBlock rows = head_rows(geometry_, activations.k, kv_head, begin, end);
  thread_local std::vector<float> turned;
  turned.resize(count * dim);
  for (size_t t = 0; t < count; ++t)
    std::copy_n(rows.rows + t * rows.token_stride, dim, turned.data() + t * dim);
  undo_rope(*options_.rope, {.rows = turned.data(),
                             .num_tokens = count,
                             .num_heads = 1,
                             .head_dim = dim,
                             .token_stride = dim,
                             .first_position = activations.first_position + begin});
  heads_[kv_head].key_position_mean.add({turned.data(), count, dim, 1});
}

void LayerStatistics::add_rope_rows(size_t first_position, size_t begin, size_t end) {
  const RopeTable& table = *options_.rope;
  const size_t half = table.rotary_dim / 2;
  OSCAR_CHECK(table.first_position == 0 && first_position + end <= table.num_positions,
              "statistics: position ", first_position + end, " is outside the RoPE table");
  std::vector<float> row(table.rotary_dim);
  for (size_t t = begin; t < end; ++t) {
    const size_t at = (first_position + t) * half;
    std::copy_n(table.cos.data() + at, half, row.data());
    std::copy_n(table.sin.data() + at, half, row.data() + half);
    rope_rows_.add({row.data(), 1, table.rotary_dim, 1});
  }
}

double LayerStatistics::rope_energy() const {
  const double cos = static_cast<double>(options_.rope->cos.at(0));
  const double sin = static_cast<double>(options_.rope->sin.at(0));
  return cos * cos + sin * sin;
}

void LayerStatistics::merge(const LayerStatistics& other) {
  OSCAR_CHECK(heads_.size() == other.heads_.size(), "cannot merge statistics of ", heads_.size(),
              " and ", other.heads_.size(), " KV heads");
  if (options_.rope != nullptr) rope_rows_.merge(other.rope_rows_);
  for (size_t h = 0; h < heads_.size(); ++h) {
    heads_[h].queries.merge(other.heads_[h].queries);
    heads_[h].keys.merge(other.heads_[h].keys);
    heads_[h].values.merge(other.heads_[h].values);
    heads_[h].outputs.merge(other.heads_[h].outputs);
    heads_[h].key_mean.merge(other.heads_[h].key_mean);
    heads_[h].value_mean.merge(other.heads_[h].value_mean);
    heads_[h].key_position_mean.merge(other.heads_[h].key_position_mean);
  }
}

double LayerStatistics::tokens() const { return heads_.empty() ? 0.0 : heads_[0].keys.count(); }

TensorD LayerStatistics::mean_over_heads(GramSum HeadStatistics::*kind) const {
  TensorD mean({geometry_.head_dim, geometry_.head_dim});
  for (const HeadStatistics& head : heads_) {
    const TensorD of_head = (head.*kind).mean();
    for (size_t i = 0; i < mean.size(); ++i) mean.values[i] += of_head.values[i];
  }
  for (double& value : mean.values) value /= static_cast<double>(heads_.size());
  return mean;
}

}  // namespace oscar
