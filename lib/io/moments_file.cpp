#include "io/moments_file.h"

#include <algorithm>
#include <cmath>

#include "io/hdf5_file.h"
#include "io/layer_names.h"
#include "io/output_path.h"

namespace oscar {
namespace {

constexpr const char* kFormat = "oscar-moments";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxExtent = 1 << 20;

struct SumName {
  const char* name;
  bool matrix;  // [h, D, D], else [h, D]
};
constexpr SumName kSums[] = {
    {"queries", true},           {"keys", true},      {"values", true},
    {"outputs", true},           {"key_sum", false},  {"value_sum", false},
    {"key_position_sum", false}, {"rope_sum", false}, {"logit_metric", true},
    {"output_metric", true},     {"proxy", true},     {"held_out_queries", true}};
struct RowsName {
  const char* name;
  bool query_heads;  // [n, h G, D], else [n, h, D]
};
constexpr RowsName kRows[] = {{"held_out_k", false}, {"held_out_v", false}, {"contest_k", false},
                              {"contest_v", false},  {"contest_q", true},   {"rows_k", false},
                              {"rows_v", false}};

size_t query_heads(const MomentsInfo& info) {
  return static_cast<size_t>(info.local_kv_heads * (info.num_heads / info.num_kv_heads));
}

void write_info(Hdf5File& file, const MomentsInfo& info) {
  const std::pair<const char*, const std::string*> texts[] = {
      {"model_architecture", &info.model_architecture},
      {"model_sha256", &info.model_sha256},
      {"tokenizer_sha256", &info.tokenizer_sha256},
      {"text_sha256", &info.text_sha256},
      {"tool_version", &info.tool_version},
      {"options", &info.options_json},
      {"compute", &info.compute},
      {"output_projection", &info.output_projection},
      {"rope", &info.rope_json}};
  const std::pair<const char*, int64_t> numbers[] = {
      {"format_version", kVersion},
      {"head_dim", info.head_dim},
      {"num_layers", info.num_layers},
      {"num_heads", info.num_heads},
      {"num_kv_heads", info.num_kv_heads},
      {"first_kv_head", info.first_kv_head},
      {"local_kv_heads", info.local_kv_heads},
      {"sink", info.sink},
      {"recent", info.recent},
      {"sequences_complete", info.sequences_complete}};
  file.write_attribute("/", "format", std::string(kFormat));
  for (const auto& [name, text] : texts) file.write_attribute("/", name, *text);
  if (!info.collected.empty()) file.write_attribute("/", "collected", info.collected);
  if (!info.rows_checksum.empty()) file.write_attribute("/", "rows_checksum", info.rows_checksum);
  for (const auto& [name, number] : numbers) file.write_attribute("/", name, number);
  file.write_attribute("/", "rope_theta", info.rope_theta);
  file.write_attribute("/", "proxy_approximate",
                       static_cast<int64_t>(info.proxy_approximate ? 1 : 0));
  Tensor<int64_t> sequences({info.sequences.size(), 4});
  for (size_t s = 0; s < info.sequences.size(); ++s) {
    const MomentsSequence& sequence = info.sequences[s];
    int64_t* row = sequences.at(s);
    row[0] = sequence.text;
    row[1] = sequence.first_token;
    row[2] = sequence.tokens;
    row[3] = sequence.calibration_tokens;
  }
  file.write("/sequences", sequences);
  if (info.token_fingerprints.empty()) return;
  Tensor<int64_t> fingerprints({info.token_fingerprints.size()});
  fingerprints.values = info.token_fingerprints;
  file.write("/token_fingerprints", fingerprints);
}

void check_geometry(const MomentsInfo& info, const std::string& path) {
  const bool possible = info.head_dim > 0 && info.head_dim <= kMaxExtent && info.num_heads > 0 &&
                        info.num_heads <= kMaxExtent && info.num_kv_heads > 0 &&
                        info.num_heads % info.num_kv_heads == 0;
  OSCAR_CHECK(possible, path, ": impossible geometry: head_dim ", info.head_dim, ", num_heads ",
              info.num_heads, ", num_kv_heads ", info.num_kv_heads);
  OSCAR_CHECK(
      info.first_kv_head >= 0 && info.first_kv_head < info.num_kv_heads &&
          info.local_kv_heads > 0 && info.local_kv_heads <= info.num_kv_heads - info.first_kv_head,
      path, ": KV heads ", info.first_kv_head, " .. ", info.first_kv_head + info.local_kv_heads - 1,
      " of a model that has ", info.num_kv_heads);
  OSCAR_CHECK(info.sequences_complete >= 0 &&
                  info.sequences_complete <= static_cast<int64_t>(info.sequences.size()),
              path, ": sequences_complete is ", info.sequences_complete, ", the file has ",
              info.sequences.size(), " sequences");
}

MomentsInfo read_info(const Hdf5File& file) {
  MomentsInfo info;
  const std::pair<const char*, std::string*> texts[] = {
      {"model_architecture", &info.model_architecture},
      {"model_sha256", &info.model_sha256},
      {"tokenizer_sha256", &info.tokenizer_sha256},
      {"text_sha256", &info.text_sha256},
      {"tool_version", &info.tool_version},
      {"options", &info.options_json},
      {"compute", &info.compute},
      {"output_projection", &info.output_projection},
      {"rope", &info.rope_json}};
  const std::pair<const char*, int64_t*> numbers[] = {
      {"head_dim", &info.head_dim},
      {"num_layers", &info.num_layers},
      {"num_heads", &info.num_heads},
      {"num_kv_heads", &info.num_kv_heads},
      {"first_kv_head", &info.first_kv_head},
      {"local_kv_heads", &info.local_kv_heads},
      {"sink", &info.sink},
      {"recent", &info.recent},
      {"sequences_complete", &info.sequences_complete}};
  for (const auto& [name, text] : texts) *text = file.string_attribute("/", name);
  for (const auto& [name, text] :
       {std::pair{"collected", &info.collected}, std::pair{"rows_checksum", &info.rows_checksum}})
    if (file.has_attribute("/", name)) *text = file.string_attribute("/", name);
  for (const auto& [name, number] : numbers) {
    *number = file.int_attribute("/", name);
    OSCAR_CHECK(*number >= 0, file.path(), ": attribute ", name, " is negative: ", *number);
  }
  info.rope_theta = file.double_attribute("/", "rope_theta");
  info.proxy_approximate = file.int_attribute("/", "proxy_approximate") != 0;
  const auto sequences = file.read<int64_t>("/sequences", 2);
  OSCAR_CHECK(sequences.extent(1) == 4, file.path(), ": /sequences: expected 4 columns, got ",
              sequences.extent(1));
  for (size_t s = 0; s < sequences.extent(0); ++s) {
    const int64_t* row = sequences.at(s);
    OSCAR_CHECK(row[0] >= 0 && row[1] >= -1 && row[2] > 0 && row[2] <= kMaxExtent * kMaxExtent &&
                    row[3] >= 0 && row[3] <= row[2],
                file.path(), ": /sequences: impossible row ", s, ": ", row[0], ", ", row[1], ", ",
                row[2], ", ", row[3]);
    info.sequences.push_back({row[0], row[1], row[2], row[3]});
  }
  if (file.exists("/token_fingerprints"))
    info.token_fingerprints = file.read<int64_t>("/token_fingerprints", 1).values;
  OSCAR_CHECK(std::is_sorted(info.token_fingerprints.begin(), info.token_fingerprints.end()),
              file.path(), ": /token_fingerprints are not in ascending order");
  check_geometry(info, file.path());
  return info;
}

template <class T>
Tensor<T> read_checked(const Hdf5File& file, const std::string& name, size_t heads_axis,
                       Shape expected) {
  const Shape found = file.checked_shape(name, Hdf5TypeOf<T>::value, expected.size());
  if (heads_axis > 0) expected[0] = found[0];  // rows: any number of tokens
  OSCAR_CHECK(found == expected && found[0] > 0, file.path(), ": ", name, ": expected shape ",
              to_string(expected), ", got ", to_string(found));
  Tensor<T> tensor = file.read<T>(name, expected.size());
  for (size_t i = 0; i < tensor.size(); ++i) {
    if (std::isfinite(static_cast<double>(tensor.values[i]))) continue;
    const size_t per_head = heads_axis == 0 ? tensor.size() / found[0] : expected.back();
    const size_t head = heads_axis == 0 ? i / per_head : i / per_head % found[1];
    fail(file.path(), ": ", name, ": non-finite value in head ", head);
  }
  return tensor;
}

void require_together(const MomentsLayer& layer, const std::string& place) {
  const auto rows = [&](const char* name) {
    const auto found = layer.rows.find(name);
    return found == layer.rows.end() ? size_t{0} : found->second.extent(0);
  };
  for (const auto& [k, v] : {std::pair{"held_out_k", "held_out_v"},
                             std::pair{"contest_k", "contest_v"}, std::pair{"rows_k", "rows_v"}})
    OSCAR_CHECK(rows(k) == rows(v), place, ": ", k, " has ", rows(k), " tokens, ", v, " ", rows(v));
  OSCAR_CHECK(rows("contest_q") == layer.contest_tokens.size(), place, ": contest_q has ",
              rows("contest_q"), " tokens, contest_tokens ", layer.contest_tokens.size());
  int64_t previous = -1;
  for (const int64_t token : layer.contest_tokens.values) {
    OSCAR_CHECK(token > previous && token < static_cast<int64_t>(rows("contest_k")), place,
                ": contest_tokens: ", token, " is out of order or outside the ", rows("contest_k"),
                " tokens");
    previous = token;
  }
  OSCAR_CHECK((layer.sums.count("proxy") > 0) == !layer.weight_sums.empty(), place,
              ": proxy and weight_sums belong together");
}

}  // namespace

int64_t MomentsInfo::calibration_tokens() const {
  int64_t tokens = 0;
  for (const MomentsSequence& sequence : sequences) tokens += sequence.calibration_tokens;
  return tokens;
}

int64_t MomentsInfo::held_out_tokens() const {
  int64_t tokens = 0;
  for (const MomentsSequence& sequence : sequences)
    tokens += sequence.tokens - sequence.calibration_tokens;
  return tokens;
}

int64_t MomentsInfo::longest_sequence() const {
  int64_t longest = 0;
  for (const MomentsSequence& sequence : sequences) longest = std::max(longest, sequence.tokens);
  return longest;
}

struct MomentsWriter::State {
  OutputPath output;
  Hdf5File file;
  explicit State(const std::string& path)
      : output(path), file(Hdf5File::create(output.temporary())) {}
};

MomentsWriter::MomentsWriter(const std::string& path, const MomentsInfo& info)
    : state_(std::make_unique<State>(path)) {
  write_info(state_->file, info);
  state_->file.create_group("/layers");
}

MomentsWriter::~MomentsWriter() = default;

void MomentsWriter::write(int64_t layer, const MomentsLayer& moments) {
  Hdf5File& file = state_->file;
  const std::string group = layer_group(layer);
  file.create_group(group);
  for (const auto& [name, moment] : moments.sums) {
    if (moment.sum.empty()) continue;
    file.write(group + "/" + name, moment.sum);
    file.write_attribute(group + "/" + name, "count", moment.count);
  }
  for (const auto& [name, rows] : moments.rows)
    if (!rows.empty()) file.write(group + "/" + name, rows);
  if (!moments.output_energy.empty()) file.write(group + "/output_energy", moments.output_energy);
  if (!moments.weight_sums.empty()) file.write(group + "/weight_sums", moments.weight_sums);
  if (!moments.contest_tokens.empty())
    file.write(group + "/contest_tokens", moments.contest_tokens);
}

void MomentsWriter::finish() {
  state_->file.close();
  state_->output.commit();
}

struct MomentsReader::State {
  Hdf5File file;
  MomentsInfo info;
  std::vector<int64_t> layers;
  explicit State(const std::string& path) : file(Hdf5File::open(path)) {
    require_format(file, kFormat, kVersion);
    info = read_info(file);
    layers = layer_ids(file);
    OSCAR_CHECK(!layers.empty(), path, ": no layers");
    OSCAR_CHECK(layers.back() < info.num_layers, path, ": layer ", layers.back(), " in a model of ",
                info.num_layers, " layers");
  }
};

MomentsReader::MomentsReader(const std::string& path) : state_(std::make_unique<State>(path)) {}
MomentsReader::~MomentsReader() = default;
const std::string& MomentsReader::path() const { return state_->file.path(); }
const MomentsInfo& MomentsReader::info() const { return state_->info; }
const std::vector<int64_t>& MomentsReader::layers() const { return state_->layers; }

MomentsLayer MomentsReader::read(int64_t layer) const {
  const Hdf5File& file = state_->file;
  const MomentsInfo& info = state_->info;
  const std::string group = layer_group(layer) + "/";
  const auto heads = static_cast<size_t>(info.local_kv_heads);
  const auto dim = static_cast<size_t>(info.head_dim);
  MomentsLayer result;
  for (const SumName& sum : kSums) {
    const std::string name = group + sum.name;
    if (!file.exists(name)) continue;
    Moment moment;
    moment.sum = read_checked<double>(file, name, 0,
                                      sum.matrix ? Shape{heads, dim, dim} : Shape{heads, dim});
    moment.count = file.double_attribute(name, "count");
    OSCAR_CHECK(moment.count >= 0.0 && std::isfinite(moment.count), file.path(), ": ", name,
                ": count is ", moment.count);
    result.sums.emplace(sum.name, std::move(moment));
  }
  for (const RowsName& rows : kRows) {
    const std::string name = group + rows.name;
    if (file.exists(name))
      result.rows.emplace(
          rows.name, read_checked<float>(file, name, 1,
                                         {0, rows.query_heads ? query_heads(info) : heads, dim}));
  }
  if (file.exists(group + "output_energy"))
    result.output_energy =
        read_checked<double>(file, group + "output_energy", 0, {query_heads(info), dim, dim});
  if (file.exists(group + "weight_sums"))
    result.weight_sums = read_checked<double>(file, group + "weight_sums", 0, {heads});
  if (file.exists(group + "contest_tokens"))
    result.contest_tokens = file.read<int64_t>(group + "contest_tokens", 1);
  require_together(result, file.path() + ": layer " + std::to_string(layer));
  return result;
}

}  // namespace oscar
