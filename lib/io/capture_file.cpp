#include "io/capture_file.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/finite.h"
#include "base/float16.h"
#include "base/parallel.h"
#include "io/capture_schema.h"
#include "io/exclusive_file.h"
#include "io/hdf5_file.h"
#include "io/layer_names.h"

namespace oscar {
namespace {

constexpr size_t kTargetChunkBytes = 512U << 10;
constexpr size_t kConvertGrain = 1U << 18;  // elements converted by one work item

// Rows of a chunk: about kTargetChunkBytes, a power of two, so that usual sequence lengths fill
// chunks exactly.
size_t chunk_rows(size_t row_bytes) {
  size_t rows = 1024;
  while (rows > 16 && rows * row_bytes > kTargetChunkBytes) rows /= 2;
  return rows;
}

// Name of the first attribute in which two captures differ, or an empty text.
std::string first_difference(const CaptureInfo& a, const CaptureInfo& b) {
  if (a.model_architecture != b.model_architecture) return "model_architecture";
  if (a.model_sha256 != b.model_sha256) return "model_sha256";
  if (a.tokenizer_sha256 != b.tokenizer_sha256) return "tokenizer_sha256";
  if (a.text_sha256 != b.text_sha256) return "text_sha256";
  if (a.tool_version != b.tool_version) return "tool_version";
  if (a.options_json != b.options_json) return "options";
  if (a.head_dim != b.head_dim) return "head_dim";
  if (a.num_layers != b.num_layers) return "num_layers";
  if (a.num_heads != b.num_heads) return "num_heads";
  if (a.num_kv_heads != b.num_kv_heads) return "num_kv_heads";
  if (a.rope_theta != b.rope_theta) return "rope_theta";
  if (a.rope_json != b.rope_json) return "rope";
  if (a.bf16 != b.bf16) return "dtype";
  if (a.has_outputs != b.has_outputs) return "has_outputs";
  return {};
}

}  // namespace

struct CaptureWriter::State {
  std::unique_ptr<const LockFile> lock;  // first: goes after the file is closed
  std::string final_path, part_path;
  CaptureInfo info;
  Hdf5File file;
  std::set<int64_t> layers;  // known after the first sequence
  std::set<int64_t> layers_appended;
  size_t num_sequences = 0;  // whole ones
  size_t tokens_done = 0;    // in whole sequences
  std::vector<int32_t> sequence_tokens;
  bool in_sequence = false;
  std::vector<uint16_t> bf16_rows;

  // A file of ours with no sequence yet.
  static Hdf5File create(const std::string& path, const CaptureInfo& info) {
    Hdf5File file = Hdf5File::create(path);
    write_capture_info(file, info);
    file.create_group("/layers");
    file.create_growing("/token_ids", Hdf5Type::kInt32, {}, 4096);
    file.create_growing("/positions", Hdf5Type::kInt32, {}, 4096);
    file.create_growing("/sequence_offsets", Hdf5Type::kInt64, {}, 1024);
    const int64_t zero = 0;
    file.set_rows("/sequence_offsets", 1);
    file.write_rows("/sequence_offsets", 0, 1, &zero);
    file.flush();
    return file;
  }

  void check_finite(int64_t layer, CaptureTensor tensor, const float* values, size_t row) const {
    const size_t count = sequence_tokens.size() * row;
    const size_t bad = first_non_finite(values, count);
    OSCAR_CHECK(bad == count, "capture: layer ", layer, ", tensor ", tensor_name(tensor),
                ": non-finite value at token ", bad / row, " of sequence ", num_sequences,
                ", head ", bad % row / static_cast<size_t>(info.head_dim));
  }

  void append_rows(int64_t layer, CaptureTensor tensor, const float* values) {
    const size_t heads = capture_heads(info, tensor), dim = static_cast<size_t>(info.head_dim);
    const size_t row = heads * dim, count = sequence_tokens.size() * row;
    check_finite(layer, tensor, values, row);
    const std::string name = capture_dataset(layer, tensor);
    const size_t item_bytes = info.bf16 ? sizeof(uint16_t) : sizeof(float);
    if (!file.exists(name)) {
      file.create_growing(name, info.bf16 ? Hdf5Type::kUint16 : Hdf5Type::kFloat32, {heads, dim},
                          chunk_rows(row * item_bytes));
      file.write_attribute(name, "dtype", std::string(info.bf16 ? "bfloat16" : "float32"));
    }
    file.set_rows(name, tokens_done + sequence_tokens.size());
    if (!info.bf16) {
      file.write_rows(name, tokens_done, sequence_tokens.size(), values);
      return;
    }
    bf16_rows.resize(count);
    parallel_for_ranges(count, kConvertGrain, [&](size_t begin, size_t end) {
      float_to_bf16(values + begin, end - begin, bf16_rows.data() + begin);
    });
    file.write_rows(name, tokens_done, sequence_tokens.size(), bf16_rows.data());
  }
};

namespace {

// The unfinished capture at part_path, or null when there is none worth continuing.
std::unique_ptr<CaptureReader> open_unfinished(const std::string& part_path,
                                               const CaptureInfo& info) {
  if (!std::filesystem::exists(part_path)) return nullptr;
  try {
    const Hdf5File file = Hdf5File::open(part_path);
    const std::string difference = first_difference(read_capture_info(file), info);
    OSCAR_CHECK(difference.empty(), "it was made with another ", difference);
    if (file.int_attribute("/", "sequences_complete") == 0) return nullptr;
    return std::make_unique<CaptureReader>(part_path);
  } catch (const Error& error) {
    fail(part_path, ": cannot continue this unfinished capture: ", error.what(),
         "; use the same options or delete it");
  }
}

}  // namespace

// What was whole is copied into a fresh file: a process that was killed while it flushed may have
// left index entries behind that nothing describes, so the old file is read but never written
// again.
CaptureWriter::CaptureWriter(const std::string& path, const CaptureInfo& info) {
  check_capture_geometry(info, path);
  const std::string part = path + ".part", fresh = part + ".new";
  auto lock = std::make_unique<const LockFile>(part + ".lock");
  const std::unique_ptr<CaptureReader> unfinished = open_unfinished(part, info);
  state_.reset(new State{.lock = std::move(lock),
                         .final_path = path,
                         .part_path = part,
                         .info = info,
                         .file = State::create(fresh, info),
                         .layers = {},
                         .layers_appended = {},
                         .sequence_tokens = {},
                         .bf16_rows = {}});
  if (unfinished != nullptr) copy_sequences(*unfinished);
  std::filesystem::rename(fresh, part);
}

void CaptureWriter::copy_sequences(const CaptureReader& source) {
  const auto& offsets = source.sequence_offsets();
  const auto& ids = source.token_ids();
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const int64_t begin = offsets[s], end = offsets[s + 1];
    begin_sequence({ids.begin() + begin, ids.begin() + end});
    for (const int64_t layer : source.layers()) {
      const auto rows = [&](CaptureTensor tensor) {
        return source.read(layer, tensor, begin, end);
      };
      const std::vector<float> o =
          state_->info.has_outputs ? rows(CaptureTensor::kO) : std::vector<float>{};
      append(layer, rows(CaptureTensor::kQ).data(), rows(CaptureTensor::kK).data(),
             rows(CaptureTensor::kV).data(), state_->info.has_outputs ? o.data() : nullptr);
    }
    end_sequence();
  }
}

