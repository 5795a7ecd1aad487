#include <algorithm>

#include "base/float16.h"
#include "base/parallel.h"
#include "io/capture_schema.h"
#include "io/layer_names.h"

namespace oscar {
namespace {

constexpr size_t kConvertGrain = 1U << 16;  // elements converted by one work item
constexpr size_t kReadElements = 4U << 20;  // elements read at once: bounds the 16-bit copy

CaptureTensor tensor_of(const std::string& name) {
  for (const CaptureTensor tensor : kCaptureTensors)
    if (name == tensor_name(tensor)) return tensor;
  fail("capture: unknown tensor \"", name, "\", expected q, k, v or o");
}

}  // namespace

struct CaptureReader::State {
  Hdf5File file;
  CaptureInfo info;
  std::vector<int64_t> layers, sequence_offsets;
  std::vector<int32_t> token_ids;
  mutable std::vector<uint16_t> bf16_rows;

  void read_sequences() {
    const std::string& path = file.path();
    const int64_t count = file.int_attribute("/", "sequences_complete");
    sequence_offsets = file.read<int64_t>("/sequence_offsets", 1).values;
    OSCAR_CHECK(count > 0 && static_cast<uint64_t>(count) < sequence_offsets.size(), path,
                ": sequences_complete is ", count, ", sequence_offsets has ",
                sequence_offsets.size(), " entries");
    sequence_offsets.resize(static_cast<size_t>(count) + 1);
    OSCAR_CHECK(sequence_offsets[0] == 0, path, ": /sequence_offsets must start at 0, got ",
                sequence_offsets[0]);
    for (size_t i = 1; i < sequence_offsets.size(); ++i)
      OSCAR_CHECK(sequence_offsets[i] > sequence_offsets[i - 1], path, ": /sequence_offsets[", i,
                  "] = ", sequence_offsets[i], " does not grow");
    token_ids = file.read<int32_t>("/token_ids", 1).values;
    const auto tokens = static_cast<size_t>(sequence_offsets.back());
    OSCAR_CHECK(token_ids.size() >= tokens, path, ": /token_ids has ", token_ids.size(),
                " entries, expected ", tokens);
    token_ids.resize(tokens);
  }

  void check_tensors() const {
    const auto tokens = static_cast<size_t>(sequence_offsets.back());
    OSCAR_CHECK(!layers.empty(), file.path(), ": the capture has no layers");
    for (const int64_t layer : layers) {
      OSCAR_CHECK(layer < info.num_layers, file.path(), ": layer ", layer, " in a model of ",
                  info.num_layers, " layers");
      for (const CaptureTensor tensor : kCaptureTensors) {
        if (tensor == CaptureTensor::kO && !info.has_outputs) continue;
        const std::string name = capture_dataset(layer, tensor);
        const Shape shape =
            file.checked_shape(name, info.bf16 ? Hdf5Type::kUint16 : Hdf5Type::kFloat32, 3);
        OSCAR_CHECK(shape[0] >= tokens && shape[1] == capture_heads(info, tensor) &&
                        shape[2] == static_cast<size_t>(info.head_dim),
                    file.path(), ": ", name, ": expected shape [", tokens, ", ",
                    capture_heads(info, tensor), ", ", info.head_dim, "], got ", to_string(shape));
      }
    }
  }
};

CaptureReader::CaptureReader(const std::string& path)
    : state_(new State{.file = Hdf5File::open(path),
                       .info = {},
                       .layers = {},
                       .sequence_offsets = {},
                       .token_ids = {},
                       .bf16_rows = {}}) {
  state_->info = read_capture_info(state_->file);
  state_->read_sequences();
  state_->layers = layer_ids(state_->file);
  state_->check_tensors();
}

CaptureReader::~CaptureReader() = default;
const CaptureInfo& CaptureReader::info() const { return state_->info; }
const std::string& CaptureReader::path() const { return state_->file.path(); }
std::vector<int64_t> CaptureReader::layers() const { return state_->layers; }
const std::vector<int64_t>& CaptureReader::sequence_offsets() const {
  return state_->sequence_offsets;
}
const std::vector<int32_t>& CaptureReader::token_ids() const { return state_->token_ids; }
size_t CaptureReader::num_heads(CaptureTensor tensor) const {
  return capture_heads(state_->info, tensor);
}

void CaptureReader::read_into(int64_t layer, CaptureTensor tensor, int64_t begin, int64_t end,
                              float* destination) const {
  const State& state = *state_;
  const int64_t tokens = state.sequence_offsets.back();
  OSCAR_CHECK(0 <= begin && begin <= end && end <= tokens, path(), ": tokens [", begin, ", ", end,
              ") asked for, the capture has ", tokens);
  OSCAR_CHECK(std::binary_search(state.layers.begin(), state.layers.end(), layer), path(),
              ": layer ", layer, " is not in the capture");
  OSCAR_CHECK(tensor != CaptureTensor::kO || state.info.has_outputs, path(),
              ": the capture has no attention outputs (capture with --outputs)");
  const std::string name = capture_dataset(layer, tensor);
  const auto first = static_cast<size_t>(begin), count = static_cast<size_t>(end - begin);
  if (!state.info.bf16) {
    state.file.read_rows(name, first, count, destination);
    return;
  }
  const size_t row = num_heads(tensor) * static_cast<size_t>(state.info.head_dim);
  const size_t block_tokens = std::max<size_t>(1, kReadElements / row);
  for (size_t done = 0; done < count; done += block_tokens) {
    const size_t block = std::min(block_tokens, count - done);
    state.bf16_rows.resize(std::max(state.bf16_rows.size(), block * row));
    state.file.read_rows(name, first + done, block, state.bf16_rows.data());
    parallel_for_ranges(block * row, kConvertGrain, [&](size_t from, size_t to) {
      bf16_to_float(state.bf16_rows.data() + from, to - from, destination + done * row + from);
    });
  }
}

std::vector<float> CaptureReader::read(int64_t layer, CaptureTensor tensor, int64_t begin,
                                       int64_t end) const {
  OSCAR_CHECK(0 <= begin && begin <= end && end <= state_->sequence_offsets.back(), path(),
              ": tokens [", begin, ", ", end, ") asked for, the capture has ",
              state_->sequence_offsets.back());
  std::vector<float> values(static_cast<size_t>(end - begin) * num_heads(tensor) *
                            static_cast<size_t>(state_->info.head_dim));
  read_into(layer, tensor, begin, end, values.data());
  return values;
}

std::vector<float> CaptureReader::read(int64_t layer, const std::string& tensor, int64_t begin,
                                       int64_t end) const {
  return read(layer, tensor_of(tensor), begin, end);
}

}  // namespace oscar