CaptureWriter::~CaptureWriter() = default;

size_t CaptureWriter::sequences_done() const { return state_->num_sequences; }

std::vector<int32_t> CaptureWriter::token_ids_done() const {
  std::vector<int32_t> ids(state_->tokens_done);
  if (!ids.empty()) state_->file.read_rows("/token_ids", 0, ids.size(), ids.data());
  return ids;
}

void CaptureWriter::begin_sequence(const std::vector<int32_t>& token_ids) {
  OSCAR_CHECK(!state_->in_sequence, "capture: begin_sequence before end_sequence");
  OSCAR_CHECK(!token_ids.empty(), "capture: a sequence needs at least one token");
  state_->sequence_tokens = token_ids;
  state_->layers_appended.clear();
  state_->in_sequence = true;
}

void CaptureWriter::append(int64_t layer, const float* q, const float* k, const float* v,
                           const float* o) {
  State& state = *state_;
  OSCAR_CHECK(state.in_sequence, "capture: append outside a sequence");
  OSCAR_CHECK(layer >= 0, "capture: negative layer ", layer);
  OSCAR_CHECK((o != nullptr) == state.info.has_outputs, "capture: attention outputs ",
              state.info.has_outputs ? "expected but not given" : "given but not declared");
  OSCAR_CHECK(state.layers_appended.insert(layer).second, "capture: layer ", layer,
              " appended twice to one sequence");
  if (state.num_sequences == 0) {
    state.file.create_group(layer_group(layer));
    state.layers.insert(layer);
  }
  OSCAR_CHECK(state.layers.count(layer) == 1, "capture: layer ", layer,
              " was not in the first sequence");
  state.append_rows(layer, CaptureTensor::kQ, q);
  state.append_rows(layer, CaptureTensor::kK, k);
  state.append_rows(layer, CaptureTensor::kV, v);
  if (o != nullptr) state.append_rows(layer, CaptureTensor::kO, o);
}

void CaptureWriter::end_sequence() {
  State& state = *state_;
  OSCAR_CHECK(state.in_sequence, "capture: end_sequence outside a sequence");
  OSCAR_CHECK(state.layers_appended == state.layers && !state.layers.empty(), "capture: sequence ",
              state.num_sequences, " has ", state.layers_appended.size(), " layers, expected ",
              state.layers.size());
  const size_t length = state.sequence_tokens.size();
  std::vector<int32_t> positions(length);
  for (size_t i = 0; i < length; ++i) positions[i] = static_cast<int32_t>(i);
  const auto end = static_cast<int64_t>(state.tokens_done + length);
  state.file.set_rows("/token_ids", state.tokens_done + length);
  state.file.write_rows("/token_ids", state.tokens_done, length, state.sequence_tokens.data());
  state.file.set_rows("/positions", state.tokens_done + length);
  state.file.write_rows("/positions", state.tokens_done, length, positions.data());
  state.file.set_rows("/sequence_offsets", state.num_sequences + 2);
  state.file.write_rows("/sequence_offsets", state.num_sequences + 1, 1, &end);
  // Everything the new count promises is in the file before the count itself.
  state.file.flush();
  state.file.write_attribute("/", "sequences_complete",
                             static_cast<int64_t>(state.num_sequences + 1));
  state.file.flush();
  ++state.num_sequences;
  state.tokens_done += length;
  state.in_sequence = false;
}

void CaptureWriter::finish() {
  OSCAR_CHECK(!state_->in_sequence, "capture: finish inside a sequence");
  OSCAR_CHECK(state_->num_sequences > 0, "capture: no sequence was written");
  state_->file.close();
  std::error_code error;
  std::filesystem::rename(state_->part_path, state_->final_path, error);
  OSCAR_CHECK(!error, state_->final_path,
              ": cannot rename the finished capture: ", error.message());
}
}  // namespace oscar
